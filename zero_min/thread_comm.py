"""Ranks as threads: a whole world inside one notebook cell.

The ranks share the process, so they also share the global random generator, the default dtype and
every module-level variable. Give each rank its own `torch.Generator`, and keep state on objects.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from zero_min.comm import Comm, Handle, WorldError, add_up, caller, describe

T = TypeVar("T")
GRACE = 1.0  # seconds that the other ranks have to end after one has failed


class _World:
    """What the threads of one world share: one slot a rank, and two barriers around reading them."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.lock = threading.Lock()
        self.slots: list[tuple[str, Any] | None] = [None] * size
        self.mail: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)  # (from, to): what is on its way
        self.news = threading.Condition(self.lock)  # somebody sent, waits or has ended
        self.receiving: dict[int, int] = {}  # who waits for whose mail
        self.last = ["has made no collective call yet"] * size
        self.failure: BaseException | None = None
        self.failed_rank, self.failed_at = -1, 0.0
        self.finished: set[int] = set()
        self.arrive = threading.Barrier(size)
        self.leave = threading.Barrier(size, action=self._clear)

    def _clear(self) -> None:
        self.slots = [None] * self.size  # nobody's buffer stays alive because it was once sent

    def abort(self) -> None:
        self.arrive.abort()
        self.leave.abort()
        with self.news:
            self.news.notify_all()

    def everybody_waits(self) -> bool:
        """Whether no rank can go on: each has ended, is in a meeting, or waits for mail that is not there."""
        return all(
            rank in self.finished
            or self.slots[rank] is not None
            or (rank in self.receiving and not self.mail[self.receiving[rank], rank])
            for rank in range(self.size)
        )

    def given_up(self) -> bool:
        """Whether a rank failed so long ago that one still busy elsewhere is no longer waited for."""
        return self.failure is not None and time.monotonic() - self.failed_at > GRACE

    def fail(self, rank: int, error: BaseException) -> None:
        with self.lock:
            if self.failure is None:
                self.failure, self.failed_rank = error, rank
                self.failed_at = time.monotonic()
        self.abort()

    def finish(self, rank: int) -> None:
        with self.lock:
            self.finished.add(rank)
            self.news.notify_all()
            someone_waits = any(slot is not None for slot in self.slots)
        if someone_waits:  # for this rank, in vain
            self.abort()

    def why_no_mail(self, rank: int, source: int) -> WorldError:
        if self.failure is not None:
            return self.why_stopped()
        if self.everybody_waits():
            lines = ["nobody can go on, because nobody is left who could send:"]
        else:
            lines = [f"rank {rank} waits for rank {source}, which sends nothing (limit {self.timeout} s):"]
        for each, last in enumerate(self.last):
            if each in self.receiving or self.slots[each] is not None:
                lines.append(f"  rank {each}: waits in {last}")
            else:
                end = "returned" if each in self.finished else "is busy"
                lines.append(f"  rank {each}: {end}; its last call: {last}")
        return WorldError("\n".join(lines))

    def why_stopped(self) -> WorldError:
        what = f"{type(self.failure).__name__}: {self.failure}"
        return WorldError(f"stopped, because rank {self.failed_rank} raised {what}")

    def why_broken(self) -> WorldError:
        if self.failure is not None:
            return self.why_stopped()
        away = [rank for rank in range(self.size) if self.slots[rank] is None]
        absent = [rank for rank in away if rank in self.finished] or away
        lines = []
        for rank in range(self.size):
            if rank not in away:
                lines.append(f"  rank {rank}: waits in {self.last[rank]}")
            else:
                end = "returned" if rank in self.finished else "had not come yet"
                lines.append(f"  rank {rank}: {end}; its last call: {self.last[rank]}")
        return WorldError("\n".join([f"rank {absent} never arrived (limit {self.timeout} s):", *lines]))


