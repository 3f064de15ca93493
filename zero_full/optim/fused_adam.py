"""Fused Adam: unscaling, clipping, the update and the low-precision copy in one pass over memory.

torch makes a pass for each of these, and memory bandwidth is what they wait for. The fused step replaces that
of a torch Adam or AdamW and keeps its options and its state in torch's form. An optimizer that would behave
differently (a subclass, an overridden step, a variant that the operator lacks) is stepped by torch.
"""

import hashlib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_full._compat import clean_name, foreach_add
from zero_full.kernels.load import compiled_for, operators
from zero_full.kernels.ops import DTYPES
from zero_full.optim.arguments import check_fixed, flag
from zero_full.optim.step import (
    Kind,
    Peers,
    Piece,
    Stepper,
    by_kind,
    loss_of,
    moments_of,
    operators_for,
    steps_as_its_class,
)
from zero_full.precision.dtypes import Dtypes

MASTERS = (torch.float32, torch.bfloat16)
VARIANTS = ("amsgrad", "maximize", "capturable", "differentiable", "foreach")


class FusedAdam(torch.optim.Adam):
    """Adam with the arguments and defaults of DeepSpeed's FusedAdam and DeepSpeedCPUAdam.

    params, lr, betas, eps   as torch's
    bias_correction          divide the moments by 1 - beta**step; False: use them as they are
    adam_w_mode              decoupled weight decay, as in AdamW; False: L2, as in Adam
    weight_decay             0, where torch's AdamW has 0.01
    amsgrad                  not supported, as in DeepSpeed: must be False
    """

    zero_full_elementwise = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
    ) -> None:
        check_fixed({"amsgrad": amsgrad}, {"amsgrad": "use torch.optim.Adam or AdamW for this variant"})
        decoupled = flag("adam_w_mode", adam_w_mode)
        super().__init__(params, lr, betas, eps, weight_decay, decoupled_weight_decay=decoupled)
        self.defaults["bias_correction"] = flag("bias_correction", bias_correction)
        for group in self.param_groups:
            group.setdefault("bias_correction", self.defaults["bias_correction"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have gradients, by the compiled operator where it is available."""
        loss = loss_of(closure)
        pieces = [
            Piece("", p.shape, (0, p.numel()), number, p, p.grad, state=self.state[p])
            for number, group in enumerate(self.param_groups)
            for p in group["params"]
            if p.grad is not None
        ]
        for some in by_kind(pieces):
            group = self.param_groups[some[0].group]
            fused_step(operators_for(some), some, some[0].master.dtype, group, 1.0)
        return loss


ADAMS = (torch.optim.Adam, torch.optim.AdamW, FusedAdam)


def is_plain_adam(base: Optimizer, step: Any = None) -> bool:
    """Return whether the step of `base` (or `step`) is torch's or FusedAdam's: the operator does the same."""
    if type(base) not in ADAMS or not steps_as_its_class(base, step or base.step):
        return False
    for group in base.param_groups:
        if group.get("fused") is False:
            return False
        for variant in VARIANTS:
            if group.get(variant):
                return False
        for number in (group["lr"], group["eps"], group["weight_decay"], *group["betas"]):
            if isinstance(number, Tensor):
                return False
    return True


def warn_if_second_moments_stall(base: Optimizer, dtypes: Dtypes) -> None:
    """Warn if Adam's second moment would be kept in too few bits to become smaller.

    A step with a zero gradient reduces it by the factor 1 - beta2. A change of less than half the distance to
    the next number is rounded away.
    """
    if not isinstance(base, torch.optim.Adam) or dtypes.rounding_seed is not None:  # and AdamW
        return
    for group in base.param_groups:
        for dtype in {p.dtype for p in group["params"] if p.is_floating_point()}:
            moments = dtypes.moments_of(dtypes.master_of(dtypes.of(dtype)))
            beta2, least = float(group["betas"][1]), torch.finfo(moments).eps / 2
            if 1 - beta2 < least:
                warnings.warn(
                    f"betas: beta2 = {beta2} is too high for Adam's second moments in {moments}. A step "
                    f"reduces them by at most 1 - beta2 of their value, which is less than {least} and is "
                    "rounded away. So steps stay as small as the largest gradient has made them. Use a beta2 "
                    f"of {1 - least} or less, or moments in fp32",
                    stacklevel=3,
                )


class FusedAdamStep(Stepper):
    """Steps pieces by the fused operator, instead of by the `step` of a torch Adam or AdamW."""

    fuses = adopts = marks_changes = is_alone = True
    takes_parts: bool = True
    ranks_differ: bool = False

    def __init__(self, base: Optimizer, own_step: Any, dtypes: Dtypes) -> None:
        self.base, self.own_step = base, own_step
        self.groups: Sequence[Mapping[str, Any]] | None = None  # None: the groups of `base`, as they are now
        self.moments = {master: dtypes.moments_of(master) for master in MASTERS}
        self.compiled_for: Callable[[torch.device], bool] = compiled_for
        self.rounding_keys = None if dtypes.rounding_seed is None else RoundingKeys(dtypes.rounding_seed)
        if self.rounding_keys is not None:
            self._check_stochastic_rounding([])
        warn_if_second_moments_stall(base, dtypes)

    def takes(self, kinds: Collection[Kind]) -> bool:
        """Return whether this stepper, and not torch's own step, steps masters of these kinds.

        This is asked before each step, because the groups' options may have been edited. torch's step is as
        good where moments have the master's dtype and this device has no compiled operators.
        """
        if self.rounding_keys is not None:
            self._check_stochastic_rounding(kinds)
        if not is_plain_adam(self.base, self.own_step):
            return False
        for master, gradient, device in kinds:
            if master not in MASTERS or gradient not in DTYPES:
                return False
            needs_ours = self.rounding_keys is not None or self.moments[master] != master
            if not (needs_ours or self.compiled_for(device)):
                return False
        return True

    def _check_stochastic_rounding(self, kinds: Collection[Kind]) -> None:
        """Raise TypeError if another stepper, which would round to the nearest, would take the step."""
        if not is_plain_adam(self.base, self.own_step):
            raise TypeError(
                f"bf16.stochastic_rounding does not support this {type(self.base).__name__}. Use "
                f"torch.optim.Adam or AdamW without an overridden step, {', '.join(VARIANTS)}, fused=False "
                "or options in tensors"
            )
        for master, gradient, _ in kinds:
            if master not in MASTERS or gradient not in DTYPES:
                raise TypeError(
                    f"bf16.stochastic_rounding does not support masters in {master} with gradients in "
                    f"{gradient}: masters must be bf16 or fp32, gradients bf16, fp16 or fp32"
                )

    def step(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        """Update masters, state and copies: one call of the operator for each kind of pieces."""
        groups = self.base.param_groups if self.groups is None else self.groups
        for some in by_kind(pieces):
            master = some[0].master
            rounding_keys = self.rounding_keys if master.dtype == torch.bfloat16 else None
            by, moments = operators(master.device), self.moments[master.dtype]
            fused_step(by, some, moments, groups[some[0].group], factor, rounding_keys)

    def with_these_options(self) -> "FusedAdamStep":
        """Copy this rule with the groups' present options, lists such as `betas` included."""
        made = copy(self)
        made.groups = [{key: copy(value) for key, value in g.items()} for g in self.base.param_groups]
        return made

    def state_dict(self) -> dict[str, Any]:
        """Return the seed of stochastic rounding."""
        return {} if self.rounding_keys is None else {"rounding_seed": self.rounding_keys.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the saved seed, not the configured one: rounding is that of an uninterrupted run."""
        if self.rounding_keys is not None and "rounding_seed" in state:
            self.rounding_keys = RoundingKeys(int(state["rounding_seed"]))


class RoundingKeys:
    """Keys of stochastic rounding: the random bits depend on parameter, step and element."""

    def __init__(self, seed: int) -> None:
        self.seed, self.keys = seed, dict[str, int]()

    def key(self, name: str) -> int:
        """Return the 64-bit key of a parameter, equal on all ranks."""
        if name not in self.keys:
            made = hashlib.blake2b(f"{self.seed} {clean_name(name)}".encode(), digest_size=8).digest()
            self.keys[name] = int.from_bytes(made, "little", signed=True)
        return self.keys[name]


def fused_step(
    by: Any,
    pieces: Sequence[Piece],
    moments: torch.dtype,
    group: Mapping[str, Any],
    factor: float,
    rounding_keys: RoundingKeys | None = None,
) -> None:
    """Update pieces of one kind with a group's options, by one call of `adam_step` of these operators.

    `moments`: the dtype of moments that do not exist yet. `rounding_keys`: round bf16 stochastically with
    these.
    """
    masters, gradients, averages, squares = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
    steps, copies, changed = list[Tensor](), list[Tensor](), list[Tensor]()
    keys, places = list[int](), list[int]()
    for piece, state in zip(pieces, moments_of(pieces, moments), strict=True):
        assert piece.gradient is not None
        masters.append(piece.master)
        gradients.append(piece.gradient.contiguous())
        averages.append(state["exp_avg"])
        squares.append(state["exp_avg_sq"])
        steps.append(state["step"])
        if piece.copy is not None:
            copies.append(piece.copy)
        if piece.changed is not None:
            changed.append(piece.changed)
        if rounding_keys is not None:
            keys.append(rounding_keys.key(piece.name))
            places.append(piece.param_range[0])
    # On a CPU torch takes a quarter of the time to add a list of tensors as to add one number.
    foreach_add(steps, [steps[0].new_ones(())] * len(steps) if steps[0].is_cpu else 1)
    (by.adam_step if rounding_keys is None else by.adam_step_stochastic)(
        *(masters, gradients, averages, squares, steps),
        *((copies,) if rounding_keys is None else (keys, places)),
        float(group["lr"]),
        *group["betas"],
        group["eps"],
        group["weight_decay"],
        group.get("decoupled_weight_decay", False),
        factor,
        group.get("bias_correction", True),
        **({"changed": changed} if changed else {}),
    )
