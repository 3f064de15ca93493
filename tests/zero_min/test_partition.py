"""The partition arithmetic under any sizes and any world."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_min.stage1 import (
    flatten_dense_tensors_aligned,
    get_data_parallel_partitions,
    round_robin_reorder,
)
from zero_min.stage2 import overlap

SIZES = st.lists(st.integers(0, 20), min_size=1, max_size=12)
WORLD = st.integers(1, 9)


def tensors(sizes: list[int]) -> list[torch.Tensor]:
    """Tensors of these sizes whose elements are all different: 0, 1, 2, ..."""
    return list(torch.arange(sum(sizes), dtype=torch.float64).split(sizes))


@given(SIZES, WORLD)
def test_reordering_deals_like_cards_and_can_be_undone(sizes: list[int], world: int) -> None:
    given_ = tensors(sizes)
    reordered, position = round_robin_reorder(given_, world)
    assert all(reordered[position[i]] is tensor for i, tensor in enumerate(given_))
    assert sorted(position) == list(range(len(given_)))
    owners = [i % world for tensor in reordered for i, t in enumerate(given_) if t is tensor]
    assert owners == sorted(owners)  # first everything dealt to rank 0, then to rank 1, ...


@given(SIZES, WORLD)
def test_flattening_keeps_every_element_and_pads_minimally(sizes: list[int], world: int) -> None:
    flat = flatten_dense_tensors_aligned(tensors(sizes), world)
    numel = sum(sizes)
    assert torch.equal(flat[:numel], torch.arange(numel, dtype=torch.float64))
    assert flat.numel() % world == 0
    assert 0 <= flat.numel() - numel < world
    assert not flat[numel:].any()


@given(st.integers(0, 50), WORLD)
def test_partitions_cover_every_element_once_and_are_near_equal(numel: int, world: int) -> None:
    flat = torch.arange(numel, dtype=torch.float64)
    parts = get_data_parallel_partitions(flat, world)
    assert len(parts) == world
    assert torch.equal(torch.cat(parts), flat)
    lengths = [part.numel() for part in parts]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)
    for part in parts:
        part.add_(1)
    assert torch.equal(flat, torch.arange(1, numel + 1, dtype=torch.float64))  # views, not copies


@given(SIZES, WORLD)
def test_order_is_restored_after_reorder_flatten_and_cut(sizes: list[int], world: int) -> None:
    given_ = tensors(sizes)
    reordered, position = round_robin_reorder(given_, world)
    flat = torch.cat(get_data_parallel_partitions(flatten_dense_tensors_aligned(reordered, world), world))
    pieces = flat[: sum(sizes)].split([t.numel() for t in reordered])
    for i, tensor in enumerate(given_):
        assert torch.equal(pieces[position[i]], tensor)


@given(st.integers(0, 40), st.integers(0, 20), WORLD, st.integers(1, 15))
def test_overlaps_cut_an_interval_without_gaps(start: int, length: int, world: int, size: int) -> None:
    end = min(start + length, world * size)
    start = min(start, end)
    covered = [i for rank in range(world) for i in range(*overlap(start, end, rank, size))]
    assert covered == list(range(start, end))
    for rank in range(world):
        low, high = overlap(start, end, rank, size)
        assert low >= start
        assert low <= high
        assert low == high or rank * size <= low <= high <= (rank + 1) * size
