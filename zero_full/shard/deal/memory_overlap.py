"""Check that no two parameters overlap in memory, because flat buffers would separate them."""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple


class Extent(NamedTuple):
    """The range of bytes of a parameter, from `start` to `stop`, in the memory with the number `memory`."""

    memory: int
    start: int
    stop: int
    name: str


def check_no_overlap(extents: Iterable[Extent]) -> None:
    """Raise ValueError if two parameters share memory, because they would no longer be tied."""
    for one, other in pairwise(sorted(extents)):
        if one.memory == other.memory and other.start < one.stop:
            raise ValueError(
                f"{one.name} and {other.name} share memory but are two parameters. To tie weights, assign "
                "the same nn.Parameter to both modules"
            )
