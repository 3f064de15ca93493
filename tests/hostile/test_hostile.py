"""The matrix of what users do: every cell is plain torch's result, or an error that names the thing."""

from collections.abc import Iterable
from itertools import product

import pytest

from tests import rotation
from tests.hostile import parts
from tests.hostile.cells import STAGES, Cell, everything, happenings, run, styles, tenth
from tests.hostile.event import EVENTS
from tests.hostile.players import NUMBERS
from tests.pairwise import pairs


def wrong(cells: Iterable[Cell], ranks: int) -> list[str]:
    return [f"{cell}: {text}" for cell, text in run(cells, ranks).items() if text]


def test_a_tenth_of_all_cells_on_two_ranks() -> None:
    assert wrong(tenth(rotation.seed()), 2) == []


def test_a_tenth_of_the_runs_with_parts_of_a_model_on_two_ranks() -> None:
    verdicts = parts.run(parts.tenth(rotation.seed()), 2)
    assert [f"{cell}: {text}" for cell, text in verdicts.items() if text] == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_runs_with_parts_of_a_model(ranks: int) -> None:
    verdicts = parts.run(parts.everything(), ranks)
    assert [f"{cell}: {text}" for cell, text in verdicts.items() if text] == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_cells(ranks: int) -> None:
    assert wrong(everything(), ranks) == []


def test_ten_seeds_are_all_cells() -> None:
    cells = [cell for seed in range(10) for cell in tenth(seed)]
    assert len(cells) == len(list(everything())) and set(cells) == set(everything())


@pytest.mark.parametrize("seed", range(10))
def test_every_tenth_has_every_event_at_every_stage_and_all_pairs_of_a_loop_s_choices(seed: int) -> None:
    cells = list(tenth(seed))
    assert {(cell.event, cell.stage) for cell in cells} == set(product(EVENTS, STAGES))
    assert {(cell.stage, cell.numbers) for cell in cells} == set(product(STAGES, NUMBERS))
    both = {(cell.style, cell.numbers) for cell in happenings()}
    assert both <= {(cell.style, cell.numbers) for cell in cells}

    def choices(cells: Iterable[Cell]) -> set[object]:
        rows = (cell for cell in cells if cell.event == "nothing")
        return set().union(
            *(pairs((c.style.forward, c.style.backward, c.style.step, c.stage, c.numbers)) for c in rows)
        )

    assert choices(cells) == choices(styles())
