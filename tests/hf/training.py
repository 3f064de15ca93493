"""Trainings of every family, and how far each ends from plain torch's."""

import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.hf.families import FAMILIES
from tests.hf.players import NUMBERS, Plain, Run, limits, playing
from tests.worlds import POOL


@dataclass(frozen=True)
class Apart:
    """How far zero_full is from plain torch on a rank."""

    losses: float
    parameters: float  # a part of the way that training went
    error: str = ""

    def verdict(self, run: Run) -> str:
        """Empty if all is well, else what is wrong."""
        numbers = limits(run.family, run.numbers)
        if self.error:
            return self.error
        if self.losses <= numbers.loss and self.parameters <= numbers.parameters:
            return ""
        return f"losses {self.losses:.2g} and parameters {self.parameters:.2%} of the way from plain torch's"


def runs(stage: int) -> Iterator[Run]:
    """Every family in both precisions, and what else changes how a model is called."""
    for place, family in enumerate(FAMILIES):
        for numbers in NUMBERS:
            yield Run(family, numbers, micro_batches=1 + place % 2, stage=stage)
    for family in ("GPT-2", "Llama", "Mixtral", "T5", "BERT", "LoRA"):
        for kind in ("re-entrant", "not re-entrant"):
            yield Run(family, checkpointing=kind, stage=stage)


@cache
def wanted(run: Run, ranks: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """What plain torch makes of it: losses, and parameters before and after."""
    plain = Plain(run, ranks)
    before = plain.values()
    return plain.train(), before, plain.values()


def distance(got: dict[str, Tensor], before: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """How far apart two trainings are, as a part of the way of one; infinite if frozen parameters differ."""
    assert got.keys() == want.keys()
    off = way = 0.0
    for name, value in want.items():
        if torch.equal(before[name], value) and not torch.equal(got[name], value):
            return float("inf")
        off += float((got[name] - value).square().sum())
        way += float((before[name] - value).square().sum())
    return (off / way) ** 0.5


def apart(run: Run, rank: int, ranks: int, fooled: bool = False) -> Apart:
    """Play it on this rank; a fooled one has the first rank's data."""
    try:
        with playing(run, 0 if fooled else rank) as full:
            losses, values = full.train(), full.values()
        everybodys, before, want = wanted(replace(run, stage=0), ranks)
        mine = [loss for place, loss in enumerate(everybodys) if place // run.micro_batches % ranks == rank]
        off = max((torch.tensor(losses) - torch.tensor(mine)).abs().tolist())
        return Apart(off, distance(values, before, want))
    except Exception as error:
        return Apart(0, 0, f"{type(error).__name__}: {str(error)[:400]}\n{traceback.format_exc()[-900:]}")


def all_apart(comm: Any, ranks: int, listed: Sequence[Run], fooled: bool) -> list[Apart]:
    return [apart(run, comm.rank, ranks, fooled) for run in listed]


def wrong(listed: Iterable[Run], ranks: int, fooled: bool = False) -> list[str]:
    """What went wrong, a line for every run and rank where something did."""
    listed = list(listed)
    by_rank = POOL.run(all_apart, ranks, ranks, listed, fooled, limit=170, collective=60)
    return [
        f"{run}, rank {rank}: {each.verdict(run)}"
        for rank, column in enumerate(by_rank)
        for run, each in zip(listed, column, strict=True)
        if each.verdict(run)
    ]
