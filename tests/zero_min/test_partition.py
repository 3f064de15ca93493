"""The partition arithmetic under many sizes and worlds."""

import random
from itertools import product

import pytest
import torch

from zero_min.stage1 import (
    flatten_dense_tensors_aligned,
    get_data_parallel_partitions,
    round_robin_reorder,
)
from zero_min.stage2 import overlap

WORLDS = range(1, 10)


def some_sizes() -> list[list[int]]:
    """Up to twelve sizes from 0 to 20: every pair of small ones, and forty lists by chance."""
    chance = random.Random(0)
    pairs = [list(pair) for pair in product(range(4), repeat=2)]
    return [*pairs, *([chance.randint(0, 20) for _ in range(chance.randint(1, 12))] for _ in range(40))]


each_world = pytest.mark.parametrize("world", WORLDS)


def tensors(sizes: list[int]) -> list[torch.Tensor]:
    """Tensors of these sizes whose elements are all different: 0, 1, 2, ..."""
    return list(torch.arange(sum(sizes), dtype=torch.float64).split(sizes))


@each_world
def test_reordering_deals_like_cards_and_can_be_undone(world: int) -> None:
    for sizes in some_sizes():
        given = tensors(sizes)
        reordered, position = round_robin_reorder(given, world)
        assert all(reordered[position[i]] is tensor for i, tensor in enumerate(given)), sizes
        assert sorted(position) == list(range(len(given)))
        owners = [i % world for tensor in reordered for i, t in enumerate(given) if t is tensor]
        assert owners == sorted(owners)  # first everything dealt to rank 0, then to rank 1, ...


@each_world
def test_flattening_keeps_every_element_and_pads_minimally(world: int) -> None:
    for sizes in some_sizes():
        flat = flatten_dense_tensors_aligned(tensors(sizes), world)
        numel = sum(sizes)
        assert torch.equal(flat[:numel], torch.arange(numel, dtype=torch.float64)), sizes
        assert flat.numel() % world == 0
        assert 0 <= flat.numel() - numel < world
        assert not flat[numel:].any()


@each_world
def test_partitions_cover_every_element_once_and_are_near_equal(world: int) -> None:
    for numel in range(51):
        flat = torch.arange(numel, dtype=torch.float64)
        parts = get_data_parallel_partitions(flat, world)
        assert len(parts) == world
        assert torch.equal(torch.cat(parts), flat), numel
        lengths = [part.numel() for part in parts]
        assert max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths, reverse=True)
        for part in parts:
            part.add_(1)
        assert torch.equal(flat, torch.arange(1, numel + 1, dtype=torch.float64))  # views, not copies


@each_world
def test_order_is_restored_after_reorder_flatten_and_cut(world: int) -> None:
    for sizes in some_sizes():
        given = tensors(sizes)
        reordered, position = round_robin_reorder(given, world)
        flat = torch.cat(get_data_parallel_partitions(flatten_dense_tensors_aligned(reordered, world), world))
        pieces = flat[: sum(sizes)].split([t.numel() for t in reordered])
        for i, tensor in enumerate(given):
            assert torch.equal(pieces[position[i]], tensor), sizes


@each_world
def test_overlaps_cut_an_interval_without_gaps(world: int) -> None:
    chance = random.Random(world)
    for _ in range(100):
        size = chance.randint(1, 15)
        start, end = sorted(min(chance.randint(0, 50), world * size) for _ in range(2))
        cuts = [overlap(start, end, rank, size) for rank in range(world)]
        assert [i for low, high in cuts for i in range(low, high)] == list(range(start, end))
        for rank, (low, high) in enumerate(cuts):
            assert low >= start
            assert low <= high
            assert low == high or rank * size <= low <= high <= (rank + 1) * size
