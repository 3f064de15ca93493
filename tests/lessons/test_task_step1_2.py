"""Lesson 1/2's tasks, one claim at a time. A learner's file takes the place of zero_min's ring."""

import pytest
import torch
from torch import Tensor

from lessons.evidence import same
from zero_min import ring, run_world
from zero_min.comm import Comm


def pieces_of(comm: Comm) -> list[Tensor]:
    """Piece j of rank r is [10 r + j], so that every sum tells who is in it."""
    return [torch.tensor([10.0 * comm.rank + j]) for j in range(comm.world_size)]


@pytest.mark.parametrize("N", [2, 4, 1])
def test_neighbours_stand_in_a_ring(N: int) -> None:
    got = [tuple(pair) for pair in run_world(ring.neighbours, N)]
    expected = {1: [(0, 0)], 2: [(1, 1), (0, 0)], 4: [(3, 1), (0, 2), (1, 3), (2, 0)]}[N]
    straight = [(r - 1, r + 1) for r in range(N)]
    known = {"the ring is not closed at either end": straight}
    known["rank 0 has no left neighbour: the ring is not closed"] = [
        (left, right) for (left, _), (_, right) in zip(straight, expected, strict=True)
    ]
    known["the last rank has no right neighbour: it is not closed"] = [
        (left, right) for (left, _), (_, right) in zip(expected, straight, strict=True)
    ]
    known["left and right are exchanged"] = [(right, left) for left, right in expected]
    same(f"(left, right) of {N} ranks", got, expected, lookalikes=known)


def scattered(comm: Comm) -> tuple[float, list[float], int, int]:
    pieces = pieces_of(comm)
    mine = ring.reduce_scatter(comm, pieces)
    messages = sum(event.what == "send" for event in comm.ledger.events)
    return mine.item(), torch.cat(pieces).tolist(), comm.ledger.total_sent(), messages


@pytest.mark.parametrize("N", [2, 3, 4, 1])
def test_reduce_scatter_gives_each_rank_the_sum_of_its_piece(N: int) -> None:
    got = [mine for mine, _, _, _ in run_world(scattered, N)]
    expected = [float(sum(10 * rank + j for rank in range(N))) for j in range(N)]
    known = {
        "nothing is added on the way: this is what set out": [10.0 * ((j + 1) % N) + j for j in range(N)]
    }
    other = [total + (j + 1) % N - j for j, total in enumerate(expected)]
    known["another piece sets out: piece j begins at rank j + 1, and comes home last"] = other
    further = [expected[j - 1] + 10.0 * j + (j - 1) % N for j in range(N)]
    known["one round too many: a sum that has come home goes on to the next rank"] = further
    same(
        f"sums of {N} ranks", got, expected, by_rank=True, lookalikes=known
    )  # without `world`: no mean is asked


def test_reduce_scatter_leaves_the_pieces_as_they_are() -> None:
    for rank, (_, pieces, _, _) in enumerate(run_world(scattered, 3)):
        expected = [10.0 * rank + j for j in range(3)]
        same(f"rank {rank}'s pieces afterwards", pieces, expected, before=expected)


def test_reduce_scatter_sends_every_piece_but_one_to_the_right() -> None:
    sent, messages = zip(*[answer[2:] for answer in run_world(scattered, 4)], strict=True)
    same("bytes sent by each of 4 ranks, pieces of 4 bytes", sent, [12] * 4, about="bytes")
    same("messages sent by each of 4 ranks", messages, [3] * 4)


def test_reduce_scatter_of_pieces_of_different_length() -> None:
    def body(comm: Comm) -> list[float]:
        return ring.reduce_scatter(comm, [torch.ones(2), torch.ones(1), torch.ones(0)]).tolist()

    assert run_world(body, 3) == [[3.0, 3.0], [3.0], []], "pieces of 2, 1 and 0 elements: sums of that length"


def collected(comm: Comm) -> tuple[list[float], int, int]:
    pieces = [torch.full((2,), -7.0) for _ in range(comm.world_size)]
    pieces[comm.rank].fill_(comm.rank)
    given = list(pieces)
    ring.all_gather(comm, pieces)
    messages = sum(event.what == "send" for event in comm.ledger.events)
    return torch.cat(given).tolist(), comm.ledger.total_sent(), messages


@pytest.mark.parametrize("N", [1, 2, 3, 4])
def test_all_gather_fills_in_everybody_s_piece(N: int) -> None:
    expected = [float(rank) for rank in range(N) for _ in range(2)]
    for rank, (got, _, _) in enumerate(run_world(collected, N)):
        before = [float(rank) if owner == rank else -7.0 for owner in range(N) for _ in range(2)]
        left = float((rank - 1) % N)
        again = [float(rank) if owner == rank else left for owner in range(N) for _ in range(2)]
        known = {"what has come is not passed on: every round sent the own piece": again}
        what = f"the caller's tensors on rank {rank} of {N}"
        same(what, got, expected, before=before, lookalikes=known)


def test_all_gather_sends_n_minus_1_pieces() -> None:
    sent, messages = zip(*[answer[1:] for answer in run_world(collected, 4)], strict=True)
    same("bytes sent by each of 4 ranks, pieces of 8 bytes", sent, [24] * 4, about="bytes")
    same("messages sent by each of 4 ranks", messages, [3] * 4)


def reduced(comm: Comm, n: int) -> tuple[list[float], bool, int]:
    tensor = torch.arange(float(n)) + 100 * comm.rank
    answer = ring.all_reduce(comm, tensor)
    return tensor.tolist(), answer is tensor, comm.ledger.total_sent()


@pytest.mark.parametrize(("N", "n"), [(1, 3), (2, 4), (3, 7), (4, 2)])
def test_all_reduce_sums_in_place_whatever_the_length(N: int, n: int) -> None:
    expected = [float(sum(x + 100 * rank for rank in range(N))) for x in range(n)]
    for rank, (got, in_place, _) in enumerate(run_world(reduced, N, n)):
        before = [x + 100.0 * rank for x in range(n)]
        same(f"the tensor on rank {rank} of {N}", got, expected, world=N, before=before)
        assert in_place, "all_reduce should return the tensor that it was given"


def test_all_reduce_sends_two_times_all_but_one_piece() -> None:
    got = [sent for _, _, sent in run_world(reduced, 4, 8)]
    expected = [2 * 3 * 2 * 4] * 4
    same("bytes sent by 4 ranks for 8 numbers", got, expected, about="bytes")


def test_all_reduce_keeps_the_shape() -> None:
    got = run_world(lambda comm: list(ring.all_reduce(comm, torch.ones(2, 3)).shape), 2)
    assert got == [[2, 3]] * 2, f"a tensor of shape [2, 3] should keep it, got {got}"
