"""SOAP as a rule of a user's: Adam in the eigenbasis of Shampoo's factors, all of which an owner keeps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero_full import Peers, Piece, Stepper, Whole
from zero_full.optim.step import step_alone

BETA1, BETA2, EPS, RATE, EVERY = 0.9, 0.95, 1e-8, 0.01, 2


class Soap(torch.optim.Optimizer):
    """What has two dimensions is rotated; all else is Adam's."""

    def __init__(self, params: Any, lr: float = RATE) -> None:
        super().__init__(params, {"lr": lr})
        self.rule = SoapStep(self)

    def zero_full_stepper(self) -> Stepper:
        return self.rule

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return step_alone(self, closure)


class SoapStep(Stepper):
    """It is its own `OwnerRule`: gradients go to the owners, updates come back, and state stays there."""

    whole_entries = frozenset({"step", "first", "second", "left", "right", "rotate_left", "rotate_right"})  # type: ignore[assignment]
    wire = torch.float64

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.kept: dict[tuple[str, torch.Size, int], dict[str, Tensor]] = {}
        self.factor, self.alone = 1.0, 0

    @property
    def whole_rule(self) -> Any:
        return self

    def step(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        self.factor, self.alone = factor, 0
        peers.by_whole(pieces, self)

    def concerns(self, whole: Whole) -> bool:
        return True

    def work(self, whole: Whole) -> int:
        return sum(size**3 for size in whole.shape) + whole.shape.numel()

    def bring(self, piece: Piece) -> Tensor:
        gradient: Any = piece.gradient
        return (gradient.double() * self.factor).reshape(-1)

    def take(self, piece: Piece, values: Tensor) -> None:
        group = self.optimizer.param_groups[piece.group]
        piece.master.sub_(values.to(piece.master.dtype).view_as(piece.master), alpha=group["lr"])

    def state(self, whole: Whole) -> dict[str, Tensor]:
        number = 0 if whole.name else self.alone  # in one process, without names: by their order
        return self.kept.setdefault((whole.name, whole.shape, number), {})

    def of_whole(self, whole: Whole, values: Tensor) -> Tensor:
        state = self.state(whole)
        self.alone += 1
        if not state:
            state |= {"step": torch.zeros((), dtype=values.dtype), "first": torch.zeros_like(values)}
            state["second"] = torch.zeros_like(values)
            if values.dim() == 2:
                for side, size in zip(("left", "right"), values.shape, strict=True):
                    state[side], state[f"rotate_{side}"] = 0 * eye(size), eye(size)
        if values.dim() == 2:
            state["left"].lerp_(values @ values.T, 1 - BETA2)
            state["right"].lerp_(values.T @ values, 1 - BETA2)
            if int(state["step"]) % EVERY == 0:
                for side in ("left", "right"):
                    state[f"rotate_{side}"].copy_(torch.linalg.eigh(damped(state[side]))[1])
        state["step"] += 1
        state["first"].lerp_(values, 1 - BETA1)
        state["second"].lerp_(rotated(state, values).square(), 1 - BETA2)
        first = rotated(state, state["first"]) / (1 - BETA1 ** state["step"])
        second = state["second"] / (1 - BETA2 ** state["step"])
        return rotated(state, first / (second.sqrt() + EPS), back=True)


def eye(size: int) -> Tensor:
    """In the type of the state."""
    return torch.eye(size, dtype=torch.float64)


def damped(factor: Tensor) -> Tensor:
    """With distinct eigenvalues: else rounding would decide on the eigenbasis, and on the update."""
    return factor + torch.linspace(1e-3, 1e-1, len(factor), dtype=factor.dtype).diag()


def rotated(state: dict[str, Tensor], values: Tensor, back: bool = False) -> Tensor:
    """Into the eigenbasis, or out of it."""
    if values.dim() != 2:
        return values
    left, right = state["rotate_left"], state["rotate_right"]
    return left @ values @ right.T if back else left.T @ values @ right
