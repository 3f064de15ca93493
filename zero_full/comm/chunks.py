"""How a buffer whose average is compressed is cut, and how long its messages are. Numbers only."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

ALIGNED = 16  # bytes: what a GPU loads or stores at once


class Cut(NamedTuple):
    """The part of a tensor that lies in one chunk."""

    rank: int  # whose chunk
    tensor: int
    end: int  # where the part ends, counted in the whole buffer


@dataclass(frozen=True)
class Chunks:
    """Tensors that lie end to end, cut into one chunk a rank. A tensor may be in several.

    A message is, for one chunk: a number about what does not travel, a scale for each part of a tensor in it,
    all fp32, and a bit for each element. All have the length of the longest, so the others end in zeros.
    """

    ends: tuple[int, ...]  # of the tensors
    ranks: int

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return self.ends[-1] if self.ends else 0

    @property
    def chunk(self) -> int:
        """Elements of a chunk, whose bits are whole bytes. The last chunks may have fewer, or none."""
        return 8 * -(-self.numel // (8 * self.ranks))

    def range_of(self, rank: int) -> tuple[int, int]:
        """The elements that a rank serves."""
        low, high = (min(each * self.chunk, self.numel) for each in (rank, rank + 1))
        return low, high

    @cached_property
    def cuts(self) -> list[list[Cut]]:
        """The parts in each chunk, in order. Empty tensors have none."""
        by_rank: list[list[Cut]] = [[] for _ in range(self.ranks)]
        start = 0
        for tensor, end in enumerate(self.ends):
            while start < end:
                rank = start // self.chunk
                start = min(end, (rank + 1) * self.chunk)
                by_rank[rank].append(Cut(rank, tensor, start))
        return by_rank

    @cached_property
    def numbers(self) -> int:
        """The fp32 numbers of a message."""
        return 1 + max(map(len, self.cuts))

    @property
    def message(self) -> int:
        """Bytes of a message, filled up to a multiple of 16."""
        return -(-(4 * self.numbers + self.chunk // 8) // ALIGNED) * ALIGNED

    @property
    def sent(self) -> int:
        """Bytes that a rank sends for one average: a message to each of the others, twice."""
        return 2 * (self.ranks - 1) * self.message
