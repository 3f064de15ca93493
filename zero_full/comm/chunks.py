"""Layout of a compressed average: one chunk of the buffer per rank, and the size of its messages."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zero_full.layout.flat import rounded_up

ALIGNED = 16  # bytes: the widest load or store of a GPU


class Cut(NamedTuple):
    """The part of a tensor that lies in one chunk."""

    rank: int  # of the chunk
    tensor: int
    end: int  # of the part, as an offset in the whole buffer


@dataclass(frozen=True)
class Chunks:
    """Tensors laid end to end and cut into one chunk per rank. A tensor may lie in several chunks.

    The message of a chunk has one fp32 number about elements that are not sent, one fp32 scale for each
    tensor part in the chunk, and one bit per element. Shorter messages are padded with zeros to the longest.
    """

    ends: tuple[int, ...]  # of the tensors, as offsets in the buffer
    ranks: int

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return self.ends[-1] if self.ends else 0

    @property
    def chunk(self) -> int:
        """Elements of a chunk, a multiple of 8. The last chunks may be shorter or empty."""
        return 8 * -(-self.numel // (8 * self.ranks))

    def range_of(self, rank: int) -> tuple[int, int]:
        """Return the first and last offset of the chunk that a rank averages."""
        low, high = (min(each * self.chunk, self.numel) for each in (rank, rank + 1))
        return low, high

    @cached_property
    def cuts(self) -> list[list[Cut]]:
        """The tensor parts of each chunk, in order. Empty tensors have no parts."""
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
        """The number of fp32 numbers in a message."""
        return 1 + max(map(len, self.cuts))

    @property
    def message(self) -> int:
        """Bytes of a message, rounded up to a multiple of 16."""
        return rounded_up(4 * self.numbers + self.chunk // 8, ALIGNED)

    @property
    def sent(self) -> int:
        """Bytes that a rank sends for one average: two messages to each other rank."""
        return 2 * (self.ranks - 1) * self.message
