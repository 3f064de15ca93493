"""Adafactor as a rule of a user's: state by rows and columns, made of sums over all pieces of a parameter."""

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from zero_full import Peers, Piece, Stepper

BETA2_DECAY, EPS2, MOST = -0.8, 1e-3, 1.0


class ShardedAdafactor(torch.optim.Adafactor):
    """torch's own, which a cut parameter would mislead, with a stepper that knows of the other pieces."""

    def zero_full_stepper(self) -> Stepper:
        return AdafactorStep(self)


class AdafactorStep(Stepper):
    """A piece's rows and columns are summed with those of the other pieces: R + C numbers for a matrix."""

    whole_entries = frozenset({"row_var", "col_var"})  # type: ignore[assignment]

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.width = optimizer, 0

    def attach(self, pieces: Sequence[Piece], peers: Peers) -> None:
        """Every rank sends rows of numbers as long as the largest parameter of all needs them."""
        params = peers.totals(pieces, torch.zeros(len(pieces), 1, dtype=torch.float64)).params
        self.width = max((p.shape[0] + p.shape[1] for p in params if p.dim() == 2), default=0)

    def step(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        """Three sums over whole parameters: squares by row and column, squares of values, and of updates."""
        squares = torch.zeros(len(pieces), self.width + 1, dtype=torch.float64)
        for row, piece in zip(squares, pieces, strict=True):
            row[-1] = piece.master.double().square().sum()
            if len(piece.shape) == 2:
                rows, columns = places(piece)
                by_element = gradient_of(piece).double().square()
                row.index_add_(0, rows, by_element / piece.shape[1])
                row.index_add_(0, piece.shape[0] + columns, by_element / piece.shape[0])
        squares = peers.add_up(pieces, squares)
        updates = [self.update(p, sums) for p, sums in zip(pieces, squares, strict=True)]
        lengths = torch.tensor([[float(u.double().square().sum())] for u in updates], dtype=torch.float64)
        lengths = peers.add_up(pieces, lengths.view(len(pieces), 1))
        for piece, update, sums, length in zip(pieces, updates, squares, lengths, strict=True):
            group, numel = self.optimizer.param_groups[piece.group], piece.shape.numel()
            rate = max(EPS2, sqrt(float(sums[-1]) / numel)) * min(group["lr"], 1 / sqrt(piece.state["step"]))
            piece.master.mul_(1 - group["lr"] * group["weight_decay"])
            too_long = max(1.0, sqrt(float(length)) / (sqrt(numel) * MOST))
            piece.master.sub_(update.view_as(piece.master), alpha=rate / too_long)

    def update(self, piece: Piece, sums: Tensor) -> Tensor:
        """The gradient over the root of its variance, as rows and columns describe it."""
        state, gradient, eps = piece.state, gradient_of(piece), torch.finfo(piece.master.dtype).eps
        state["step"] = state.get("step", 0) + 1
        new = state["step"] ** BETA2_DECAY
        if len(piece.shape) == 2:
            height, width = piece.shape
            for entry, seen in (("row_var", sums[:height]), ("col_var", sums[height : height + width])):
                state.setdefault(entry, torch.zeros_like(seen, dtype=piece.master.dtype))
                state[entry].lerp_(seen.to(piece.master.dtype), new)
            rows, columns = places(piece)
            mean = state["row_var"].mean().clamp(min=eps)
            variance = state["row_var"][rows] * state["col_var"][columns] / mean
        else:
            average = state.setdefault("variance", torch.zeros_like(piece.master))
            variance = average.lerp_(gradient.square().view_as(average), new).reshape(-1)
        return gradient * variance.clamp(min=eps * eps).rsqrt()


def places(piece: Piece) -> tuple[Tensor, Tensor]:
    """The row and the column of each element of a piece of a matrix."""
    elements = torch.arange(*piece.param_range)
    return elements // piece.shape[1], elements % piece.shape[1]


def gradient_of(piece: Piece) -> Tensor:
    """A piece's gradient in one dimension."""
    gradient: Any = piece.gradient
    return gradient.reshape(-1)
