"""Step 11. The caching allocator between tensors and a GPU's memory: blocks and segments.

Asking the GPU's driver for memory takes long, and giving it back waits for all work of the GPU. So torch
asks for large pieces, the *segments*, and cuts them into *blocks* for tensors. A block whose tensor has gone
is kept for the next tensor. This file follows torch's default rules. It holds no memory: addresses are
numbers, so a GPU's history can be replayed on any machine.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MIB = 2**20
SMALLEST = 512  # bytes; the size of every block is a multiple of it
SMALL = MIB  # requests of at most so many bytes share small segments
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
OWN_SEGMENT = 10 * MIB  # requests of so many bytes or more get a segment of their own size
OWN_STEP = 2 * MIB  # to whose multiple it is rounded up


class OutOfMemoryError(RuntimeError):
    """No free block is large enough, and the GPU has no memory left for another segment."""


def block_size(nbytes: int) -> int:
    """The size of the block for a tensor of so many bytes: rounded up, and at least the smallest."""
    # --8<-- [start:ex_block]
    return max(SMALLEST, -(-nbytes // SMALLEST) * SMALLEST)
    # --8<-- [end:ex_block]


def segment_size(size: int) -> int:
    """The size of the segment that is asked for if no free block can hold a block of this size."""
    # --8<-- [start:ex_segment]
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // OWN_STEP) * OWN_STEP
    # --8<-- [end:ex_segment]


@dataclass(eq=False)  # the same only if it is the same one
class Block:
    """Neighbouring bytes of one segment, which one tensor has, or none."""

    start: int  # address
    size: int
    small: bool  # of a small segment
    requested: int = 0  # bytes of the tensor, which may be fewer than the block's
    before: "Block | None" = None  # neighbours in the same segment
    after: "Block | None" = None


@dataclass(frozen=True)
class Bytes:
    """Three sums at one moment. Each is at least as large as the one before it."""

    requested: int  # by tensors
    allocated: int  # blocks that tensors have
    reserved: int  # segments


class Allocator:
    """Segments of a GPU with room for `capacity` bytes, cut into blocks that are free or not."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.free: list[Block] = []
        self.requested = self.allocated = self.reserved = 0
        self.segments: list[Block] = []  # the first block of each

    def sums(self) -> Bytes:
        """The three sums of this moment."""
        return Bytes(self.requested, self.allocated, self.reserved)

    def allocate(self, nbytes: int) -> Block:
        """A block for a tensor of so many bytes: a free one if one fits, else one of a new segment."""
        size = block_size(nbytes)
        block = self.find(size) or self.reserve(size)
        self.free.remove(block)
        self.split(block, size)
        block.requested = nbytes
        self.requested += nbytes
        self.allocated += block.size
        return block

    def find(self, size: int) -> Block | None:
        """The smallest free block that can hold `size`; of equal ones the first by address; None if none can.

        Small requests look in small segments alone, and large ones in large segments.
        """
        # --8<-- [start:ex_find]
        fits = [block for block in self.free if block.size >= size and block.small == (size <= SMALL)]
        return min(fits, key=lambda block: (block.size, block.start), default=None)
        # --8<-- [end:ex_find]

    def reserve(self, size: int) -> Block:
        """Ask the GPU for a segment; it is one free block."""
        wanted = segment_size(size)
        if self.capacity is not None and self.reserved + wanted > self.capacity:
            raise OutOfMemoryError(
                f"a tensor needs {size / MIB:g} MiB. The GPU has {self.capacity / MIB:g} MiB, of which "
                f"{self.reserved / MIB:g} MiB are reserved; {self.allocated / MIB:g} MiB of them belong to "
                f"tensors, and the largest free block has {self.largest_free() / MIB:g} MiB"
            )
        block = Block(self.reserved, wanted, size <= SMALL)
        self.reserved += wanted
        self.segments.append(block)
        self.free.append(block)
        return block

    def largest_free(self) -> int:
        """Bytes of the largest free block."""
        return max((block.size for block in self.free), default=0)

    def split(self, block: Block, size: int) -> None:
        """Keep the first `size` bytes of a block, and let the rest be a free block, if it is worth one.

        In a small segment a rest of the smallest size is worth it; in a large one, a rest above `SMALL`.
        """
        # --8<-- [start:ex_split]
        rest = block.size - size
        if rest >= SMALLEST if block.small else rest > SMALL:
            new = Block(block.start + size, rest, block.small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = new
            block.size, block.after = size, new
            self.free.append(new)
        # --8<-- [end:ex_split]

    def release(self, block: Block) -> None:
        """The tensor has gone: its block is free, together with free neighbours. The segment stays."""
        self.requested -= block.requested
        self.allocated -= block.size
        block.requested = 0
        merged = self.merge(block)  # which may make a new list of the free ones
        self.free.append(merged)

    def merge(self, block: Block) -> Block:
        """One block out of this one and its free neighbours, which are no longer in the list."""
        # --8<-- [start:ex_merge]
        if block.before in self.free:
            block = block.before
            self.free.remove(block)
            self._join(block)
        if block.after in self.free:
            self.free.remove(block.after)
            self._join(block)
        return block
        # --8<-- [end:ex_merge]

    def _join(self, block: Block) -> None:
        """Let a block have the bytes of the one after it."""
        gone = block.after
        if gone is None:
            raise ValueError("nothing comes after the last block of a segment")
        block.size += gone.size
        block.after = gone.after
        if gone.after is not None:
            gone.after.before = block

    def layout(self) -> list[list[tuple[int, bool]]]:
        """Every segment's blocks in order: their sizes, and whether a tensor has them."""
        found = []
        for block in self.segments:
            blocks: list[tuple[int, bool]] = []
            at: Block | None = block
            while at is not None:
                blocks.append((at.size, at not in self.free))
                at = at.after
            found.append(blocks)
        return found


def replay(order: Iterable[int], allocator: Allocator | None = None) -> Iterator[Bytes]:
    """The sums after each event of a history: bytes that are asked for, or -k for a free of the k-th last."""
    allocator = allocator or Allocator()
    blocks: list[Block] = []
    for event in order:
        if event >= 0:
            blocks.append(allocator.allocate(event))
        else:
            allocator.release(blocks[event])
        yield allocator.sums()
