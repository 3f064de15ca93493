"""Measure the bytes of optimizer state per element, before memory for the state is allocated."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_full.optim.elementwise import own_stepper
from zero_full.optim.fused_adam import is_plain_adam
from zero_full.optim.step import Peers, Piece, Stepper, TorchStep
from zero_full.precision.dtypes import Dtypes

SHAPE = torch.Size((2, 4))  # of the parameter of the trial step: a matrix, as Muon wants one


def state_bytes(base: Optimizer, group: int, master: torch.dtype, dtypes: Dtypes) -> int | None:
    """Return the bytes of state per element for this group and dtype of masters. None: unknown.

    A copy of the optimizer takes a step on a few zeros. Only classes of torch and zero_full are tried: a
    user's class may have side effects.
    """
    if is_plain_adam(base):
        return 2 * dtypes.moments_of(master).itemsize
    if type(base).__module__.split(".")[0] not in ("torch", "zero_full"):
        return None
    try:
        state = _state_after_a_step(_twin_of(base), group, master)
    except Exception:  # the first real step will raise it, with the names of parameters
        return None
    return sum(v.nbytes for v in state.values() if isinstance(v, Tensor) and v.dim()) // SHAPE.numel()


def can_step_in_parts(base: Optimizer) -> bool:
    """Return whether the optimizer can step a part of its parameters at a time."""
    try:
        return _stepper_of(_twin_of(base)).takes_parts
    except TypeError:  # raised again when the run is assembled
        return False


def _stepper_of(twin: Optimizer) -> Stepper:
    return own_stepper(twin, twin.step) or TorchStep(twin, twin.step)


def _twin_of(base: Optimizer) -> Optimizer:
    """Copy the optimizer with its options, but without parameters, state and an overridden `step`."""
    twin: Optimizer = object.__new__(type(base))
    mine = {key: value for key, value in vars(base).items() if key != "step"}
    groups = [{**group, "params": []} for group in base.param_groups]
    vars(twin).update({**mine, "state": defaultdict(dict), "param_groups": groups})
    return twin


@torch.no_grad()
def _state_after_a_step(twin: Optimizer, group: int, master: torch.dtype) -> dict[str, Any]:
    zeros = torch.zeros(SHAPE, dtype=master)
    piece = Piece("", SHAPE, (0, SHAPE.numel()), group, zeros, torch.zeros_like(zeros))
    state: dict[str, Any] = twin.state[zeros]
    piece.state = state
    stepper = _stepper_of(twin)
    stepper.begin([piece])
    stepper.step([piece], 1.0, Peers())
    stepper.end()
    return state
