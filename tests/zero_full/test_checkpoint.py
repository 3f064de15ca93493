"""A checkpoint loads everywhere: any number of ranks, stage, precision, place and bucket size."""

import random
from itertools import product
from pathlib import Path

import pytest

from tests.worlds import POOL
from tests.zero_full.checkpoint_runs import (
    OPTIMIZERS,
    PRECISIONS,
    Layout,
    differences,
    loaded_by,
    saved_by,
)

EVERY = [
    Layout(world, stage, precision, host, bucket, optimizer)
    for world, stage, precision, host, bucket, optimizer in product(
        (1, 2, 3, 4), (0, 1, 2, 3), PRECISIONS, (False, True), (40, 10_000), OPTIMIZERS
    )
    if not (host and stage == 0)
]


def chain(length: int, seed: int) -> list[Layout]:
    """Layouts, each of which loads what the one before has saved: the same optimizer, the rest at random."""
    drawn = random.Random(seed)
    optimizer, precisions = drawn.choice(list(OPTIMIZERS)), list(PRECISIONS)
    if seed % 2:
        precisions = drawn.sample(precisions, 1)
    fitting = [each for each in EVERY if each.optimizer == optimizer and each.precision in precisions]
    return drawn.sample(fitting, length)


def check_chain(layouts: list[Layout], folder: Path) -> None:
    """Save, load elsewhere, save, ... and back: all values are what they were, bit for bit."""
    first = layouts[0]
    (held, losses), *others = POOL.run(saved_by, first.world, first, folder / "0")
    before = 0
    for number, layout in enumerate([*layouts[1:], first], 1):
        asked = layout, folder / str(before), folder / str(number)
        (found, _), *rest = POOL.run(loaded_by, layout.world, *asked)
        rounded = {each.precision for each in layouts} != {
            first.precision
        }  # what nobody trains has no master
        assert not differences(held, found, but="frozen" if rounded else None), (str(first), str(layout))
        assert not any(differences(found, other) for other, _ in rest)
        before = number
    again = POOL.run(loaded_by, first.world, first, folder / "0")
    assert [each for _, each in again] == [losses, *[each for _, each in others]], "losses after a resume"


@pytest.mark.rotates
@pytest.mark.parametrize("seed", range(6))
def test_what_is_saved_is_loaded_bit_for_bit_elsewhere_and_back(seed: int, tmp_path: Path) -> None:
    check_chain(chain(4, seed), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_all_kinds_of_layouts(seed: int, tmp_path: Path) -> None:
    check_chain(chain(6, seed), tmp_path)
