"""How bytes get from rank to rank: every transport gives what torch.distributed gives, in the same bits."""

import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.worlds import POOL
from zero_full._compat import all_gather_single, reduce_scatter_single
from zero_full.comm import shared_memory as shared
from zero_full.comm import transport
from zero_full.comm.communicator import Communicator, Transport, choose_transport
from zero_full.comm.shared_memory import share_memory
from zero_full.comm.traffic import Traffic
from zero_full.comm.transport import Exchange, Native, Splits, own_slice
from zero_full.errors import DesyncError
from zero_full.kernels import reference

WORLDS = [2, 3, 4]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")
Case = tuple[torch.dtype, int, float]
Results = dict[str, Tensor]
SHARDS = [(0, 1), (1, 3.0), (33, 1), (33, 3.0)]  # elements a rank, divisor; 33 are several pieces
CASES: list[Case] = [(dtype, *shard) for dtype in DTYPES for shard in SHARDS]


def numbers(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def in_rank_order(world: int, numel: int, dtype: torch.dtype, divisor: float, seed: int = 0) -> Tensor:
    """The sum over the ranks, first to last, over the divisor; 16-bit numbers in fp32, not rounded yet."""
    at_least = torch.promote_types(dtype, torch.float32)
    total = numbers(0, numel, dtype, seed).to(at_least)
    for rank in range(1, world):
        total = total + numbers(rank, numel, dtype, seed).to(at_least)
    return total / divisor


HALF = 64  # bytes of half a window


@contextmanager
def small_pieces() -> Iterator[None]:
    """Messages and what is summed at a time: a few elements. Windows are written in both ways by turns."""
    with (
        mock.patch.multiple(shared, TIMED=16, PIECES=3, TRIES=2),
        mock.patch.object(transport, "MESSAGE", 7),
        mock.patch.object(transport, "ROOM", 12),  # of four ranks, pieces of 4
        mock.patch.dict(reference.PIECE, cpu=3),
    ):
        yield


def everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def both() -> dict[str, Transport]:
    shared_memory = share_memory(everyone(), half=HALF)
    assert shared_memory is not None
    return {"exchange": Exchange(everyone()), "shared memory": shared_memory}


def every_call(by: Transport, rank: int, world: int, case: Case) -> Results:
    """What a transport makes of fresh numbers."""
    dtype, shard, divisor = case
    fresh = partial(numbers, rank, world * shard, dtype)
    apart = torch.full((shard,), 7.0, dtype=dtype)
    by.reduce_scatter(fresh(), apart, divisor)
    wide = torch.full((shard,), 7.0, dtype=torch.promote_types(dtype, torch.float32))
    by.reduce_scatter(fresh(), wide, divisor)
    flat = fresh()
    by.reduce_scatter(flat, own_slice(flat, rank, world), divisor)
    gathered = torch.full((world * shard,), 7.0, dtype=dtype)
    own_slice(gathered, rank, world).copy_(own_slice(fresh(), rank, world))
    by.all_gather(gathered)
    reduced = fresh()
    by.all_reduce(reduced, divisor)
    received = torch.full((world * shard,), 7.0, dtype=dtype)
    by.all_to_all(fresh(), received, Splits.even(world * shard, world))
    inside = own_slice(flat, rank, world)
    sums = {"apart": apart, "wide": wide, "inside": inside, "reduced": reduced}
    return {**sums, "gathered": gathered, "received": received}


def by_torch(rank: int, world: int, case: Case) -> Results:
    """The same with torch.distributed's own collectives, in fp64."""
    dtype, shard, divisor = case
    whole = numbers(rank, world * shard, dtype).double()
    scattered, gathered, reduced = whole.new_empty(shard), torch.empty_like(whole), whole.clone()
    received = torch.empty_like(whole)
    reduce_scatter_single(scattered, whole)
    all_gather_single(gathered, own_slice(whole, rank, world).clone())
    dist.all_to_all_single(received, whole)
    dist.all_reduce(reduced)
    scattered, reduced = scattered / divisor, reduced / divisor
    places = dict.fromkeys(["apart", "wide", "inside"], scattered)
    return {**places, "gathered": gathered, "reduced": reduced, "received": received}


def table(comm: Any) -> dict[tuple[str, Case], Results]:
    rank, world = comm.rank, comm.world_size
    with small_pieces():
        ways = both()
        results = {
            (name, case): every_call(way, rank, world, case) for case in CASES for name, way in ways.items()
        }
        again = {(name, CASES[-1]): every_call(way, rank, world, CASES[-1]) for name, way in ways.items()}
    for case in CASES:
        results["native", case] = every_call(Native(everyone()), rank, world, case)
        results["torch", case] = by_torch(rank, world, case)
    return results | {(f"{name} again", case): result for (name, case), result in again.items()}


@cache
def tables(world: int) -> list[dict[tuple[str, Case], Results]]:
    return POOL.run(table, world)


@pytest.mark.rotates
@pytest.mark.parametrize("way", ["exchange", "shared memory", "native"])
@pytest.mark.parametrize("world", WORLDS)
def test_results_are_torch_distributeds(world: int, way: str) -> None:
    for results in tables(world):
        for case in CASES:
            for call, want in results["torch", case].items():
                got = results[way, case][call]
                # Native sums 16-bit numbers in 16 bits; two of the calls are copies in any case.
                finest = got.dtype if way != "native" else case[0]
                tolerance = 0 if call in ("gathered", "received") else 4 * world * torch.finfo(finest).eps
                torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("way", ["exchange", "shared memory", "exchange again", "shared memory again"])
@pytest.mark.parametrize("world", WORLDS)
def test_sums_are_in_the_order_of_the_ranks_and_rounded_once_so_all_have_the_same_bits(
    world: int, way: str
) -> None:
    for rank, results in enumerate(tables(world)):
        for dtype, shard, divisor in CASES if "again" not in way else CASES[-1:]:
            got = results[way, (dtype, shard, divisor)]
            total = in_rank_order(world, world * shard, dtype, divisor)
            own = own_slice(total, rank, world)
            assert got["wide"].dtype == own.dtype and torch.equal(got["wide"], own)
            assert torch.equal(got["apart"], own.to(dtype))
            assert torch.equal(got["inside"], own.to(dtype))
            assert torch.equal(got["reduced"], total.to(dtype))


def what_it_does(comm: Any) -> list[str]:
    """The order of messages and sums in a reduce-scatter of three pieces."""
    by, did = Exchange(everyone()), list[str]()

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any) -> Any:
            did.append(name)
            return call(*args)

        return note

    with (
        mock.patch.object(transport, "MESSAGE", 7),
        mock.patch.object(transport, "add_up", noted("sum", transport.add_up)),
        mock.patch.object(by, "_post", noted("post", by._post)),
    ):
        by.reduce_scatter(torch.ones(comm.world_size * 20), torch.empty(20), 1)
    return did


