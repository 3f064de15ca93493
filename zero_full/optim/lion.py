"""Lion: updates by the sign of an interpolated momentum, with half of Adam's state."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from zero_full.optim.arguments import arguments_of, checked_options
from zero_full.optim.step import loss_of


class Lion(Optimizer):
    """Moves every element by `lr` against the sign of its momentum, interpolated with the newest gradient.

    The defaults are DeepSpeed's. An element whose momentum and gradient are zero does not move.
    """

    zero_full_elementwise = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, checked_options(Lion, arguments_of(locals()), str))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = loss_of(closure)
        for group in self.param_groups:
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                momentum = state["exp_avg"]
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(momentum.lerp(p.grad, 1 - beta1).sign_(), alpha=-lr)
                momentum.lerp_(p.grad, 1 - beta2)
        return loss
