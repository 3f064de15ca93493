"""Lesson 11's tasks, one claim at a time; run on zero_min or on a learner's file in its place."""

import pytest

from lessons.evidence import same
from zero_min import allocator
from zero_min.allocator import MIB, Allocator, Block

SIZES = {1: 512, 512: 512, 513: 1024, 4000: 4096, 4096: 4096, 5 * MIB + 4: 5 * MIB + 512}


@pytest.mark.parametrize("nbytes", SIZES)
def test_block_is_the_next_multiple_of_512(nbytes: int) -> None:
    below, above = nbytes // 512 * 512, nbytes // 512 * 512 + 512
    known = {
        "it is rounded down, so the tensor does not fit": below,
        "a multiple of 512 is rounded up, too": above,
        "it is not rounded": nbytes,
        "it is rounded to the next power of 2": 2 ** (nbytes - 1).bit_length(),
        "it is counted in units of 512, and should be in bytes": -(-nbytes // 512),
    }
    got = allocator.block_size(nbytes)
    same(f"the block of a tensor of {nbytes:,} bytes", got, SIZES[nbytes], lookalikes=known)


SEGMENTS = {512: 2, MIB: 2, MIB + 512: 20, 9 * MIB: 20, 10 * MIB: 10, 15 * MIB: 16, 64 * MIB + 512: 66}


@pytest.mark.parametrize("size", SEGMENTS)
def test_segment_is_small_large_or_of_its_own_size(size: int) -> None:
    known = {
        "it is as large as the block, so nothing is left for the next one": size,
        "a small segment for a block that is not small": 2 * MIB,
        "a segment of 20 MiB for a block that gets its own": 20 * MIB,
        "it is rounded down, so the block does not fit": size // (2 * MIB) * 2 * MIB,
        "it is rounded up to 20 MiB, and should be to 2 MiB": -(-size // (20 * MIB)) * 20 * MIB,
    }
    known = {cause: value for cause, value in known.items() if value != SEGMENTS[size] * MIB}
    got = allocator.segment_size(size)
    same(f"the segment for a block of {size:,} bytes", got, SEGMENTS[size] * MIB, lookalikes=known)


def with_free(*blocks: tuple[int, int, bool]) -> Allocator:
    """An allocator whose free blocks are these: address, size, whether of a small segment."""
    found = Allocator()
    found.free = [Block(start * MIB, size, small) for start, size, small in blocks]
    return found


def found_at(made: Allocator, size: int) -> int | None:
    """The address in MiB of the block that is chosen; None if there is none."""
    block = made.find(size)
    return None if block is None else block.start // MIB


def test_find_takes_the_smallest_that_fits() -> None:
    made = with_free((0, 5 * MIB, False), (20, 3 * MIB, False), (40, 9 * MIB, False), (60, 4 * MIB, False))
    known = {
        "the first one that fits is taken, and should be the smallest": 0,
        "it does not fit": 20,
        "the largest one is taken, and should be the smallest that fits": 40,
    }
    same("the address of the free block for 4 MiB, in MiB", found_at(made, 4 * MIB), 60, lookalikes=known)


def test_find_takes_the_first_by_address_of_equal_ones() -> None:
    made = with_free((40, 4 * MIB, False), (20, 4 * MIB, False), (60, 4 * MIB, False))
    known = {
        "the one that was freed first": 40,
        "the one that was freed last, or has the highest address": 60,
    }
    same("the address of the free block for 3 MiB, in MiB", found_at(made, 3 * MIB), 20, lookalikes=known)


def test_find_keeps_small_and_large_apart() -> None:
    made = with_free((0, MIB, False), (20, 2 * MIB, True))
    got = [found_at(made, MIB // 2), found_at(made, MIB + 512)]
    mixed = {"small requests look in large segments, or the other way round": [0, 20]}
    same("the addresses for half a MiB and for more than one, in MiB", got, [20, None], lookalikes=mixed)


def test_find_has_none_where_none_fits() -> None:
    made = with_free((0, 2 * MIB, False))
    known = {"a block that is too small": 0}
    same("the address of a free block for 3 MiB, in MiB", found_at(made, 3 * MIB), None, lookalikes=known)


def cut(total: int, size: int, small: bool) -> list[int]:
    """The sizes of a segment's blocks after its one block was split for a request."""
    made = Allocator()
    block = Block(0, total, small)
    made.segments.append(block)
    made.split(block, size)
    return [size for size, _ in made.layout()[0]]


SPLITS = {  # total, size, small: what comes out
    "4 MiB of 20": (20 * MIB, 4 * MIB, False, [4 * MIB, 16 * MIB]),
    "1,024 bytes of 2 MiB": (2 * MIB, 1024, True, [1024, 2 * MIB - 1024]),
    "all but 512 bytes of 2 MiB": (2 * MIB, 2 * MIB - 512, True, [2 * MIB - 512, 512]),
    "11 MiB of 12, in a large segment": (12 * MIB, 11 * MIB, False, [12 * MIB]),
    "10 MiB of 10": (10 * MIB, 10 * MIB, False, [10 * MIB]),
}


@pytest.mark.parametrize("name", SPLITS)
def test_split_lets_the_rest_be_a_block_if_it_is_worth_one(name: str) -> None:
    total, size, small, expected = SPLITS[name]
    known = {
        "the block is not cut: the rest of it is lost": [total],
        "the rest is no block, and its bytes are lost": [size],
        "the rest is not worth a block of its own": [size, total - size],
        "the rest comes first, and should come last": [total - size, size],
        "a block of its old size stays beside the rest": [total, total - size],
    }
    known = {cause: value for cause, value in known.items() if value != expected}
    got = cut(total, size, small)
    same(f"the blocks after a split, {name}", got, expected, about="memory", lookalikes=known)


def test_split_links_the_rest_with_its_neighbours() -> None:
    made = Allocator()
    first = made.allocate(4 * MIB)
    second = made.allocate(4 * MIB)
    made.free.append(first)  # as if its tensor had gone
    made.allocate(2 * MIB)
    blocks, at = [], made.segments[0]
    while at.after is not None:
        blocks.append(at.after.before is at)
        at = at.after
    same("whether the block after each one has it before itself", blocks, [True] * 3)
    rest = second.before
    got = None if rest is None else [rest.start // MIB, rest.size // MIB, rest in made.free]
    same("the block before the second tensor's: address and size in MiB, and is it free", got, [2, 2, True])


def freed(*order: int) -> list[list[int]]:
    """Four tensors of 4 MiB are freed in this order: the MiB of the segment's free blocks after each."""
    made = Allocator()
    blocks = [made.allocate(4 * MIB) for _ in range(4)]
    after = []
    for number in order:
        made.release(blocks[number])
        after.append([size // MIB for size, taken in made.layout()[0] if not taken])
    return after


ORDERS = {  # of a segment of 20 MiB, whose last 4 are free at the beginning
    (0, 1): [[4, 4], [8, 4]],
    (1, 0): [[4, 4], [8, 4]],
    (2, 3): [[4, 4], [12]],
    (0, 2, 1): [[4, 4], [4, 4, 4], [12, 4]],
    (3, 1, 2): [[8], [4, 8], [16]],
}


@pytest.mark.parametrize("order", ORDERS)
def test_merge_makes_one_block_of_free_neighbours(order: tuple[int, ...]) -> None:
    got = freed(*order)
    alone = [[4] * (1 + count) for count in range(1, len(order) + 1)]
    known = {"neighbours stay apart: no larger tensor will ever fit there": alone}
    same(
        f"free blocks in MiB after tensors {list(order)} of 4 were freed",
        got,
        ORDERS[order],
        lookalikes=known,
    )


def test_merge_leaves_a_tensor_s_block_alone() -> None:
    made = Allocator()
    blocks = [made.allocate(4 * MIB) for _ in range(3)]
    made.release(blocks[1])
    got = [(size // MIB, taken) for size, taken in made.layout()[0]]
    known = {"a block that a tensor still has was merged": [[12, False], [8, False]]}
    same(
        "blocks in MiB, and whether taken",
        got,
        [[4, True], [4, False], [4, True], [8, False]],
        lookalikes=known,
    )


def test_merge_keeps_no_free_block_twice() -> None:
    made = Allocator()
    blocks = [made.allocate(4 * MIB) for _ in range(3)]
    for block in blocks:
        made.release(block)
    got = [block.size // MIB for block in made.free]
    known = {"merged blocks are still in the list of free ones": [8, 20], "they all are": [8, 4, 4, 4]}
    same(
        "the list of free blocks in MiB after all tensors have gone",
        got,
        [20],
        about="kept",
        lookalikes=known,
    )
