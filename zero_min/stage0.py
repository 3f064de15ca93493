"""Step 0, on several ranks. Plain data parallelism: everyone holds everything.

This is the bill that ZeRO cuts: 16 bytes a parameter on every rank, however many ranks there are.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero_min.adam import Adam, Groups, clip_by_global_norm
from zero_min.comm import Comm


def trainable_groups(model: nn.Module, groups: Groups | None) -> list[dict[str, Any]]:
    """The parameter groups without their frozen members, after a check of what sharding relies on."""
    names = {p: name for name, p in model.named_parameters()}
    groups = groups if groups is not None else [{"params": list(model.parameters())}]
    result: list[dict[str, Any]] = []
    seen: set[Tensor] = set()
    for group in groups:
        params = [p for p in group["params"] if p.requires_grad]
        strangers = [tuple(p.shape) for p in params if p not in names]
        if strangers:
            raise ValueError(f"a parameter of shape {strangers[0]} is in a group but not in the model")
        for p in params:
            if p in seen:
                raise ValueError(f"parameter {names[p]!r} is listed twice in the groups")
            if p.dtype != params[0].dtype:
                raise ValueError(
                    f"one group mixes dtypes: {names[params[0]]!r} is {params[0].dtype}, {names[p]!r} is "
                    f"{p.dtype}; give each dtype a group of its own"
                )
            seen.add(p)
        result.append({**group, "params": params})
    return result


class Stage0:
    """Nothing is sharded: every rank holds parameters, gradients and Adam's state in full."""

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        groups: Groups | None = None,
        optimizer: type[Adam] = Adam,
        max_grad_norm: float | None = None,
        **options: Any,
    ) -> None:
        self.model, self.comm, self.max_grad_norm = model, comm, max_grad_norm
        param_groups = trainable_groups(model, groups)
        self.params: list[Tensor] = [p for group in param_groups for p in group["params"]]
        for p in self.params:
            p.data = comm.broadcast(p.data.contiguous())  # everyone starts from rank 0's values
        self.optimizer = optimizer(param_groups, **options)

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradients; nothing travels yet."""
        loss.backward()

    # --8<-- [start:stage0_step]
    @torch.no_grad()
    def step(self) -> float | None:
        """Average the gradients, then make the same Adam step on every rank. Returns the clipped norm."""
        for p in self.params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # unused here, perhaps used elsewhere
            self.comm.all_reduce(p.grad).div_(self.comm.world_size)  # 2(N-1)/N n
        norm = None
        if self.max_grad_norm is not None:
            norm = clip_by_global_norm(
                [p.grad for p in self.params if p.grad is not None], self.max_grad_norm
            )
        self.optimizer.step()
        return norm

    # --8<-- [end:stage0_step]

    def zero_grad(self) -> None:
        """Let go of the gradients."""
        for p in self.params:
            p.grad = None

    def holdings(self) -> dict[str, list[Tensor | None]]:
        """What this rank keeps, by kind."""
        return {
            "parameters": list(self.model.parameters()),
            "gradients": [p.grad for p in self.params],
            "optimizer": list(self.optimizer.state()),
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a checkpoint."""
        return {
            "model": {k: t.clone() for k, t in self.model.state_dict().items()},
            "adam": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this rank's part."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["adam"])
