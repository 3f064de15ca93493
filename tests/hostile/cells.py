"""The matrix: ways to write the loop, events, stages and numbers; what became of each cell."""

import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch

from tests.hostile import events, generation_events, gradient_events  # noqa: F401  they fill EVENTS
from tests.hostile.event import EVENTS
from tests.hostile.players import (
    BACKWARD,
    DEEPSPEED,
    FORWARD,
    NUMBERS,
    PYTORCH,
    STEP,
    Full,
    Plain,
    Style,
    ended,
    model_of,
    play,
)
from tests.worlds import POOL

STAGES = (0, 1, 2, 3)
CHUNK = 40  # cells in a job
UNSCALED = "gradients without the loss scale"


@dataclass(frozen=True)
class Cell:
    """One run."""

    style: Style
    event: str
    stage: int
    numbers: str
    micro_batches: int = 1

    def __str__(self) -> str:
        micro = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return f"{self.event}: {self.style}, stage {self.stage}, {self.numbers}{micro}"

    @property
    def refusal(self) -> str | None:
        """What the error must say; None: the result must be plain torch's."""
        plain = self.style.backward in ("loss.backward", "autograd.backward")
        if plain and self.style.forward == "part(x)" and self.numbers == "fp16":
            return UNSCALED
        return EVENTS[self.event].refused(self.stage, self.numbers)


@dataclass(frozen=True)
class Outcome:
    """What happened on a rank."""

    off: float  # from plain torch; infinite if there is nothing to compare
    error: str = ""
    where: str = ""


def styles() -> Iterator[Cell]:
    """Every way to write the loop, where nothing happens."""
    for forward in FORWARD:
        for backward in BACKWARD:
            for step in STEP:
                for stage in STAGES:
                    for number, numbers in enumerate(NUMBERS):
                        yield Cell(Style(forward, backward, step), "nothing", stage, numbers, 1 + number % 2)


def happenings(both: Sequence[Style] = (DEEPSPEED, PYTORCH)) -> Iterator[Cell]:
    """Every event, in the loop of either world."""
    for event in EVENTS:
        for style in both:
            for stage in STAGES:
                for numbers in NUMBERS:
                    yield Cell(style, event, stage, numbers, 2 if style is PYTORCH else 1)


def everything() -> Iterator[Cell]:
    """The whole matrix."""
    yield from styles()
    yield from happenings()


def tenth(seed: int) -> Iterator[Cell]:
    """One of the ten parts of everything. Each part has every event at every stage, and every style."""
    numbers = list(NUMBERS)
    rows = {what: place for place, what in enumerate(dict.fromkeys((c.event, c.style) for c in styles()))}
    for cell in styles():
        # Ten places: two stages by five numbers. Two cells of a style are at each place.
        pair, stage = divmod(cell.stage, 2)
        place = 5 * stage + (numbers.index(cell.numbers) + 2 * pair) % 5
        if (place + rows[cell.event, cell.style]) % 10 == seed % 10:
            yield cell
    for cell in happenings():
        # Ten places: two styles by five numbers. One cell of an event and stage is at each place.
        place = 5 * (cell.style is PYTORCH) + numbers.index(cell.numbers)
        if (place + 3 * cell.stage + list(EVENTS).index(cell.event)) % 10 == seed % 10:
            yield cell


@cache
def wanted(event: str, numbers: str, ranks: int, micro_batches: int) -> dict[str, torch.Tensor]:
    """What plain torch makes of it."""
    plain = Plain(model_of(EVENTS[event]), NUMBERS[numbers], ranks, micro_batches)
    play(plain, EVENTS[event], range(ranks), NUMBERS[numbers].dtype)
    return plain.values()


def outcome_of(rank: int, ranks: int, cell: Cell) -> Outcome:
    """Play it on this rank."""
    event, numbers = EVENTS[cell.event], NUMBERS[cell.numbers]
    full = Full(model_of(event), numbers, cell.stage, cell.style, cell.micro_batches)
    with ended(full):
        try:
            play(full, event, [rank], numbers.dtype)
            got = full.values()
        except Exception as error:
            return Outcome(float("inf"), f"{type(error).__name__}: {error}", traceback.format_exc())
    if cell.refusal is not None:
        return Outcome(0.0)
    want = wanted(cell.event, cell.numbers, ranks, cell.micro_batches)
    return Outcome(max(float((got[name] - want[name]).abs().max()) for name in want))


def _outcomes(comm: Any, ranks: int, cells: Sequence[Cell]) -> list[Outcome]:
    torch.manual_seed(0)
    with quickly_stuck():
        return [outcome_of(comm.rank, ranks, cell) for cell in cells]


def quickly_stuck() -> Any:
    """A rank that calls alone raises sooner than usual."""
    return mock.patch("zero_full.comm.user_calls.STUCK_AFTER_S", 0.2)


def verdict(cell: Cell, outcomes: Sequence[Outcome]) -> str:
    """Empty if all is well, else what is wrong."""
    errors = [each.error for each in outcomes]
    if cell.refusal is not None:
        wrong = [error for error in errors if not re.search(cell.refusal, error, re.DOTALL)]
        return f"expected an error about {cell.refusal!r}, got {wrong[0][:300] or 'none'!r}" if wrong else ""
    if any(errors):
        first = next(each for each in outcomes if each.error)
        return f"{first.error[:300]}\n{first.where[-900:]}"
    off = max(each.off for each in outcomes)
    return "" if off <= NUMBERS[cell.numbers].tolerance else f"off by {off:.3g} from plain torch"


def run(cells: Iterable[Cell], ranks: int) -> dict[Cell, str]:
    """The verdict on every cell."""
    listed = list(cells)
    verdicts: dict[Cell, str] = {}
    for start in range(0, len(listed), CHUNK):
        some = listed[start : start + CHUNK]
        by_rank = POOL.run(_outcomes, ranks, ranks, some, limit=120)
        for cell, outcomes in zip(some, zip(*by_rank, strict=True), strict=True):
            verdicts[cell] = verdict(cell, outcomes)
    return verdicts
