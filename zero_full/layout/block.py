"""The block of a tensor that a rank holds, if tensor parallelism cuts the tensor along one dimension."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod


@dataclass(frozen=True)
class LocalBlock:
    """The elements with indices from `offset` to `offset + size` in dimension `dim` of a tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    dim: int
    offset: int
    size: int

    @cached_property
    def stride(self) -> int:
        """Number of elements of the whole tensor between two neighbours in dimension `dim`."""
        return prod(self.shape[self.dim + 1 :])

    @cached_property
    def row(self) -> int:
        """Number of elements of the block that are contiguous in the whole tensor."""
        return self.size * self.stride

    @cached_property
    def pitch(self) -> int:
        """Number of elements of the whole tensor between the first elements of two rows."""
        return self.shape[self.dim] * self.stride

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the flattened whole tensor that a range of the block covers, in order."""
        while start < stop:
            number, inside = divmod(start, self.row)
            count = min(self.row - inside, stop - start)
            first = number * self.pitch + self.offset * self.stride + inside
            yield first, first + count
            start += count

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of a range of the flattened whole tensor that are in the block, in order."""
        begin = self.offset * self.stride
        for number in range(max(0, start - begin) // self.pitch, -(-stop // self.pitch)):
            first = number * self.pitch + begin
            low, high = max(start, first), min(stop, first + self.row)
            if low < high:
                yield low, high

    def index_of(self, element: int) -> int | None:
        """Return the index in the flattened block of an element of the flattened whole tensor, or None."""
        number, inside = divmod(element, self.pitch)
        inside -= self.offset * self.stride
        return number * self.row + inside if 0 <= inside < self.row else None
