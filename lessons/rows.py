"""The rows of the demo: the ways to train that the lessons build, and what the formula says of each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

import zero_min
from zero_min import formula
from zero_min.comm import Comm
from zero_min.muon import choose_owners

Shapes = Mapping[str, Sequence[int]]  # of every parameter, by name
Sizes = Sequence[int]  # elements of every parameter


@dataclass(frozen=True)
class Row:
    """One line of the demo: a way to train, and what the formula says about its bytes."""

    name: str
    lesson: int
    trainer: Callable[[nn.Module, Comm, float, int], Any]  # (model, comm, learning rate, steps to come)
    held: Callable[[Shapes, int], dict[str, int]]  # (shapes, world size) -> bytes on a rank, by kind
    sent: Callable[[Shapes, int, int], int]  # (shapes, world size, steps) -> bytes that all ranks send
    steps: int = 2  # how many steps show what it does


def sizes_of(shapes: Shapes) -> list[int]:
    """Elements of every parameter."""
    return [prod(shape) for shape in shapes.values()]


def _whole(shapes: Shapes) -> list[int]:
    """All parameters as one flat tensor."""
    return [sum(sizes_of(shapes))]


def _stage(number: int) -> Row:
    def pieces(shapes: Shapes) -> Sizes:
        return sizes_of(shapes) if number == 3 else _whole(shapes)

    return Row(
        f"stage {number}",
        number,
        lambda model, comm, lr, steps: zero_min.STAGES[number](model, comm, lr=lr),
        lambda shapes, N: formula.held(number, pieces(shapes), N),
        lambda shapes, N, steps: steps * formula.sent(number, pieces(shapes), N),
    )


def _bf16(model: nn.Module, comm: Comm, lr: float, steps: int) -> Any:
    return zero_min.MixedPrecision(zero_min.Stage2(model.bfloat16(), comm, lr=lr), accumulate=torch.float32)


def _offload(model: nn.Module, comm: Comm, lr: float, steps: int) -> Any:
    return zero_min.MixedPrecision(zero_min.Stage2Offload(model.bfloat16(), comm, lr=lr))


def _muon(model: nn.Module, comm: Comm, lr: float, steps: int) -> Any:
    return zero_min.Stage2Muon(model, comm, lr=10 * lr, adam_lr=lr)


def _muon_matrices(shapes: Shapes, N: int) -> tuple[list[Sequence[int]], int]:
    """The shapes of the GPT's hidden matrices as they are dealt, and how many elements the rest has."""
    matrices = [shape for name, shape in shapes.items() if len(shape) == 2 and name.startswith("blocks.")]
    dealt = [shape for start in range(N) for shape in matrices[start::N]]
    return dealt, sum(sizes_of(shapes)) - sum(map(prod, dealt))


def _muon_held(shapes: Shapes, N: int) -> dict[str, int]:
    matrices, others = _muon_matrices(shapes, N)
    return formula.muon_held(sum(map(prod, matrices)), others, N)


def _muon_sent(shapes: Shapes, N: int, steps: int) -> int:
    matrices, others = _muon_matrices(shapes, N)
    owners = choose_owners(matrices, N)
    return steps * formula.muon_sent([prod(shape) for shape in matrices], owners, others, N)


def _mixed_sent(shapes: Shapes, N: int, steps: int, each: formula.Bytes) -> int:
    return steps * (formula.sent(2, _whole(shapes), N, each=each) + formula.flag(N))


def _offload_held(shapes: Shapes, N: int) -> dict[str, int]:
    usual = formula.held(2, _whole(shapes), N, formula.MIXED)
    away = {"host gradients": usual["gradients"], "host optimizer": usual["optimizer"]}
    return {"parameters": usual["parameters"], "gradients": 0, **away}


def _schedule(steps: int) -> dict[str, int]:
    """0/1 Adam's phases squeezed into a short run, so that each of them is seen."""
    return {
        "kappa": max(2, steps // 3),
        "freeze_step": 7 * steps // 10,
        "local_kappa": max(1, steps // 10),
        "local_clip": 2,
    }


ROWS = [
    *(_stage(number) for number in zero_min.STAGES),
    Row(
        "stage 2, bf16",
        4,
        _bf16,
        lambda shapes, N: formula.held(2, _whole(shapes), N, formula.BF16),
        lambda shapes, N, steps: _mixed_sent(shapes, N, steps, formula.BF16),
    ),
    Row(
        "stage 2, offload",
        5,
        _offload,
        _offload_held,
        lambda shapes, N, steps: _mixed_sent(shapes, N, steps, formula.MIXED),
    ),
    Row(
        "0/1 Adam",
        6,
        lambda model, comm, lr, steps: zero_min.ZeroOneAdam(model, comm, lr=lr, **_schedule(steps)),
        lambda shapes, N: formula.zero_one_held(sizes_of(shapes), N),
        lambda shapes, N, steps: formula.zero_one_sent(sizes_of(shapes), N, steps, **_schedule(steps)),
        steps=8,
    ),
    Row("stage 2, Muon", 7, _muon, _muon_held, _muon_sent),
]
