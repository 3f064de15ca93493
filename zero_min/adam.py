"""Step 0. Adam, and where sixteen bytes per parameter go.

Training holds four numbers for each parameter: the parameter, its gradient, and Adam's two running
averages. In fp32 that is 4 + 4 + 8 bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_min.comm import Comm

Groups = Sequence[Mapping[str, Any]]


class Adam:
    """Adam over groups of tensors; every group may override lr, betas, eps and weight_decay."""

    decoupled = False  # weight decay is added to the gradient

    def __init__(
        self,
        groups: Groups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        for group in groups:
            unknown = sorted(set(group) - set(defaults) - {"params"})
            if unknown:
                raise ValueError(
                    f"unknown option {', '.join(unknown)}; a group may set {', '.join(defaults)}"
                )
        self.groups: list[dict[str, Any]] = [{**defaults, **group} for group in groups]
        self.steps = 0
        params = [p for group in self.groups for p in group["params"]]
        # Two more numbers for each parameter: this is the memory that stage 1 goes after.
        self.m = {p: torch.zeros_like(p, requires_grad=False) for p in params}
        self.v = {p: torch.zeros_like(p, requires_grad=False) for p in params}

    @torch.no_grad()
    def step(self) -> None:
        """Move every tensor that has a gradient."""
        self.steps += 1
        for group in self.groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update_one(p, p.grad, self.m[p], self.v[p], group)

    def update_one(self, p: Tensor, g: Tensor, m: Tensor, v: Tensor, group: Mapping[str, Any]) -> None:
        """Adam's formula, in place: p moves, m and v remember."""
        # --8<-- [start:ex_adam]
        lr, (beta1, beta2), eps, decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
        if self.decoupled:
            p.mul_(1 - lr * decay)  # AdamW: shrink the weight itself
        elif decay:
            g = g + decay * p  # Adam: a pull towards zero, mixed into the gradient
        m.mul_(beta1).add_(g, alpha=1 - beta1)  # average gradient
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)  # average squared gradient
        m_hat_scale = 1 / (1 - beta1**self.steps)  # both start at zero: correct for it
        v_hat_scale = 1 / (1 - beta2**self.steps)
        p.addcdiv_(m, (v * v_hat_scale).sqrt_().add_(eps), value=-lr * m_hat_scale)
        # --8<-- [end:ex_adam]

    def state(self) -> list[Tensor]:
        """The tensors Adam keeps between steps."""
        return [*self.m.values(), *self.v.values()]

    def state_dict(self) -> dict[str, Any]:
        """What Adam has learned: the step count and both averages. Options such as lr are the caller's."""
        averages = [[(self.m[p].clone(), self.v[p].clone()) for p in g["params"]] for g in self.groups]
        return {"steps": self.steps, "averages": averages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`'s answer."""
        self.steps = state["steps"]
        for group, averages in zip(self.groups, state["averages"], strict=True):
            for p, (m, v) in zip(group["params"], averages, strict=True):
                self.m[p].copy_(m)
                self.v[p].copy_(v)


class AdamW(Adam):
    """Adam with decoupled weight decay."""

    decoupled = True


@torch.no_grad()
def clip_by_global_norm(grads: Iterable[Tensor], max_norm: float, comm: Comm | None = None) -> float:
    """Scale the gradients so that their norm over *all* ranks is at most `max_norm`.

    Give `comm` when each rank holds only its own slices: then nobody can know the norm alone.
    """
    grads = list(grads)
    square = torch.zeros((), dtype=torch.float64, device=comm.device if comm else None)
    for g in grads:
        square += g.double().square().sum().to(square.device)
    if comm is not None:
        comm.all_reduce(square)  # one number, but a global one
    norm = float(square.sqrt())
    scale = min(1.0, max_norm / (norm + 1e-6))
    for g in grads:
        g.mul_(scale)
    return norm
