"""The caching allocator: its sums at every moment, its segments, and what fragmentation is."""

import random
from itertools import pairwise

import pytest

from lessons.gpu_report import has_gpu, recorded, sums, torchs_reserved
from zero_min.allocator import MIB, Allocator, Block, OutOfMemoryError, replay


def check(made: Allocator) -> None:
    """Blocks fill the segments, sums are those of the blocks, and no two free neighbours stay apart."""
    blocks = [block for segment in made.layout() for block in segment]
    assert sum(size for size, _ in blocks) == made.reserved
    assert sum(size for size, taken in blocks if taken) == made.allocated
    assert made.requested <= made.allocated
    assert sorted(size for size, taken in blocks if not taken) == sorted(block.size for block in made.free)
    for segment in made.layout():
        pairs = pairwise(segment)
        assert all(left or right for (_, left), (_, right) in pairs)


def test_any_order_keeps_the_books() -> None:
    drawn, made, live = random.Random(0), Allocator(), list[Block]()
    for turn in range(600):
        if live and drawn.random() < 0.5:
            made.release(live.pop(drawn.randrange(len(live))))
        else:
            live.append(made.allocate(drawn.choice([4, 1000, 4000, MIB, 3 * MIB, 4 * MIB, 16 * MIB])))
        if turn % 20 == 0:
            check(made)
    before = made.reserved
    while live:
        made.release(live.pop())
    check(made)
    assert (made.requested, made.allocated, made.reserved) == (0, 0, before)  # nothing is given back
    assert all(len(segment) == 1 for segment in made.layout())


def test_a_replay_frees_the_request_that_is_named() -> None:
    sums = list(replay([1000, 3 * MIB, -2, 600, -1, -2]))
    assert [each.requested for each in sums] == [1000, 1000 + 3 * MIB, 3 * MIB, 600 + 3 * MIB, 3 * MIB, 0]
    assert [each.allocated for each in sums] == [1024, 1024 + 3 * MIB, 3 * MIB, 1024 + 3 * MIB, 3 * MIB, 0]
    assert [each.reserved // MIB for each in sums] == [2, 22, 22, 22, 22, 22]


def test_enough_free_bytes_in_pieces_are_too_few() -> None:
    made = Allocator(capacity=40 * MIB)
    blocks = [made.allocate(5 * MIB) for _ in range(8)]
    for block in blocks[::2]:
        made.release(block)
    assert made.allocated == 20 * MIB
    with pytest.raises(
        OutOfMemoryError, match=r"needs 6 MiB.*40 MiB are reserved.*20 MiB.*free block has 5 MiB"
    ):
        made.allocate(6 * MIB)
    made.allocate(5 * MIB)


def test_a_gpu_s_history_is_replayed_to_the_last_segment() -> None:
    recording = recorded()
    assert has_gpu(recording) and not recording["failures"]
    found = sums(recording)
    assert len(found) > 1000
    assert [each.reserved for each in found] == torchs_reserved(recording)
