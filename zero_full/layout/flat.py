"""The layout of a flat buffer: parameters end to end, cut evenly over the ranks of a group."""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Fragment:
    """The range of one parameter's elements that one rank owns. Ranges are (start, stop), in elements."""

    index: int  # of the parameter in the layout
    param_range: tuple[int, int]  # counted in the flattened parameter
    flat_range: tuple[int, int]  # counted in the whole flat buffer

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.flat_range[1] - self.flat_range[0]


@dataclass(frozen=True)
class FlatLayout:
    """Parameters of `numels` elements in a row, each starting at a multiple of `alignment`.

    Every rank's slice is a multiple of `alignment * copies`, so that copies and kernels start at aligned
    addresses, and `copies` ranks that hold the same slice can share the work of averaging it. The gaps are
    padding: zeros that are communicated and never read.
    """

    numels: tuple[int, ...]
    world: int
    alignment: int = 1
    copies: int = 1

    def __post_init__(self) -> None:
        if min(self.world, self.alignment, self.copies) < 1 or any(n < 0 for n in self.numels):
            raise ValueError(f"sizes must not be negative; world, alignment and copies at least 1: {self}")

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first element of each parameter in the flat buffer."""
        starts, position = [], 0
        for numel in self.numels:
            starts.append(position)
            position = rounded_up(position + numel, self.alignment)
        return tuple(starts)

    @cached_property
    def shard_numel(self) -> int:
        """Number of elements in each rank's slice."""
        end = rounded_up(self.starts[-1] + self.numels[-1], self.alignment) if self.numels else 0
        return rounded_up(-(-end // self.world), self.alignment * self.copies)

    @cached_property
    def total(self) -> int:
        """Number of elements of the buffer, padding included."""
        return self.shard_numel * self.world

    @cached_property
    def windows(self) -> tuple[slice, ...]:
        """The slice of the flat buffer of each parameter."""
        pairs = zip(self.starts, self.numels, strict=True)
        return tuple(slice(start, start + numel) for start, numel in pairs)

    def slice_of(self, rank: int) -> slice:
        """Return the slice of the flat buffer of `rank`."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def fragments(self, rank: int) -> list[Fragment]:
        """Return the fragments that `rank` owns, at most one per parameter, in order, without empty ones."""
        own = self.slice_of(rank)
        fragments = []
        for index, start in enumerate(self.starts):
            low = max(start, own.start)
            high = min(start + self.numels[index], own.stop)
            if low < high:
                fragments.append(Fragment(index, (low - start, high - start), (low, high)))
        return fragments

    def shares(self, index: int) -> list[tuple[int, int]]:
        """Return the ranks that own elements of parameter `index`, in order, each with their number."""
        start, numel, shares = self.starts[index], self.numels[index], []
        while numel:
            rank = start // self.shard_numel
            here = min(numel, (rank + 1) * self.shard_numel - start)
            shares.append((rank, here))
            start, numel = start + here, numel - here
        return shares


def rounded_up(number: int, multiple: int) -> int:
    """Round a size or an offset up to the next multiple."""
    return -(-number // multiple) * multiple
