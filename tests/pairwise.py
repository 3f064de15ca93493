"""Pairwise combinations: fewer rows than a full product, in which every pair of values still meets."""

from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import TypeVar

Row = TypeVar("Row", bound=tuple[Hashable, ...])


def pairs(row: tuple[Hashable, ...]) -> set[Hashable]:
    """The values of every two columns, with their columns."""
    return set(combinations(enumerate(row), 2))


def pairwise(rows: Sequence[Row]) -> list[Row]:
    """Those of the rows that meet every pair of values of all rows, in their order.

    Greedy: the next row is the first one with the most pairs that no chosen row has.
    """
    waiting = {row: pairs(row) for row in rows}
    chosen = set[Row]()
    missing = set().union(*waiting.values())
    while missing:
        best = max(waiting, key=lambda row: len(waiting[row] & missing))
        chosen.add(best)
        missing -= waiting.pop(best)
    return [row for row in rows if row in chosen]
