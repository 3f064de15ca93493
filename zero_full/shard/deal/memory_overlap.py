"""Where parameters lie in memory: two of them in the same place would be torn apart by a flat buffer."""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple


class Extent(NamedTuple):
    """The bytes of a parameter: from `start` up to `stop` of a piece of memory that has a number."""

    memory: int
    start: int
    stop: int
    name: str


def refuse_overlaps(extents: Iterable[Extent]) -> None:
    """ValueError if two parameters share memory: they would no longer be tied."""
    for one, other in pairwise(sorted(extents)):
        if one.memory == other.memory and other.start < one.stop:
            raise ValueError(
                f"{one.name} and {other.name} share memory but are two parameters. To tie weights, assign "
                "the same nn.Parameter to both modules"
            )
