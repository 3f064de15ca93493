"""Where a collective runs: at once, on a thread beside backward, or on a stream beside it.

A job put on a lane runs after all jobs put there before, and `wait` returns (on a GPU: holds back the
current stream) until it is done. That is all that "overlap" means in this package.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

Job = Callable[[], None]


class Pending(Protocol):
    """A job that may still run."""

    def wait(self) -> None:
        """Wait until the job is done. Raises what the job raised."""


class Lane(Protocol):
    """A place where jobs run one after the other."""

    stops_host: bool  # whether `wait` keeps the host from going on, and not only the device

    def submit(self, job: Job, tensors: Iterable[Tensor], producers: Iterable[Any]) -> Pending:
        """Run the job after what `producers` (streams) have queued so far.

        The job uses these tensors, and its caller lets go of them before it is done.
        """

    def producer(self) -> Any:
        """A mark for all work that the caller has queued so far: the stream; None where there is only one."""

    def order(self, earlier: Any, later: Any) -> None:
        """What is queued on one producer from now on comes after what is queued on the other so far."""

    def close(self) -> None:
        """Free what the lane holds. No job may be submitted afterwards."""


class Done:
    """A job that is over."""

    def wait(self) -> None:
        """Return at once."""


class Inline:
    """No overlap: the caller runs each job when it submits it, on its own stream."""

    stops_host = False

    def __init__(self, current: Callable[[], Any] = lambda: None) -> None:
        self.producer = current

    def submit(self, job: Job, tensors: Iterable[Tensor], producers: Iterable[Any]) -> Pending:
        """Run the job between what the producers have queued so far and what they queue next."""
        here, others = self.producer(), set(producers)
        for stream in others:
            self.order(stream, here)
        job()
        for stream in others:
            self.order(here, stream)
        return Done()

    def order(self, earlier: Any, later: Any) -> None:
        """One stream waits for the other, if there is another."""
        _wait(later, earlier)

    def close(self) -> None:
        """Do nothing."""


class Late:
    """For tensors without values: a job is done when somebody waits for it. Till then most is in memory."""

    stops_host = False

    def __init__(self) -> None:
        self.waiting: deque[Job] = deque()
        self.begun = self.done = 0

    def submit(self, job: Job, tensors: Iterable[Tensor], producers: Iterable[Any]) -> Pending:
        """Put the job behind the others."""
        self.waiting.append(job)
        self.begun += 1
        return _Place(self, self.begun)

    def do(self, until: int) -> None:
        """Jobs in their order, up to this one."""
        while self.done < until:
            self.done += 1
            _without_grad(self.waiting.popleft())

    def producer(self) -> Any:
        """Nothing is queued."""
        return None

    def order(self, earlier: Any, later: Any) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Nothing to close."""


@dataclass
class _Place:
    lane: Late
    number: int

    def wait(self) -> None:
        self.lane.do(self.number)


class Thread:
    """A worker thread: for the CPU, where gloo lets go of the interpreter while it waits."""

    stops_host = True

    def __init__(self, name: str = "zero_full-collectives") -> None:
        self.worker = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.made_in = os.getpid()

    def submit(self, job: Job, tensors: Iterable[Tensor], producers: Iterable[Any]) -> Pending:
        """Queue the job for the thread."""
        if os.getpid() != self.made_in:
            raise RuntimeError(
                "an engine of the parent is used in a forked process, which has none of its threads: use it "
                "where it was made, or start processes by spawn and initialize there"
            )
        return _Future(self.worker.submit(_without_grad, job))

    def drain(self) -> None:
        """Wait until all jobs are over, whatever they have raised."""
        if os.getpid() == self.made_in:
            self.worker.submit(lambda: None).result()

    def producer(self) -> Any:
        """None: what the CPU has computed is complete."""
        return None

    def order(self, earlier: Any, later: Any) -> None:
        """Do nothing."""

    def close(self) -> None:
        """End the thread."""
        self.worker.shutdown(wait=os.getpid() == self.made_in)


def _without_grad(job: Job) -> None:
    with torch.no_grad():  # grad mode belongs to a thread
        job()


class _Future:
    def __init__(self, future: "Future[None]") -> None:
        self.future = future

    def wait(self) -> None:
        self.future.result()


class Stream:
    """A side stream: for accelerators.

    Gradients of one bucket may come from several streams, one for each that the forward pass used, so the
    side stream waits for all of them and not only for the one that completed the bucket.

    [Note: memory beside a stream] An allocator gives memory that was let go to whatever its own stream does
    next, whether or not another stream still reads it. So the tensors that a job uses are kept until somebody
    waits for the job. Then all streams that they may have come from wait for it, on the device, and what
    these do next with the memory comes later. When memory is free again depends on the order of calls only,
    and not on how far the host is ahead of the device.
    """

    stops_host = False

    def __init__(self, side: Any, current: Callable[[], Any]) -> None:
        """`side`: where jobs run. `current` returns the stream that the caller queues its work on."""
        self.side, self.producer = side, current

    def submit(self, job: Job, tensors: Iterable[Tensor], producers: Iterable[Any]) -> Pending:
        """Queue the job's kernels on the side stream."""
        kept, before = list(tensors), {self.producer(), *producers}
        for stream in before:
            self.side.wait_stream(stream)
        with self.side:
            job()
        return _Event(self, before, kept)

    def order(self, earlier: Any, later: Any) -> None:
        """One stream waits for the other."""
        _wait(later, earlier)

    def close(self) -> None:
        """Do nothing."""


class _Event:
    """The end of a job on a side stream, and the tensors that it uses until then."""

    def __init__(self, lane: Stream, producers: set[Any], kept: list[Tensor]) -> None:
        self.event, self.lane = lane.side.record_event(), lane
        self.producers, self.kept = producers, kept

    def wait(self) -> None:
        """Hold back the current stream, and those that the tensors came from; then let go of the tensors."""
        for stream in {self.lane.producer(), *self.producers}:
            stream.wait_event(self.event)
        self.kept.clear()


def _wait(later: Any, earlier: Any) -> None:
    if later is not None and earlier is not None and later != earlier:
        later.wait_stream(earlier)


def lane_for(device: torch.device, overlap: bool) -> Lane:
    """The lane on which this device's collectives run."""
    if device.type == "meta":
        return Late() if overlap else Inline()
    if device.type == "cpu":
        return Thread() if overlap else Inline()
    current = partial(torch.accelerator.current_stream, device)
    if not overlap:
        return Inline(current)
    # Above the computation: its few kernels would else stand behind many that nobody waits for.
    return Stream(torch.Stream(device, priority=-1), current)
