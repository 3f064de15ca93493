"""Slices that travel through the host's memory: the bits of CPU ranks, whenever the device comes to them."""

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.simulated import SimulatedQueue
from tests.worlds import POOL, RankError
from tests.zero_full.test_transport import CASES, Case, every_call, everyone, numbers
from zero_full.comm import communicator, device_queue
from zero_full.comm.communicator import Communicator
from zero_full.comm.host_staging import Staged
from zero_full.comm.shared import share_memory
from zero_full.comm.topology import new_group, ranks_of
from zero_full.comm.transport import Exchange, Splits, Transport
from zero_full.errors import CommunicationError

WORLDS = [2, 3, 4]
CPU = torch.device("cpu")
ROOM = 1024  # bytes: most calls take several
WRAPS = 2**32 - 5  # numbers begin again after a few calls


def behind(messages: bool = False) -> Any:
    """What moves the rooms: over a group of its own, through small windows."""
    group = new_group(ranks_of(everyone()), like=everyone())
    return Exchange(group) if messages else share_memory(group, half=64)


def others(by: Transport, rank: int, world: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Calls that add nothing up in small types, and numbers in odd shapes."""
    parts = numbers(rank, 35 * world, torch.float32).mul(9).to(dtype)
    received = torch.zeros_like(parts)
    by.all_to_all(parts, received, Splits.even(len(parts), world))
    told = parts.clone()
    by.broadcast(told)
    gathered = torch.zeros(world * 301, dtype=dtype)
    gathered[rank * 301 : (rank + 1) * 301] = numbers(rank, 301, torch.float32).mul(9).to(dtype)
    by.all_gather(gathered)
    sums = {}
    for shape in [(), (5,), (0,), (700,)]:
        some = numbers(rank, 700, torch.float64)[: torch.Size(shape).numel()].clone().view(shape)
        by.sum_numbers(some)
        sums[f"sum {shape}"] = some
    counts = torch.arange(2**53, 2**53 + 7) + rank  # which no float holds
    by.sum_numbers(counts)
    for empty in (torch.empty(0), torch.empty(0, dtype=dtype)):
        by.broadcast(empty)
        by.all_to_all(empty, empty.clone(), Splits.even(0, world))
    return {"parts": received, "told": told, "gathered": gathered, "counts": counts, **sums}


def calls_of(by: Transport, rank: int, world: int, case: Case | torch.dtype) -> dict[str, Tensor]:
    """What a transport makes of a case."""
    return (
        others(by, rank, world, case) if isinstance(case, torch.dtype) else every_call(by, rank, world, case)
    )


EVERYTHING = [*CASES, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8]


def differing(comm: Any, seed: int, messages: bool) -> list[str]:
    """Which calls of a staged transport, on two streams in turn, do not give the bits of shared memory."""
    queue = SimulatedQueue(1000 * seed + comm.rank)
    by, plain = Staged(behind(messages), queue, ROOM, WRAPS), behind()
    got = []
    for number, case in enumerate(EVERYTHING):
        with queue.on(queue.side if number % 3 == 1 else queue.main):
            got.append(calls_of(by, comm.rank, comm.world_size, case))  # type: ignore[arg-type]
    objects = by.gather_objects(comm.rank)
    queue.synchronize()
    by.close()
    queue.end()
    wrong = [] if objects == list(range(comm.world_size)) else ["objects"]
    for case, results in zip(EVERYTHING, got, strict=True):
        want = calls_of(plain, comm.rank, comm.world_size, case)
        wrong += [f"{case} {name}" for name in want if not same_bits(results[name], want[name])]
    return wrong


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("world", WORLDS)
def test_results_are_those_of_shared_memory_bit_for_bit(world: int) -> None:
    assert POOL.run(differing, world, world, False) == [[]] * world


def test_where_there_is_no_shared_memory_rooms_travel_by_messages() -> None:
    assert POOL.run(differing, 2, 7, True) == [[]] * 2


# Mistakes that must be noticed -------------------------------------------------------------------


def no_wait(self: SimulatedQueue, flag: Any, number: int) -> None:
    """The stream goes on before the exchange."""


def early_signal(self: SimulatedQueue, flag: Any, number: int) -> None:
    """The exchange begins before the copies in."""
    flag.set(number)


def no_order(self: SimulatedQueue, mark: Any) -> None:
    """A room is taken by another stream before its copies back."""


def one_flag(by: Staged) -> None:
    """All rooms are ready when one is."""
    for room in by.desk.rooms:
        room.ready = by.desk.rooms[0].ready


MISTAKES: dict[str, Callable[[], Any]] = {
    "no wait": lambda: mock.patch.object(SimulatedQueue, "wait", no_wait),
    "early signal": lambda: mock.patch.object(SimulatedQueue, "signal", early_signal),
    "no order among streams": lambda: mock.patch.object(SimulatedQueue, "after", no_order),
    "one flag": nullcontext,
    "none": nullcontext,
}


def on_two_streams(comm: Any, mistake: str) -> int:
    """Calls that alternate between a slow stream and a fast one; how many are right."""
    queue = SimulatedQueue(comm.rank)
    queue.main.pauses, queue.side.pauses = [0.004], [0.0]
    with MISTAKES[mistake]():
        by = Staged(behind(), queue, ROOM)
        if mistake == "one flag":
            one_flag(by)
        wholes = []
        for number in range(12):
            with queue.on(queue.side if number % 2 else queue.main):
                wholes.append(torch.full((8 * comm.world_size,), comm.rank + number + 1.0))
                by.all_reduce(wholes[-1], 1)
        queue.synchronize()
        by.close()
    queue.end()
    ranks = range(comm.world_size)
    return sum(bool((w == sum(r + n + 1.0 for r in ranks)).all()) for n, w in enumerate(wholes))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_order_gives_wrong_numbers(mistake: str) -> None:
    right = [0]
    with suppress(RankError) if mistake == "one flag" else nullcontext():  # with it ranks may also get stuck
        right = POOL.run(on_two_streams, 2, mistake)
    assert right == [12, 12] if mistake == "none" else min(right) < 12


def two_at_once(comm: Any, seed: int) -> int:
    """Two communicators, each on its own stream, as reductions and gathers run; how many calls differ."""
    queue = SimulatedQueue(10 * seed + comm.rank)
    rank, world = comm.rank, comm.world_size
    lanes = [(Staged(behind(), queue, ROOM), stream) for stream in (queue.main, queue.side)]
    sums, wholes = [], []
    for number in range(30):
        by, stream = lanes[(number * seed) % 5 % 2]
        with queue.on(stream):
            sums.append(numbers(rank, 100 * world, torch.float32, number))
            by.all_reduce(sums[-1], world)
            wholes.append(torch.zeros(90 * world))
            wholes[-1][90 * rank : 90 * rank + 90] = numbers(rank, 90, torch.float32, number)
            by.all_gather(wholes[-1])
    queue.synchronize()
    for by, _ in lanes:
        by.close()
    queue.end()
    plain, wrong = behind(), 0
    for number, (mine, whole) in enumerate(zip(sums, wholes, strict=True)):
        want = numbers(rank, 100 * world, torch.float32, number)
        plain.all_reduce(want, world)
        all_of_it = torch.cat([numbers(r, 90, torch.float32, number) for r in range(world)])
        wrong += not torch.equal(mine, want) or not torch.equal(whole, all_of_it)
    return wrong


@pytest.mark.parametrize("seed", [1, 2])
def test_two_communicators_on_two_streams_do_not_mix(seed: int) -> None:
    assert POOL.run(two_at_once, 3, seed) == [0] * 3


# Failure -----------------------------------------------------------------------------------------


def staged_communicator(queue: SimulatedQueue) -> Communicator:
    """As an engine opens it for tensors on an accelerator, whose backend is gloo."""
    group = new_group(ranks_of(everyone()), like=everyone())
    with mock.patch.object(communicator, "queue_for", lambda device: queue):
        made = Communicator(group, torch.device("cuda"))
    assert isinstance(made.transport, Staged)
    return made


def what_fails(act: Callable[[], object]) -> str:
    try:
        act()
    except CommunicationError as error:
        return str(error).partition("\n")[0]
    return "nothing"


def a_peer_fails(comm: Any, how: str) -> list[Any]:
    """Rank 1 dies, or cannot exchange, or does not come. What the others hear, and what they have got."""
    queue = SimulatedQueue(comm.rank)
    by = staged_communicator(queue)
    inner: Any = by.transport.inner  # type: ignore[union-attr]
    inner.barrier.timeout_s = 0.3
    first, second, third = (torch.ones(400 * comm.world_size) for _ in range(3))
    by.all_reduce(first, 1, "first")
    queue.synchronize()
    if comm.rank == 1:
        if how == "dies":
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            inner.reduce_scatter = mock.Mock(side_effect=ValueError("no memory"))
        if how == "does not come":
            time.sleep(1.5)
            return []
    queue.main.queued.put((goes_on := threading.Event()).wait)
    by.all_reduce(second, 1, "second")
    by.reduce_scatter(third, third[:400], 1, "third")
    goes_on.set()  # nothing could run before: both calls have returned at once
    queue.synchronize()
    heard = [what_fails(lambda: by.check("norm")), what_fails(lambda: by.all_gather(third, "fourth"))]
    heard.append(what_fails(by.close))
    queue.end()
    if how == "raises" and comm.rank == 1:
        assert inner.reduce_scatter.call_count == 1, "an exchange was made after one had failed"
    return [bool((first == comm.world_size).all()), bool(second.isnan().all()), heard]


def test_a_rank_that_raises_and_those_that_wait_for_it_all_hear_it_and_get_nan() -> None:
    for rank, (right, is_nan, heard) in enumerate(POOL.run(a_peer_fails, 2, "raises")):
        why = "no memory" if rank else "timed out: rank 1 has not come within 0.3 s"
        earlier = f"failed: all_reduce, which was queued before, has failed: {why}"
        assert right and is_nan
        assert heard == [
            f"rank {rank} of 2: reading of norm {earlier}",
            f"rank {rank} of 2: all_gather of fourth {earlier}",
            "nothing",  # everybody knows
        ]


def test_a_rank_that_does_not_come_is_named() -> None:
    (right, is_nan, heard), _ = POOL.run(a_peer_fails, 2, "does not come")
    assert right and is_nan and "timed out: rank 1 has not come" in heard[0]


def told_by_its_death(comm: Any) -> None:
    raise RuntimeError(str(a_peer_fails(comm, "dies")))


def test_a_killed_rank_ends_the_wait_of_the_others() -> None:
    with pytest.raises(RankError) as caught:
        POOL.run(told_by_its_death, 3)
    text = str(caught.value)
    assert text.count("all_reduce, which was queued before, has failed: the process of rank 1 has ended") >= 2
    assert text.count("[True, True, [") >= 2


EARLIER = "all_reduce, which was queued before, has failed:"


def the_device_fails(comm: Any) -> list[str]:
    """On each rank a copy cannot be queued; then one device stops before a collective is ready."""
    queue = SimulatedQueue(comm.rank)
    by, other = staged_communicator(queue), staged_communicator(queue)
    for each in (by, other):
        each.transport.inner.barrier.timeout_s = 0.3  # type: ignore[union-attr]
    copy = queue.copy
    queue.copy = mock.Mock(side_effect=RuntimeError("out of memory"))  # type: ignore[method-assign]
    heard = [what_fails(lambda: other.all_reduce(torch.ones(2), 1, "first"))]
    heard.append(what_fails(lambda: other.all_reduce(torch.ones(2), 1, "second")))
    heard.append(what_fails(other.close))
    queue.copy = copy  # type: ignore[method-assign]
    never = threading.Event()
    if comm.rank == 0:
        queue.main.queued.put(lambda: never.wait(20))
        queue.has_failed = True
    by.all_reduce(torch.ones(2), 1, "third")
    heard.append(what_fails(by.close))
    never.set()
    return heard


def test_a_device_that_fails_is_heard_of_and_no_call_follows_one_that_was_half_made() -> None:
    for rank, heard in enumerate(POOL.run(the_device_fails, 2)):
        at = f"rank {rank} of 2: "
        assert heard[:3] == [
            f"{at}all_reduce of first failed: out of memory",
            f"{at}all_reduce of second failed: {EARLIER} out of memory",
            "nothing",
        ]
        assert ("timed out: rank 0" if rank else "CUDA error: an illegal memory access") in heard[3]


def never_told(comm: Any) -> str:
    queue = SimulatedQueue(comm.rank)
    by = staged_communicator(queue)
    by.transport.inner.all_reduce = mock.Mock(side_effect=ValueError("no memory"))  # type: ignore[union-attr]
    queue.main.queued.put((goes_on := threading.Event()).wait)
    by.all_reduce(torch.ones(2), 1, "last")
    goes_on.set()
    return what_fails(by.close)


def test_closing_raises_what_nobody_has_heard_of() -> None:
    assert all(text.endswith("has failed: no memory") for text in POOL.run(never_told, 2))


def ends_early(comm: Any) -> list[Any]:
    """Closing, and letting go, while most of the work is still to be done."""
    queue = SimulatedQueue(comm.rank)
    queue.main.pauses = [0.001]
    before, found = threading.active_count(), []
    for close in (True, False):
        by = Staged(behind(), queue, ROOM)
        wholes = [torch.ones(700 * comm.world_size) for _ in range(3)]
        for whole in wholes:
            by.all_reduce(whole, 1)
        began = time.monotonic()
        trace = weakref.ref(by)
        if close:
            by.close()
            found.append(all(room.passed.query() for room in by.desk.rooms if room.passed is not None))
        del by
        gc.collect()
        found += [trace() is None, time.monotonic() - began < 10]
        queue.synchronize()
        found.append(all(bool((whole == comm.world_size).all()) for whole in wholes))
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    queue.end()
    return [*found, threading.active_count() - before]


def test_who_closes_or_lets_go_early_gets_what_was_queued_and_leaves_no_thread() -> None:
    for *found, threads in POOL.run(ends_early, 2):
        assert all(found) and threads <= 0


# Where streams cannot wait ------------------------------------------------------------------------


class PlayedStream:
    """Of an accelerator, by torch's names, played by a `SimulatedStream`."""

    def __init__(self, queue: SimulatedQueue) -> None:
        self.queue = queue

    def record_event(self) -> Any:
        return self.queue.mark()

    def wait_event(self, mark: Any) -> None:
        self.queue.after(mark)


def by_a_host_that_waits(comm: Any) -> list[Any]:
    """The queue of an accelerator whose streams cannot wait, with copies that are played."""
    played = SimulatedQueue(comm.rank)
    queue = device_queue.HostWaits(torch.device("cuda"))
    queue.memory, queue.copy = played.memory, played.copy  # type: ignore[method-assign]
    whole = torch.full((400 * comm.world_size,), comm.rank + 1.0)
    with mock.patch.object(torch.accelerator, "current_stream", lambda device: PlayedStream(played)):
        by = Staged(behind(), queue, ROOM)
        for _ in range(3):
            by.all_reduce(whole, comm.world_size)
        played.synchronize()
        found = [float(whole.min()), float(whole.max())]
        by.inner.all_reduce = mock.Mock(side_effect=ValueError("no memory"))  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="has failed: no memory"):
            by.all_reduce(whole, 1)
        played.synchronize()
        by.close()
    played.end()
    return [*found, bool(whole.isnan().all())]


def test_where_streams_do_not_wait_the_host_does_and_hears_of_a_failure_at_once() -> None:
    assert POOL.run(by_a_host_that_waits, 3) == [[2.0, 2.0, True]] * 3
