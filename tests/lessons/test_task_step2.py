"""Lesson 2's tasks, one claim at a time. A learner's file takes the place of zero_min's."""

import pytest
import torch
from torch import nn

from zero_min import run_world, stage2
from zero_min.comm import Comm


@pytest.mark.parametrize(
    ("start", "end", "rank", "expected"),
    [(0, 10, 0, (0, 4)), (0, 10, 1, (4, 8)), (0, 10, 2, (8, 10)), (5, 7, 1, (5, 7)), (4, 8, 1, (4, 8))],
)
def test_overlap_is_the_part_in_the_slice(start: int, end: int, rank: int, expected: tuple[int, int]) -> None:
    got = tuple(stage2.overlap(start, end, rank, 4))
    assert got == expected, f"[{start}, {end}) and rank {rank}'s slice of 4: expected {expected}, got {got}"


def test_overlap_is_empty_where_there_is_none() -> None:
    for start, end, rank in [(0, 3, 2), (9, 12, 0), (5, 5, 1)]:
        low, high = stage2.overlap(start, end, rank, 4)
        assert low == high, f"[{start}, {end}) and rank {rank}: expected nothing, got [{low}, {high})"
        assert low >= start, f"an empty answer still starts at or after {start}, got {low}"


def backward(comm: Comm) -> tuple[list[float], int, int]:
    model = nn.Linear(3, 1, bias=False)
    stage = stage2.Stage2(model, comm)
    during = []
    for _ in range(2):  # two micro-batches add up
        stage.backward(model(torch.full((1, 3), float(comm.rank + 1))).sum())
        during.append(sum(p.grad is not None for p in model.parameters()))
    comm.barrier()
    return stage.flats[0].grad.tolist(), sum(during), comm.ledger.sent["reduce_scatter"]


def test_bucket_gives_each_rank_its_part_of_the_sum() -> None:
    got = run_world(backward, 2)
    own = [answer[0] for answer in got]
    expected = [[3.0, 3.0], [3.0, 0.0]]  # averages of 1 and 2, twice; rank 1's slice ends with padding
    assert own == expected, f"own gradients of 2 ranks: expected {expected}, got {own}"


def test_bucket_frees_the_whole_gradients() -> None:
    got = [answer[1] for answer in run_world(backward, 2)]
    assert got == [0, 0], f"whole gradients left after backward: expected none, got {got}"


def test_bucket_sends_only_what_others_own() -> None:
    got = [answer[2] for answer in run_world(backward, 2)]
    expected = [2 * 1 * 4, 2 * 2 * 4]  # rank 0 sends rank 1's one element, rank 1 sends rank 0's two
    assert got == expected, f"bytes sent by rank 0 and 1: expected {expected}, got {got}"
