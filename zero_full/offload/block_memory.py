"""The order in which a step reads and writes the blocks of optimizer state that do not fit in memory.

[Note: state in memory] Host memory has room for some of the blocks, which stay in it between steps. So
neither a read nor a write of them costs a step anything. One step takes the parts in order and the next one
takes them in reverse order: it begins with those that the last step has left in memory. A part that is not
in memory is read to the place of the parts that were stepped first, after they were written to the file.
With room for two of four parts:

    step     0    1    2                 3                 3    2    1                 0
    lane          write 0, read 2   write 1, read 3             write 3, read 1   write 2, read 0

Parts have different sizes, and each needs one free range of memory. If all steps took the first range that
is large enough, free memory would be left over in pieces too small for a part. So every other step takes the
last one: a part that comes back finds the place that it had, which the parts between have left in the order
in which they took it.

A step reads and writes the state that does not fit, and no order can move less between the last gradient
and the end of the step: every part must be in memory then, and no more than fits can be there before or
after.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from zero_full.offload.spill_file import whole_pages


class StoredBlock(Protocol):
    """A block of state with a place in a file."""

    @property
    def padded_size(self) -> int:
        """Bytes in memory."""

    @property
    def is_in_file(self) -> bool:
        """Whether it can be read from the file. Other blocks have memory of their own."""


B = TypeVar("B", bound=StoredBlock)


@dataclass(frozen=True)
class Write(Generic[B]):
    """Write a block to the file. Later reads may use its memory."""

    block: B


@dataclass(frozen=True)
class Read(Generic[B]):
    """Read blocks of the part with this number to their new places."""

    number: int
    blocks: Sequence[B]


@dataclass(frozen=True)
class Step:
    """Step the part with this number."""

    number: int


class BlockMemory(Generic[B]):
    """Places of blocks in `size` bytes of memory."""

    def __init__(self, size: int) -> None:
        self.size, self.from_the_end = size, True
        self.begins: dict[B, int] = {}  # first byte of each block that has a place, in ascending order

    def place(self, blocks: Sequence[B]) -> bool:
        """Give each block a place. Returns False, without a change, if one has none."""
        begins = self.begins
        for block in blocks:
            begin = self._free_range(begins, block.padded_size)
            if begin is None:
                return False
            begins = dict(sorted([*begins.items(), (block, begin)], key=lambda item: item[1]))
        self.begins = begins
        return True

    def _free_range(self, begins: Mapping[B, int], size: int) -> int | None:
        """Return the first byte of a free range for `size` bytes; None if every free range is smaller."""
        taken = [(begin, begin + block.padded_size) for block, begin in begins.items() if block.padded_size]
        lows, highs = [0, *(stop for _, stop in taken)], [*(begin for begin, _ in taken), self.size]
        free = [(low, high) for low, high in zip(lows, highs, strict=True) if low + size <= high]
        if not free:
            return None
        return free[-1][1] - size if self.from_the_end else free[0][0]

    def free(self, block: B) -> None:
        """Free the block's place, if it has one."""
        self.begins.pop(block, None)

    def sweep(self, parts: Sequence[Sequence[B]]) -> Iterator[Write[B] | Read[B] | Step]:
        """Yield what a step does, in order. A part is read before its step, as early as there is room.

        The caller frees the places of blocks that a step has replaced.
        """
        self.from_the_end = not self.from_the_end
        ahead, stepped = 0, deque[B]()
        for number, part in enumerate(parts):
            while ahead < len(parts):
                if ahead > number + 1 and not all(block.is_in_file for block in parts[ahead]):
                    break  # blocks with memory of their own: one part ahead is enough
                missing = [each for each in parts[ahead] if each.is_in_file and each not in self.begins]
                while not (fits := self.place(missing)) and stepped:
                    yield self._write(stepped.popleft())
                if fits:
                    yield Read(ahead, missing)
                    ahead += 1
                elif ahead > number:
                    break
                else:  # the next part, which other blocks leave no room
                    for block in [*self.begins]:
                        yield self._write(block)
            yield Step(number)
            stepped += [block for block in part if block in self.begins]

    def _write(self, block: B) -> Write[B]:
        self.free(block)
        return Write(block)


def memory_for(state_bytes: int, numel: int, largest_part: int, kept_numel: int) -> int:
    """Return the bytes of memory for the state of `numel` elements.

    It has room for the state of `kept_numel` of them, and at least for two parts of `largest_part` bytes.
    """
    return min(state_bytes, max(2 * largest_part, whole_pages(state_bytes * kept_numel // max(numel, 1))))


@dataclass(frozen=True, eq=False)
class FileBlock:
    """A block that has nothing but a size."""

    padded_size: int
    is_in_file: bool = True


def bytes_moved(parts: Sequence[Sequence[int]], size: int) -> int:
    """Return the bytes that a step reads, and writes. `parts`: bytes of blocks; `size`: of memory."""
    memory = BlockMemory[FileBlock](size)
    order = [[FileBlock(each) for each in part] for part in parts]
    read = list[int]()
    for _ in range(4):  # steps, until each of the two orders has found what the other one leaves
        events = [event for event in memory.sweep(order) if isinstance(event, Read)]
        read.append(sum(block.padded_size for event in events for block in event.blocks))
        order.reverse()
    return max(read[2:])
