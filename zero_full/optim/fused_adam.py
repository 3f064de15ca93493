"""Adam in one sweep: unscaling, clipping, the update and the low-precision copy touch each number once.

Torch does these one after the other, each a pass over memory, which is what they wait for. The sweep stands
in for a torch Adam or AdamW and keeps its options and its state as torch does; anything that could notice the
difference (a subclass, another step, a variant that the operator does not know) gets torch's own step.
"""

import hashlib
import warnings
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_full._compat import foreach_add, plain
from zero_full.kernels.load import compiled_for, operators
from zero_full.optim.step import Kind, Peers, Piece, Stepper, alike, moments_of, steps_as_its_class
from zero_full.precision.dtypes import Dtypes

GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
MASTERS = (torch.float32, torch.bfloat16)
VARIANTS = ("amsgrad", "maximize", "capturable", "differentiable", "foreach")
NUMBERS = ("lr", "eps", "weight_decay")


def is_plain_adam(base: Optimizer, step: Any = None) -> bool:
    """Whether its step (or `step`, if that is another) is torch's own and does no more than the operator."""
    is_adam = type(base) in (torch.optim.Adam, torch.optim.AdamW)
    if not is_adam or not steps_as_its_class(base, step or base.step):
        return False
    return all(_is_plain_group(group) for group in base.param_groups)


def _is_plain_group(group: Mapping[str, Any]) -> bool:
    plain = not any(group.get(variant) for variant in VARIANTS) and group.get("fused") is not False
    numbers = [*(group[name] for name in NUMBERS), *group["betas"]]
    return plain and not any(isinstance(number, Tensor) for number in numbers)


def warn_of_second_moments_that_stay(base: Optimizer, dtypes: Dtypes) -> None:
    """Warn if Adam's second moment would be kept in too few bits to become smaller.

    A step without a gradient makes it (1 - beta2) of itself smaller, and a change of less than half of the
    distance to the next number is rounded away.
    """
    if not isinstance(base, torch.optim.Adam) or dtypes.rounding_seed is not None:  # and AdamW
        return
    for group in base.param_groups:
        for dtype in {p.dtype for p in group["params"] if p.is_floating_point()}:
            moments = dtypes.moments_of(dtypes.master_of(dtypes.of(dtype)))
            beta2, least = float(group["betas"][1]), torch.finfo(moments).eps / 2
            if 1 - beta2 < least:
                warnings.warn(
                    f"betas: with beta2 = {beta2} Adam's second moments in {moments} hardly ever become "
                    f"smaller: a change of 1 - beta2, which is less than {least}, is rounded away, so "
                    "steps stay as small as the largest gradient has made them. Use a beta2 of "
                    f"{1 - least} or less, or moments in fp32",
                    stacklevel=3,
                )


class FusedAdam(Stepper):
    """Steps pieces in the place of a torch optimizer."""

    fuses = is_alone = True

    def __init__(self, base: Optimizer, own_step: Any, dtypes: Dtypes) -> None:
        self.base, self.own_step, self.dtypes = base, own_step, dtypes
        self.groups: Sequence[Mapping[str, Any]] | None = None  # None: those of `base`, as they are
        self.compiled_for = compiled_for
        self.chances = None if dtypes.rounding_seed is None else Chances(dtypes.rounding_seed)
        self._refuse_what_rounds_to_the_nearest([])
        warn_of_second_moments_that_stay(base, dtypes)

    def takes(self, kinds: Collection[Kind]) -> bool:
        """Whether it can, for all of them, and is faster than torch, or says something that torch cannot."""
        self._refuse_what_rounds_to_the_nearest(kinds)
        return is_plain_adam(self.base, self.own_step) and all(self._takes(*kind) for kind in kinds)

    def _takes(self, master: torch.dtype, gradient: torch.dtype, device: torch.device) -> bool:
        if not _can(master, gradient):
            return False
        says_more = self.dtypes.moments_of(master) != master or self.chances is not None
        return says_more or self.compiled_for(device)

    def _refuse_what_rounds_to_the_nearest(self, kinds: Collection[Kind]) -> None:
        """Raise if stochastic rounding was asked for, and another step than this one would be taken."""
        if self.chances is None:
            return
        if not is_plain_adam(self.base, self.own_step):
            raise TypeError(
                "bf16.stochastic_rounding: only torch's Adam and AdamW are stepped so, without a step of "
                f"their own, {', '.join(VARIANTS)}, fused=False or options in tensors, and not this "
                f"{type(self.base).__name__}"
            )
        for master, gradient, _ in kinds:
            if not _can(master, gradient):
                raise TypeError(
                    f"bf16.stochastic_rounding: there is none for masters in {master} with gradients in "
                    f"{gradient}: masters must be in bf16 or fp32, gradients in 16 or 32 bits"
                )

    def step(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        """Masters, state and copies change."""
        for some in alike(pieces):
            master = some[0].master
            dtype, by = self.dtypes.moments_of(master.dtype), operators(master.device)
            chances = self.chances if master.dtype == torch.bfloat16 else None
            groups = self.base.param_groups if self.groups is None else self.groups
            sweep(by, some, dtype, groups[some[0].group], factor, chances)

    def with_these_options(self) -> "FusedAdam":
        """The same with the groups' options of now. A list among them (`betas`) may be written to later."""
        made = copy(self)
        made.groups = [{key: copy(value) for key, value in g.items()} for g in self.base.param_groups]
        return made

    def state_dict(self) -> dict[str, Any]:
        """The seed of stochastic rounding."""
        return {} if self.chances is None else {"rounding_seed": self.chances.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The seed that is saved counts, not the configuration's: who goes on rounds as if never stopped."""
        if self.chances is not None and "rounding_seed" in state:
            self.chances = Chances(int(state["rounding_seed"]))


def _can(master: torch.dtype, gradient: torch.dtype) -> bool:
    return master in MASTERS and gradient in GRADIENTS


class Chances:
    """What the operator draws from for each parameter, beside the step and the element."""

    def __init__(self, seed: int) -> None:
        self.seed, self.keys = seed, dict[str, int]()

    def key(self, name: str) -> int:
        """64 bits for a parameter, whichever rank has a piece of it."""
        if name not in self.keys:
            made = hashlib.blake2b(f"{self.seed} {plain(name)}".encode(), digest_size=8).digest()
            self.keys[name] = int.from_bytes(made, "little", signed=True)
        return self.keys[name]


def sweep(
    by: Any,
    pieces: Sequence[Piece],
    moments: torch.dtype,
    group: Mapping[str, Any],
    factor: float,
    chances: Chances | None = None,
) -> None:
    """Step pieces that are alike, with moments of this type and a group's options, by these operators."""
    states = [moments_of(piece, moments) for piece in pieces]
    steps = [state["step"] for state in states]
    foreach_add(steps, 1)
    lists: tuple[list[Any], ...] = (
        [piece.master for piece in pieces],
        [piece.gradient.contiguous() for piece in pieces if piece.gradient is not None],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        steps,
    )
    about: tuple[list[Any], ...]
    if chances is None:
        step, about = by.adam_step, ([piece.copy for piece in pieces if piece.copy is not None],)
    else:
        step = by.adam_step_stochastic
        about = ([chances.key(piece.name) for piece in pieces], [piece.param_range[0] for piece in pieces])
    step(
        *lists,
        *about,
        float(group["lr"]),
        *group["betas"],
        group["eps"],
        group["weight_decay"],
        group.get("decoupled_weight_decay", False),
        factor,
    )
