"""The matrix of what users do: every cell is plain torch's result, or an error that names the thing."""

from collections import Counter

import pytest

from tests.hostile.cells import diagonal, everything, run


def wrong(ranks: int, whole: bool) -> list[str]:
    verdicts = run(everything() if whole else diagonal(), ranks)
    return [f"{cell}: {text}" for cell, text in verdicts.items() if text]


def test_a_fifth_of_all_cells_on_two_ranks() -> None:
    assert wrong(2, whole=False) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_cells(ranks: int) -> None:
    assert wrong(ranks, whole=True) == []


def test_the_fifth_has_every_event_and_style_at_every_stage_and_in_all_numbers() -> None:
    cells = list(diagonal())
    for what in (lambda c: (c.event, c.stage), lambda c: (c.event, c.numbers), lambda c: (c.style, c.stage)):
        assert Counter(map(what, cells)).keys() == Counter(map(what, everything())).keys()