def test_the_next_piece_is_on_the_wire_while_one_is_summed() -> None:
    assert POOL.run(what_it_does, 2) == [["post", "post", "sum", "post", "sum", "sum"]] * 2


def summed(comm: Any, dtype: torch.dtype) -> list[Tensor]:
    """Few numbers and more than fit into half a window, a single one, and some that are not contiguous."""
    by, sums = both()["shared memory"], []
    for numel in (0, 1, 7, 100):
        sums.append(numbers(comm.rank, numel, dtype))
        by.sum_numbers(sums[-1])
    by.sum_numbers(turned := numbers(comm.rank, 12, dtype).view(3, 4).t())
    by.sum_numbers(alone := numbers(comm.rank, 1, dtype)[0])
    return [*sums, turned.t().reshape(-1), alone.view(1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [2, 3])
def test_numbers_are_summed_in_the_order_of_the_ranks_whatever_their_shape(
    world: int, dtype: torch.dtype
) -> None:
    for sums in POOL.run(summed, world, dtype):
        for got, numel in zip(sums, (0, 1, 7, 100, 12, 1), strict=True):
            assert torch.equal(got, in_rank_order(world, numel, dtype, 1).to(dtype))


# Many calls, ranks that come at any time ---------------------------------------------------------


def many_calls(comm: Any, way: str, calls: int) -> int:
    """Random calls, with pauses wherever another rank could overtake this one; how many were right."""
    rank, world = comm.rank, comm.world_size
    mine, common = random.Random(rank), random.Random(17)
    right = 0
    with small_pieces():
        by: Any = both()[way]
        barrier = getattr(by, "barrier", None)

        def meet_and_dawdle(call: Any) -> None:
            assert barrier is not None
            barrier(call)
            time.sleep(mine.choice([0, 0, 0.002]))

        meet_and_dawdle.turn = getattr(barrier, "turn", None)  # type: ignore[attr-defined]
        by.barrier = meet_and_dawdle
        for seed in range(calls):
            time.sleep(mine.choice([0, 0, 0.002]))
            call, shard = common.choice(CALLS), common.choice([1, 2, 9, 30])
            right += call(by, rank, world, shard, seed)
    return right


def _scatter(by: Transport, rank: int, world: int, shard: int, seed: int) -> bool:
    out = torch.empty(shard)
    by.reduce_scatter(numbers(rank, world * shard, torch.float32, seed), out, 2.0)
    return torch.equal(
        out, own_slice(in_rank_order(world, world * shard, torch.float32, 2.0, seed), rank, world)
    )


def _gather(by: Transport, rank: int, world: int, shard: int, seed: int) -> bool:
    whole = torch.empty(world * shard)
    own_slice(whole, rank, world).copy_(numbers(rank, shard, torch.float32, seed))
    by.all_gather(whole)
    return torch.equal(whole, torch.cat([numbers(r, shard, torch.float32, seed) for r in range(world)]))


def _reduce(by: Transport, rank: int, world: int, shard: int, seed: int) -> bool:
    whole = numbers(rank, world * shard, torch.float32, seed)
    by.all_reduce(whole, 1)
    return torch.equal(whole, in_rank_order(world, world * shard, torch.float32, 1, seed))


def _sum(by: Transport, rank: int, world: int, shard: int, seed: int) -> bool:
    few = numbers(rank, shard, torch.float32, seed)
    by.sum_numbers(few)
    want = in_rank_order(world, shard, torch.float32, 1, seed)
    return torch.equal(few, want) if by.name == "shared memory" else torch.allclose(few, want, atol=1e-5)


def _exchange(by: Transport, rank: int, world: int, shard: int, seed: int) -> bool:
    received = torch.empty(world * shard)
    sent = numbers(rank, world * shard, torch.float32, seed)
    by.all_to_all(sent, received, Splits.even(world * shard, world))
    wholes = [numbers(r, world * shard, torch.float32, seed) for r in range(world)]
    return torch.equal(received, torch.cat([own_slice(whole, rank, world) for whole in wholes]))


CALLS = [_scatter, _gather, _reduce, _sum, _exchange]


@pytest.mark.parametrize("way", ["exchange", "shared memory"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_dawdle_never_read_what_belongs_to_another_call(world: int, way: str) -> None:
    assert POOL.run(many_calls, world, way, 60) == [60] * world


def test_windows_are_written_in_the_faster_way_which_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    now, takes = [0.0], {"plain": 1.0, "nontemporal": 1.0}
    piece, place = torch.arange(shared.TIMED, dtype=torch.uint8), torch.zeros(shared.TIMED, dtype=torch.uint8)

    class Place:
        def copy_(self, given: Tensor) -> None:
            now[0] += takes["plain"]
            place.copy_(given)

    def nontemporal_copy(given: Tensor, _: Any) -> None:
        now[0] += takes["nontemporal"]
        place.copy_(given)

    operators = SimpleNamespace(nontemporal_copy=nontemporal_copy)
    monkeypatch.setattr(shared, "compiled_for", lambda _: True)
    monkeypatch.setattr(shared, "operators", lambda _: operators)
    monkeypatch.setattr(shared, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    write, chosen = shared.WindowWriter(), []
    for takes["plain"], takes["nontemporal"] in [(1.0, 0.7), (5.0, 1.0), (5.0, 1.0), (1.0, 1.3), (1.0, 9.0)]:
        for _ in range(shared.PIECES + shared.TRIES):
            write(piece, Place())  # type: ignore[arg-type]
            assert torch.equal(place, piece)
            place.zero_()
        chosen.append(write.nontemporal)
    assert chosen == [False, True, True, False, False]


# Where there is no shared memory -----------------------------------------------------------------


def no_descriptor(secret: bytes, size: int) -> tuple[None, str]:
    return None, ""


def wrong_secret(path: str, length: int) -> bytes:
    return bytes(length)


def failing_memfd(name: str) -> int:
    raise PermissionError(1, "Operation not permitted")


OBSTACLES: dict[str, Callable[[], Any]] = {
    "no window": lambda: mock.patch.object(shared, "_make_window", no_descriptor),
    "another host": lambda: mock.patch.object(shared, "_start_of", wrong_secret),
    "a container that forbids it": lambda: mock.patch.object(os, "memfd_create", failing_memfd),
}


def one_rank_cannot(comm: Any, obstacle: str | None) -> tuple[bool, str, list[float], int]:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()  # what was left by others has descriptors, too
    whole, before = torch.full((4,), comm.rank + 1.0), descriptors()
    with OBSTACLES[obstacle]() if comm.rank == 1 and obstacle else mock.MagicMock():
        refused = share_memory(everyone()) is None
        by = choose_transport(everyone(), CPU)
        after = descriptors()
    by.all_reduce(whole, 1)
    return refused, by.name, whole.tolist(), after - before


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_if_one_rank_cannot_see_the_others_all_send_messages_instead(obstacle: str) -> None:
    assert POOL.run(one_rank_cannot, 2, obstacle, collective=5) == [(True, "exchange", [3.0] * 4, 0)] * 2


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="windows are for Linux")
def test_gloo_on_one_host_gets_shared_memory_and_keeps_no_descriptor_open() -> None:
    assert POOL.run(one_rank_cannot, 4, None) == [(False, "shared memory", [10.0] * 4, 0)] * 4


def by_messages(comm: Any, refuses: int) -> tuple[bool, list[float]]:
    whole = torch.full((4,), comm.rank + 1.0)
    with mock.patch.object(shared, "can_spin", lambda: comm.rank != refuses):
        by = share_memory(everyone())
    assert by is not None
    by.all_reduce(whole, 1)
    return isinstance(by.barrier, shared.SpinBarrier), whole.tolist()


def test_if_one_rank_cannot_meet_at_numbers_all_meet_by_messages() -> None:
    assert POOL.run(by_messages, 2, 1, collective=5) == [(False, [3.0] * 4)] * 2


def one_never_comes(comm: Any, seconds_there: float) -> str:
    by: Any = share_memory(everyone())
    by.barrier.timeout_s = 0.2
    try:
        if comm.rank == 0:
            by.all_reduce(torch.zeros(4), 1)
    except RuntimeError as error:
        return str(error)
    time.sleep(seconds_there)
    return "not there"


@pytest.mark.skipif(not shared.can_spin(), reason="ranks meet by messages here")
@pytest.mark.parametrize(
    ("seconds_there", "reason"),
    [(1.0, "timed out: rank 1 has not come within 0.2 s"), (0, "rank 1 has destroyed its engine or exited")],
)
def test_a_rank_that_does_not_come_is_named(seconds_there: float, reason: str) -> None:
    assert POOL.run(one_never_comes, 2, seconds_there) == [reason, "not there"]


def interrupted_at_a_barrier(comm: Any) -> list[bool]:
    """KeyboardInterrupt ends a gather on the last rank, which is early; whether the next ones are right."""
    by, right = share_memory(everyone(), half=HALF), list[bool]()
    assert by is not None
    is_interrupted = comm.rank == comm.world_size - 1
    for seed in range(4):
        want = torch.cat([numbers(rank, 5, torch.float32, seed) for rank in range(comm.world_size)])
        whole = torch.zeros_like(want)
        own_slice(whole, comm.rank, comm.world_size).copy_(own_slice(want, comm.rank, comm.world_size))
        if seed == 1 and is_interrupted:
            wait = mock.patch.object(shared.SpinBarrier, "_wait_for", side_effect=KeyboardInterrupt)
            with wait, pytest.raises(KeyboardInterrupt):
                by.all_gather(whole)
            continue
        time.sleep(0.1 * (seed == 1))
        by.all_gather(whole)
        right.append(torch.equal(whole, want))
    return right


def test_ranks_stay_together_after_an_interrupt_at_a_barrier() -> None:
    assert POOL.run(interrupted_at_a_barrier, 3) == [[True] * 4, [True] * 4, [True] * 3]


def test_a_process_that_has_ended_is_noticed_before_anybody_collects_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    deadline = time.monotonic() + 20
    while not shared._has_ended(child.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert shared._has_ended(child.pid)
    child.wait()
    assert shared._has_ended(child.pid) and not shared._has_ended(os.getpid())


def on_a_group_without_a_named_backend(comm: Any) -> tuple[str, str]:
    group = dist.new_group(backend="undefined")  # what init_process_group() makes, if it is given no name
    return dist.get_backend(group), choose_transport(group, CPU).name


def test_gloo_is_known_by_what_moves_the_bytes_not_by_the_name_the_user_gave() -> None:
    assert POOL.run(on_a_group_without_a_named_backend, 2) == [("undefined", "shared memory")] * 2


# What is counted ---------------------------------------------------------------------------------


def counted(comm: Any) -> tuple[dict[str, int], int]:
    """One call of each kind: fp32 to be scattered, bf16 gathered, fp64 reduced; and what costs nothing."""
    traffic, world = Traffic(), comm.world_size
    by = Communicator(everyone(), CPU, traffic)
    by.reduce_scatter(torch.ones(10 * world), torch.empty(10), world, "a")
    by.all_gather(torch.ones(6 * world, dtype=torch.bfloat16), "b")
    by.all_reduce(torch.ones(3 * world, dtype=torch.float64), 1, "c")
    by.all_gather(torch.ones(0), "nothing")
    by.sum_numbers(torch.ones(2), "d")
    by.broadcast(torch.ones(100), "e")
    by.gather_objects("f", "f")
    return dict(traffic.sent), traffic.total()


@pytest.mark.parametrize("world", WORLDS)
def test_bytes_sent_are_the_formulas_integers(world: int) -> None:
    whole = {"reduce_scatter": 40 * world, "all_gather": 12 * world, "all_reduce": 2 * 24 * world}
    want = {kind: payload * (world - 1) // world for kind, payload in whole.items()}
    assert POOL.run(counted, world) == [(want, sum(want.values()))] * world


def test_traffic_starts_again_from_zero() -> None:
    traffic = Traffic()
    traffic.add("all_gather", 3)
    traffic.clear()
    traffic.add("all_reduce", 5)
    assert (dict(traffic.sent), traffic.total()) == ({"all_reduce": 5}, 5)


def test_a_rank_that_is_alone_divides_copies_and_sends_nothing() -> None:
    alone, whole, out = Communicator(None, CPU), torch.arange(4.0), torch.empty(4, dtype=torch.bfloat16)
    alone.reduce_scatter(whole, out, 2.0, "a")
    assert out.tolist() == [0, 0.5, 1, 1.5] and whole.tolist() == [0, 1, 2, 3]
    alone.reduce_scatter(whole, whole, 2.0, "a")
    assert whole.tolist() == [0, 0.5, 1, 1.5]
    alone.all_reduce(whole, 0.5, "b")
    alone.all_gather(whole, "c")
    assert alone.sum_numbers(whole, "d").tolist() == [0, 1, 2, 3]
    assert alone.gather_objects("me", "e") == ["me"]
    assert alone.slice_of(whole).tolist() == whole.tolist() and (alone.rank, alone.size) == (0, 1)
    assert alone.traffic.total() == 0


def different_calls(comm: Any, what: str) -> list[str]:
    """What this rank hears, and what is left of its numbers, if the last rank makes another call."""
    ours, numbers = Communicator(everyone(), CPU), torch.full((8,), comm.rank + 1.0)
    is_last = comm.rank == comm.world_size - 1
    try:
        if is_last and what == "kind":
            ours.all_gather(numbers, "gradients")
        elif is_last and what == "size":
            ours.all_reduce(torch.ones(16), 1, "gradients")
        else:
            ours.all_reduce(numbers, 1, "parameters" if is_last else "gradients")
    except DesyncError as error:
        return [str(error), str(numbers.tolist())]
    return ["nothing"]


@pytest.mark.skipif(not shared.can_spin(), reason="ranks meet by messages here")
@pytest.mark.parametrize("what", ["kind", "size", "name"])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_of_one_host_that_make_different_calls_all_raise_and_read_nothing(
    what: str, world: int
) -> None:
    ranks = POOL.run(different_calls, world, what, collective=5)
    other = {"kind": "all_gather of gradients: 8", "size": "all_reduce of gradients: 16"}
    for rank, (said, left) in enumerate(ranks):
        assert "rank 0: all_reduce of gradients: 8 x float32" in said
        assert f"rank {world - 1}: {other.get(what, 'all_reduce of parameters: 8')} x float32" in said
        assert left == str([rank + 1.0] * 8)
