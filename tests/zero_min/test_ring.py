"""Collectives made of messages: the sums, the bytes, the order of the sums, and messages that never come."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.worlds import run_in
from zero_min import STAGES, WorldError, ring, run_world
from zero_min.comm import Comm
from zero_min.ring import RingComm

PLACES = ["threads", "processes"]
SIZES = [0, 1, 2, 3, 7, 12]


def numbers(comm: Comm, n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float64) + 10 * comm.rank


def cut(tensor: Tensor, N: int) -> list[Tensor]:
    return [piece.clone() for piece in torch.tensor_split(tensor, N)]


def gathered(comm: Comm, mine: Tensor) -> Tensor:
    whole = torch.zeros(comm.world_size * mine.numel(), dtype=mine.dtype)
    return RingComm.all_gather(comm, whole, mine)  # type: ignore[arg-type]  # it needs no more than a Comm


BY_MESSAGES: dict[str, Callable[[Comm, Tensor], Tensor]] = {
    "all_reduce": lambda comm, x: ring.all_reduce(comm, x.clone()),
    "reduce_scatter": lambda comm, x: ring.reduce_scatter(comm, cut(x, comm.world_size)),
    "all_gather": gathered,
}
AT_ONCE: dict[str, Callable[[Comm, Tensor], Tensor]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x.clone()),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(cut(x, comm.world_size)),
    "all_gather": lambda comm, x: comm.all_gather(x.new_zeros(comm.world_size * x.numel()), x),
}


def each_way(comm: Comm) -> list[tuple[str, int, Tensor, int, Tensor, int]]:
    """For every collective and size: the ring's result and bytes, and the backend's."""
    found = []
    for n in SIZES:
        for name in BY_MESSAGES:
            comm.ledger.clear_traffic()
            by_messages = BY_MESSAGES[name](comm, numbers(comm, n))
            sent = comm.ledger.total_sent()
            assert sent == comm.ledger.sent["send"]
            at_once = AT_ONCE[name](comm, numbers(comm, n))
            found.append((name, n, by_messages, sent, at_once, comm.ledger.total_sent() - sent))
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("N", [1, 2, 3, 4])
def test_the_ring_s_sums_and_bytes_are_the_collectives(place: str, N: int) -> None:
    for rank, results in enumerate(run_in(place, each_way, N)):
        assert len(results) == 3 * len(SIZES)
        for name, n, by_messages, sent, at_once, charged in results:
            assert torch.equal(by_messages, at_once), (rank, name, n)  # whole numbers: no order is visible
            assert sent == charged, f"rank {rank}, {name} of {n}: sends {sent} bytes, is charged {charged}"


def test_piece_j_is_added_up_on_its_way_from_rank_j_plus_1_to_rank_j() -> None:
    N, n = 4, 8

    def values(rank: int) -> Tensor:
        return torch.randn(n, generator=torch.Generator().manual_seed(rank))

    got = run_world(lambda comm: ring.all_reduce(comm, values(comm.rank)), N)
    expected = []
    for j in range(N):
        total = values((j + 1) % N).chunk(N)[j].clone()
        for hop in range(2, N + 1):
            total = total + values((j + hop) % N).chunk(N)[j]
        expected.append(total)
    assert all(torch.equal(each, torch.cat(expected)) for each in got)  # the same bits everywhere


def test_reduce_scatter_leaves_the_pieces_alone() -> None:
    def body(comm: Comm) -> bool:
        pieces = cut(numbers(comm, 6), comm.world_size)
        before = [piece.clone() for piece in pieces]
        ring.reduce_scatter(comm, pieces)
        return all(torch.equal(a, b) for a, b in zip(pieces, before, strict=True))

    assert run_world(body, 1) == [True] and run_world(body, 3) == [True] * 3


@pytest.mark.parametrize("stage", STAGES)
def test_training_over_the_ring_sends_what_the_ledger_says_without_it(stage: int) -> None:
    def train(comm: Comm) -> tuple[int, int]:
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        trainer = STAGES[stage](model, comm)
        comm.ledger.clear_traffic()
        trainer.backward(model(torch.full((2, 4), comm.rank + 1.0)).sum())
        trainer.step()
        return comm.ledger.total_sent(), comm.ledger.sent["send"]

    usual = run_world(train, 3)
    over_the_ring = run_world(train, 3, telephone=RingComm)
    assert [total for total, _ in over_the_ring] == [total for total, _ in usual]
    assert all(total == sent for total, sent in over_the_ring)
    assert all(sent == 0 for _, sent in usual)


def test_messages_arrive_in_the_order_they_were_sent_and_are_copies() -> None:
    def body(comm: Comm) -> list[float]:
        x = torch.zeros(1)
        if comm.rank == 0:
            for value in (1.0, 2.0, 3.0):
                x.fill_(value)
                comm.send(x, 1)
            return []
        return [comm.receive(x, 0).item() for _ in range(3)]

    assert run_world(body, 2)[1] == [1.0, 2.0, 3.0]


def all_receive_first(comm: Comm) -> None:
    comm.receive(torch.zeros(2), (comm.rank - 1) % comm.world_size)


def one_returns(comm: Comm) -> None:
    if comm.rank == 1:
        comm.receive(torch.zeros(2), 0)


def one_meets(comm: Comm) -> None:
    if comm.rank == 0:
        comm.barrier()
    comm.receive(torch.zeros(2), 0)


@pytest.mark.parametrize("body", [all_receive_first, one_returns, one_meets])
def test_who_waits_in_vain_is_told_at_once_who_stands_where(body: Callable[[Comm], None]) -> None:
    with pytest.raises(
        WorldError, match=r"nobody is left who could send:\n  rank 0: .*\n  rank 1: waits in receive"
    ):
        run_world(body, 2, timeout=30.0)


def test_mail_that_is_too_late_is_not_waited_for() -> None:
    def body(comm: Comm) -> None:
        if comm.rank == 0:
            time.sleep(0.5)
            comm.send(torch.zeros(2), 1)
        else:
            comm.receive(torch.zeros(2), 0)

    with pytest.raises(WorldError, match=r"rank 1 waits for rank 0.*\n  rank 0: is busy"):
        run_world(body, 2, timeout=0.1)


def test_a_rank_that_fails_wakes_who_waits_for_its_mail() -> None:
    def body(comm: Comm) -> None:
        if comm.rank == 0:
            raise KeyError("lost")
        comm.receive(torch.zeros(2), 0)

    with pytest.raises(WorldError, match="rank 0 of 2: KeyError"):
        run_world(body, 2)


def test_what_comes_must_have_the_shape_that_is_awaited() -> None:
    def body(comm: Comm) -> None:
        if comm.rank == 0:
            comm.send(torch.zeros(3), 1)
        else:
            comm.receive(torch.zeros(2), 0)

    with pytest.raises(
        WorldError, match=r"rank 0 sent \(\[3\] float32\), and rank 1 wants \(\[2\] float32\)"
    ):
        run_world(body, 2)


@pytest.mark.parametrize("rank", [-1, 0, 2])
def test_nobody_talks_to_themselves_or_to_a_rank_that_is_not_there(rank: int) -> None:
    for call in (
        lambda comm: comm.send(torch.zeros(1), rank),
        lambda comm: comm.receive(torch.zeros(1), rank),
    ):
        with pytest.raises(WorldError, match=rf"cannot (send to|receive from) rank {rank}"):
            run_world(lambda comm, call=call: call(comm) if comm.rank == 0 else None, 2)
