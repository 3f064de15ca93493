"""The first file to read is no simplification: its stages have the bits and the bytes of the real ones."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from zero_min import STAGES, run_world, tiny_zero
from zero_min.comm import Comm
from zero_min.formula import padded

NUMEL, STEPS, MICRO_BATCHES = 11, 3, 2  # 11 elements: the last slice ends with padding
TINY = {1: tiny_zero.Stage1, 2: tiny_zero.Stage2, 3: tiny_zero.Stage3}


class Curve(nn.Module):
    """A model with one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, NUMEL))

    def forward(self, x: Tensor) -> Tensor:
        return loss_of(self.w, x)


def loss_of(w: Tensor, x: Tensor) -> Tensor:
    return ((w * x).sin() + w.square() * x).sum()


def data(comm: Comm) -> list[list[Tensor]]:
    """For each step this rank's micro-batches, other ones on every rank."""
    generator = torch.Generator().manual_seed(comm.rank)
    return [[torch.randn(NUMEL, generator=generator) for _ in range(MICRO_BATCHES)] for _ in range(STEPS)]


def real(comm: Comm, stage: int) -> tuple[list[Tensor], int]:
    """This rank's slices of the parameter and of both averages, and the bytes of gathers and reductions."""
    trainer = STAGES[stage](Curve(), comm)
    for batches in data(comm):
        trainer.zero_grad()
        for x in batches:
            trainer.backward(trainer.model(x))
        trainer.step()
    (master,) = trainer.optimizer.m
    sent = comm.ledger.sent
    return [
        master.detach().clone(),
        trainer.optimizer.m[master],
        trainer.optimizer.v[master],
    ], sent["reduce_scatter"]


def tiny(comm: Comm, stage: int) -> tuple[list[Tensor], int]:
    flat = torch.zeros(padded([NUMEL], comm.world_size))
    flat[:NUMEL] = torch.linspace(-1, 1, NUMEL)
    trainer = TINY[stage](flat, comm)
    for batches in data(comm):
        trainer.step([lambda w, x=x: loss_of(w[:NUMEL], x) for x in batches])
    return [trainer.mine, trainer.adam.m, trainer.adam.v], comm.ledger.sent["reduce_scatter"]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", TINY)
def test_each_stage_has_the_bits_and_the_reductions_of_the_real_one(stage: int, world: int) -> None:
    for (want, reduced), (got, sent) in zip(
        run_world(real, world, stage), run_world(tiny, world, stage), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        assert stage == 2 or sent == reduced  # stage 2 proper does not send padding


def test_after_a_step_everyone_has_the_same_parameters() -> None:
    def whole(comm: Comm, stage: int) -> Tensor:
        trainer = TINY[stage](torch.linspace(-1, 1, 12), comm)
        trainer.step([lambda w: (w * (comm.rank + 1)).sin().sum()])
        return trainer.flat

    for stage in (1, 2):
        first, *others = run_world(whole, 3, stage)
        assert all(torch.equal(first, other) for other in others)


def test_stage_3_keeps_a_slice_and_nothing_of_the_whole() -> None:
    def held(comm: Comm) -> int:
        return tiny_zero.Stage3(torch.zeros(12), comm).mine.untyped_storage().nbytes()

    assert run_world(held, 3) == [16] * 3


def test_it_stays_short() -> None:
    assert len(Path(tiny_zero.__file__).read_text().splitlines()) <= 120
