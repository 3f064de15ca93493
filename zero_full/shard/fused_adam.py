"""Adam in one sweep: unscaling, clipping, the update and the low-precision copy touch each number once.

Torch does these one after the other, each a pass over memory, which is what they wait for. The sweep stands
in for a torch Adam or AdamW and keeps its options and its state as torch does; anything that could notice the
difference (a subclass, a hook, a variant that the operator does not know) gets torch's own step.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from zero_full.kernels.load import compiled_for, operators
from zero_full.precision.dtypes import Dtypes
from zero_full.shard.base import Base, steps_as_its_class
from zero_full.shard.bucket import Bucket, Owned
from zero_full.shard.flat import Member

GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
MASTERS = (torch.float32, torch.bfloat16)
VARIANTS = ("amsgrad", "maximize", "capturable", "differentiable", "foreach")
NUMBERS = ("lr", "eps", "weight_decay")


def is_plain_adam(base: torch.optim.Optimizer, step: Any = None) -> bool:
    """Whether its step (or `step`, if that is another) is torch's own and does no more than the operator."""
    is_adam = type(base) in (torch.optim.Adam, torch.optim.AdamW)
    if not is_adam or not steps_as_its_class(base, step or base.step):
        return False
    hooks = (
        base._optimizer_step_pre_hooks,
        base._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    return not any(hooks) and all(_is_plain_group(group) for group in base.param_groups)


def _is_plain_group(group: Mapping[str, Any]) -> bool:
    plain = not any(group.get(variant) for variant in VARIANTS) and group.get("fused") is not False
    numbers = [*(group[name] for name in NUMBERS), *group["betas"]]
    return plain and not any(isinstance(number, Tensor) for number in numbers)


class FusedAdam:
    """Steps buckets in the place of a torch optimizer."""

    def __init__(self, redirected: Base, dtypes: Dtypes) -> None:
        self.redirected, self.base, self.dtypes = redirected, redirected.optimizer, dtypes

    def takes(self, buckets: Sequence[Bucket]) -> bool:
        """Whether it can, for all of them, and is faster than torch, or says something that torch cannot."""
        return is_plain_adam(self.base, self.redirected.own_step) and all(
            self._takes(bucket) for bucket in buckets
        )

    def _takes(self, bucket: Bucket) -> bool:
        master = bucket.master.dtype
        if master not in MASTERS or bucket.accumulate not in GRADIENTS:
            return False
        return compiled_for(bucket.master.device) or self.dtypes.moments_of(master) != master

    def step(self, bucket: Bucket, factor: float, used: Container[Member]) -> None:
        """Gradients count times `factor`. Masters, state and this rank's slice of the parameters change.

        `used` are the parameters that have a gradient on any rank; the others stay as they are.
        """
        for number, group in enumerate(self.base.param_groups):
            owned = [each for each in bucket.owned if each.member.group == number and each.member in used]
            if owned:
                self._step_group(bucket, owned, group, factor)

    def _step_group(
        self, bucket: Bucket, owned: Sequence[Owned], group: Mapping[str, Any], factor: float
    ) -> None:
        states = [self._state_of(each.master) for each in owned]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        operators().adam_step(
            [each.master for each in owned],
            [_gradient(bucket, each) for each in owned],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            steps,
            bucket.own_views(owned),
            group["lr"],
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            group.get("decoupled_weight_decay", False),
            factor,
        )

    def _state_of(self, master: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.base.state[master]
        if not state:
            moments = self.dtypes.moments_of(master.dtype)
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"] = torch.zeros_like(master, dtype=moments)
            state["exp_avg_sq"] = torch.zeros_like(master, dtype=moments)
        if state["step"].device != master.device or state["step"].dtype != torch.float32:
            state["step"] = state["step"].to(master.device, torch.float32)
        return state


def _gradient(bucket: Bucket, owned: Owned) -> Tensor:
    gradient = bucket.gradient_of(owned)
    assert gradient is not None
    return gradient.contiguous()


def sub_groups(buckets: Sequence[Bucket], limit: int | None) -> list[list[Bucket]]:
    """Neighbours together, as many as own `limit` elements on this rank, but at least one; None: all."""
    if limit is None:
        return [list(buckets)]
    together: list[list[Bucket]] = []
    room = 0
    for bucket in buckets:
        if not together or bucket.layout.shard > room:
            together.append([])
            room = limit
        together[-1].append(bucket)
        room -= bucket.layout.shard
    return together
