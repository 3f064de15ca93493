"""LAMB in plain PyTorch, tensor by tensor and in fp64: what every other LAMB is compared with."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

OPTIONS: dict[str, Any] = {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}


class PlainLamb:
    """The formula, tensor by tensor, in fp64, on masters in `kept`."""

    def __init__(self, groups: list[dict[str, Any]], **more: Any) -> None:
        defaults = {**OPTIONS, "bias_correction": True, "eps_inside_sqrt": False}
        defaults |= {"min_coeff": 0.01, "max_coeff": 10.0, **more}
        self.groups = [{**defaults, **group} for group in groups]
        self.state: dict[Tensor, dict[str, Any]] = {}
        self.coeffs: list[float] = []

    @torch.no_grad()
    def step(self) -> None:
        self.coeffs = []
        for group in self.groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state.setdefault(p, {"t": 0, "m": 0.0, "v": 0.0})
                self.coeffs.append(self._step_one(p, state, group))

    def _step_one(self, p: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> float:
        (beta1, beta2), g, w = group["betas"], p.grad.double(), p.double()  # type: ignore[union-attr]
        state["t"] += 1
        state["m"] = m = beta1 * state["m"] + (1 - beta1) * g
        state["v"] = v = beta2 * state["v"] + (1 - beta2) * g * g
        root = (v + group["eps"]).sqrt() if group["eps_inside_sqrt"] else v.sqrt() + group["eps"]
        update = m / root + group["weight_decay"] * w
        ratio = 1.0
        if w.norm() > 0 and update.norm() > 0:
            ratio = min(max(float(w.norm() / update.norm()), group["min_coeff"]), group["max_coeff"])
        t, lr = state["t"], group["lr"]
        size = lr * (1 - beta2**t) ** 0.5 / (1 - beta1**t) if group["bias_correction"] else lr
        p.copy_(w - size * ratio * update)
        return ratio
