"""A device that is not there: threads play its streams, late and in any order that a device may have.

`SimulatedQueue` is what `zero_full/comm/host_staging.py` asks of a device. Its "device memory" is ordinary
memory, and what is queued runs later, after pauses that a seed decides; whoever reads too early reads what
was there before. Host memory is filled with ones, which are NaN, when it is new and when a copy has left it.
"""

import itertools
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from zero_full.comm import communicator
from zero_full.comm.device_queue import LINE, Flag, wait_until
from zero_full.comm.host_staging import Staged

PAUSES_S = [0.0] * 12 + [0.0005, 0.002]
PATIENCE_S = 30.0


class SimulatedStream:
    """Runs what is queued, one after the other."""

    def __init__(self, seed: int, pauses: list[float] | None = None) -> None:
        self.pause = random.Random(seed)
        self.pauses = PAUSES_S if pauses is None else pauses
        self.queued: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (operation := self.queued.get()) is not None:
            time.sleep(self.pause.choice(self.pauses))
            try:
                operation()
            except BaseException as error:
                self.error = error

    def synchronize(self) -> None:
        """Wait until what is queued is done."""
        passed = threading.Event()
        self.queued.put(passed.set)
        assert passed.wait(PATIENCE_S), "the stream does not go on"
        assert self.error is None, self.error

    def end(self) -> None:
        """End the thread, after what is queued."""
        self.queued.put(None)
        self.thread.join(PATIENCE_S)


class SimulatedMark:
    """A place in a stream."""

    def __init__(self, queue: "SimulatedQueue") -> None:
        self.queue, self.passed = queue, threading.Event()

    def query(self) -> bool:
        if self.queue.has_failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.passed.is_set()


class SimulatedQueue:
    """The streams of one device, of which each host thread has a current one."""

    def __init__(self, seed: int = 0) -> None:
        self.main = SimulatedStream(seed)
        self.side = SimulatedStream(seed + 1)
        self.chosen = threading.local()
        self.has_failed = False
        self.memories: set[int] = set()

    @property
    def current(self) -> SimulatedStream:
        stream: SimulatedStream = getattr(self.chosen, "stream", self.main)
        return stream

    @contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        """Queue on this stream."""
        before, self.chosen.stream = self.current, stream
        yield
        self.chosen.stream = before

    def synchronize(self) -> None:
        for stream in (self.main, self.side):
            stream.synchronize()

    def end(self) -> None:
        for stream in (self.main, self.side):
            stream.end()

    def memory(self, size: int) -> Tensor:
        made = torch.full((size,), 255, dtype=torch.uint8)
        self.memories.add(made.untyped_storage().data_ptr())
        return made

    def flag(self, start: int) -> Flag:
        return Flag(torch.empty(LINE, dtype=torch.uint8), start)

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape and target.dtype == source.dtype
        assert target.is_contiguous() and source.is_contiguous()
        of_host = [each.untyped_storage().data_ptr() in self.memories for each in (target, source)]
        assert any(of_host) or not target.numel()

        def run() -> None:
            target.detach().copy_(source.detach())
            if of_host[1] and not of_host[0]:
                source.view(torch.uint8).fill_(255)

        self.current.queued.put(run)

    def signal(self, flag: Flag, number: int) -> None:
        self.current.queued.put(lambda: flag.set(number))

    def wait(self, flag: Flag, number: int) -> None:
        self._hold(lambda: flag.has_reached(number))

    def mark(self) -> SimulatedMark:
        made = SimulatedMark(self)
        self.current.queued.put(made.passed.set)
        return made

    def after(self, mark: Any) -> None:
        self._hold(mark.passed.is_set)

    def _hold(self, goes_on: Callable[[], bool]) -> None:
        self.current.queued.put(lambda: wait_until(goes_on, lambda: None, PATIENCE_S))


COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce", "sum_numbers", "broadcast", "all_to_all")


class Settled:
    """A staged transport whose calls return when the device is done: for engines with tensors on the CPU.

    On a device who reads a tensor waits for its stream by himself; here nobody would.
    """

    def __init__(self, by: Any, queue: SimulatedQueue) -> None:
        self.by, self.queue = by, queue
        self.dropped = weakref.finalize(self, queue.end)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.by, name)
        if name not in COLLECTIVES:
            return method

        def call(*arguments: Any) -> None:
            method(*arguments)
            self.queue.synchronize()
            self.by.check()

        return call


@contextmanager
def staged_transports(seed: int = 0, room: int = 1024) -> Iterator[None]:
    """Communicators on the CPU that are opened in this block go through a simulated device."""
    opened = itertools.count(seed * 1000)
    choose = communicator.choose_transport

    def staged(group: Any, device: torch.device, shared_memory: bool = True) -> Any:
        queue = SimulatedQueue(10 * next(opened) + group.rank())
        return Settled(Staged(choose(group, device, shared_memory), queue, room), queue)  # type: ignore[arg-type]

    with mock.patch.object(communicator, "choose_transport", staged):
        yield