class ThreadComm(Comm):
    """One rank of a world whose ranks are threads of this process. Made by `run_world`."""

    def __init__(self, rank: int, world: _World) -> None:
        super().__init__(rank, world.size)
        self.world = world

    def _send(self, tensor: Tensor, to: int) -> None:
        with self.world.news:
            self.world.mail[self.rank, to].append(tensor.detach().clone())
            self.world.news.notify_all()

    def _receive(self, like: Tensor, source: int) -> Tensor:
        world, me = self.world, self.rank
        wanted = describe("receive", like)
        deadline = time.monotonic() + world.timeout
        with world.news:
            world.last[me] = f"{wanted} from rank {source} at {caller()}"
            world.receiving[me] = source
            world.news.notify_all()  # this may have been the last rank that others hoped for
            while not world.mail[source, me]:
                in_vain = world.everybody_waits() or time.monotonic() > deadline
                if in_vain or world.failure is not None:
                    raise world.why_no_mail(me, source)
                world.news.wait(deadline - time.monotonic())
            del world.receiving[me]
            got = world.mail[source, me].popleft()
        if describe("receive", got) != wanted:
            raise WorldError(
                f"rank {source} sent {describe('', got)}, and rank {me} wants {describe('', like)}"
            )
        return got

    def _meet(self, call: str, payload: Any, read: Callable[[list[Any]], T]) -> T:
        """Put my payload down, wait for everybody, read all payloads, wait until all have read."""
        world = self.world
        with world.lock:
            world.slots[self.rank] = (call, payload)
            world.last[self.rank] = f"{call} at {caller()}"
            world.news.notify_all()
            in_vain = bool(world.finished)
        if in_vain:
            world.abort()
        try:
            world.arrive.wait(world.timeout)
            slots = [slot for slot in world.slots if slot is not None]
            if len({name for name, _ in slots}) > 1:
                lines = [f"  rank {rank}: {where}" for rank, where in enumerate(world.last)]
                raise WorldError("\n".join(["the ranks made different calls:", *lines]))
            result = read([payload for _, payload in slots])
            del slots  # from here on nobody but its owner keeps a payload alive
            world.leave.wait(world.timeout)
        except threading.BrokenBarrierError:
            raise world.why_broken() from None
        return result

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        total = self._meet(describe("all_reduce", tensor), tensor, add_up)
        return tensor.copy_(total)

    def _all_to_all(self, call: str, parts: Sequence[Tensor], sizes: Sequence[int] | None) -> list[Tensor]:
        return self._meet(call, parts, lambda all_: [sent[self.rank].clone() for sent in all_])

    def _reduce_scatter(self, call: str, parts: Sequence[Tensor]) -> Tensor:
        return self._meet(call, parts, lambda all_: add_up([sent[self.rank] for sent in all_]))

    def _all_gather(self, call: str, whole: Tensor, mine: Tensor) -> Tensor:
        joined = self._meet(call, mine, torch.cat)
        return whole.copy_(joined.view_as(whole))

    def _start_all_gather(self, call: str, whole: Tensor, mine: Tensor) -> Handle:
        # Threads share a memory, so nothing has to travel: the ranks meet when they wait, the first time.
        return Handle(cache(lambda: self._all_gather(call, whole, mine)))

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        call = describe(f"broadcast from {source}", tensor)
        return tensor.copy_(self._meet(call, tensor, lambda all_: all_[source].clone()))

    def _barrier(self) -> None:
        self._meet("barrier()", None, lambda all_: None)


def run_world(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    telephone: type[ThreadComm] = ThreadComm,
) -> list[T]:
    """Call `fn(comm, *args)` on every rank at once; return the results in rank order.

    If a rank raises, the others are woken, and the first error is raised here with its rank. No rank
    waits longer than `timeout` seconds for another. `telephone` may be another, say `ring.RingComm`.
    """
    if world_size < 1:
        raise ValueError(f"a world needs at least one rank, got world_size={world_size}")
    world = _World(world_size, timeout)
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        torch.set_num_threads(1)  # a rank is one worker; N ranks must not each start N threads
        try:
            # On a GPU, autograd would run hooks in threads of its own: keep them in the rank's thread.
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(telephone(rank, world), *args)
            world.finish(rank)
        except BaseException as error:
            world.fail(rank, error)

    threads_before = torch.get_num_threads()
    ranks = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    try:
        for thread in ranks:
            thread.start()
        for thread in ranks:
            while thread.is_alive() and not world.given_up():
                thread.join(0.05)
    finally:  # an interrupt, say from a notebook's stop button, must not leave ranks waiting for each other
        world.abort()
        torch.set_num_threads(threads_before)
    if world.failure is not None:
        what = f"{type(world.failure).__name__}: {world.failure}"
        raise WorldError(f"rank {world.failed_rank} of {world_size}: {what}") from world.failure
    return results
