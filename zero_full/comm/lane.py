"""Lanes run collectives: at once, on a thread beside backward, or on a side stream.

A lane runs its jobs in the order in which they were submitted. `wait` returns when a job is done; on a GPU it
makes the current stream wait instead. "Overlap" in this package means a lane other than `InlineLane`.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from zero_full.threads import start_threads

Job = Callable[[], None]


class Pending(Protocol):
    """A job that may still run."""

    def wait(self) -> None:
        """Wait until the job is done. Raises the job's exception."""


class Lane(Protocol):
    """Runs jobs one after the other."""

    stops_host: bool  # whether `wait` blocks the host, and not only a stream of the device

    def submit(self, job: Job, tensors: Iterable[Tensor], producers: Iterable[Any]) -> Pending:
        """Run the job after the work that `producers` (streams) have queued so far.

        `tensors`: those that the job uses. The caller may drop them before the job is done.
        """

    def producer(self) -> Any:
        """Return the stream on which the caller queues its work; None on a device without streams."""

    def order(self, earlier: Any, later: Any) -> None:
        """Make one producer's future work wait for the work that another has queued so far."""

    def drain(self) -> None:
        """Wait until no job is queued on the host. The jobs' errors are raised where they are waited for."""

    def close(self) -> None:
        """Free threads and memory of the lane. No job may be submitted afterwards."""


class Done:
    """A job that is already done."""

    def wait(self) -> None:
        """Return at once."""


class _HostLane:
    """A lane of a device without streams, where work is done when the call that does it returns."""

    def producer(self) -> Any:
        """Return None: no work is queued."""
        return None

    def order(self, earlier: Any, later: Any) -> None:
        """Do nothing: work is in order already."""

    def drain(self) -> None:
        """Do nothing: jobs are run by the caller."""

    def close(self) -> None:
        """Do nothing."""


class InlineLane(_HostLane):
    """Lane without overlap: the caller runs each job when it submits it."""

    stops_host = False

    def submit(self, job: Job, tensors: Iterable[Tensor], producers: Iterable[Any]) -> Pending:
        """Run the job."""
        job()
        return Done()


class InlineStreamLane(InlineLane):
    """Lane without overlap on an accelerator: each job's kernels are queued on the caller's stream."""

    def __init__(self, current: Callable[[], Any]) -> None:
        """`current` returns the caller's stream."""
        self.current = current

    def submit(self, job: Job, tensors: Iterable[Tensor], producers: Iterable[Any]) -> Pending:
        """Queue the job on the current stream, after the producers' earlier work and before their later."""
        here, others = self.producer(), set(producers)
        for stream in others:
            _wait(here, stream)
        job()
        for stream in others:
            _wait(stream, here)
        return Done()

    def producer(self) -> Any:
        """Return the caller's stream."""
        return self.current()

    def order(self, earlier: Any, later: Any) -> None:
        """Make the later stream wait for the earlier one."""
        _wait(later, earlier)


class LazyLane(_HostLane):
    """Lane for plans on the meta device: runs a job when it is waited for, which uses the most memory."""

    stops_host = False

    def __init__(self) -> None:
        self.waiting: deque[Job] = deque()
        self.submitted = self.done = 0  # numbers of jobs

    def submit(self, job: Job, tensors: Iterable[Tensor], producers: Iterable[Any]) -> Pending:
        """Queue the job."""
        self.waiting.append(job)
        self.submitted += 1
        return _LazyJob(self, self.submitted)

    def run(self, until: int) -> None:
        """Run the queued jobs in order, up to the job with the number `until`."""
        while self.done < until:
            self.done += 1
            with torch.no_grad():
                self.waiting.popleft()()


@dataclass
class _LazyJob:
    """A job of a `LazyLane`."""

    lane: LazyLane
    number: int

    def wait(self) -> None:
        self.lane.run(self.number)


class ThreadLane(_HostLane):
    """Lane on a worker thread, for the CPU: gloo releases the GIL while it waits."""

    stops_host = True

    def __init__(self, name: str = "zero_full-collectives") -> None:
        self.worker = start_threads(1, name)
        self.owner_pid = os.getpid()
        self.last: Future[None] | None = None  # the job that was submitted last

    def submit(self, job: Job, tensors: Iterable[Tensor], producers: Iterable[Any]) -> Pending:
        """Queue the job for the thread."""
        if os.getpid() != self.owner_pid:
            raise RuntimeError(
                "an engine of the parent is used in a forked process, which has none of its threads. Use it "
                "in the parent, or start processes by spawn and initialize there."
            )
        self.last = self.worker.submit(job)
        return _ThreadJob(self.last)

    def drain(self) -> None:
        """Wait until all jobs have ended. Raises none of their errors."""
        if self.last is not None and os.getpid() == self.owner_pid:
            self.worker.submit(lambda: None).result()
        self.last = None  # a job keeps its tensors

    def close(self) -> None:
        """End the thread after its queued jobs. A forked child does not wait: it has no such thread."""
        self.worker.shutdown(wait=os.getpid() == self.owner_pid)
        self.last = None  # its error would keep what the job has used


@dataclass
class _ThreadJob:
    """A job of a `ThreadLane`."""

    future: "Future[None]"

    def wait(self) -> None:
        self.future.result()


class StreamLane:
    """Lane on a side stream, for accelerators.

    Gradients of one bucket may come from several streams, one for each that forward used. So the side stream
    waits for all of them, and not only for the one that completed the bucket.

    [Note: memory beside a stream] The allocator gives freed memory to the next allocation on the stream that
    it came from, even if another stream still reads it. So the tensors of a job are kept until the job is
    waited for. Then all streams that they may come from wait for the job's event, on the device, before they
    use the memory again. When memory is free therefore depends on the order of calls only, and not on how far
    the host is ahead of the device.
    """

    stops_host = False

    def __init__(self, side: Any, current: Callable[[], Any]) -> None:
        """`side` is the stream of the jobs. `current` returns the caller's stream."""
        self.side, self.producer = side, current

    def submit(self, job: Job, tensors: Iterable[Tensor], producers: Iterable[Any]) -> Pending:
        """Queue the job's kernels on the side stream."""
        kept, before = list(tensors), {self.producer(), *producers}
        for stream in before:
            self.side.wait_stream(stream)
        with self.side:
            job()
        return _StreamJob(self, before, kept)

    def order(self, earlier: Any, later: Any) -> None:
        """Make the later stream wait for the earlier one."""
        _wait(later, earlier)

    def drain(self) -> None:
        """Do nothing: no job waits on the host."""

    def close(self) -> None:
        """Do nothing."""


class _StreamJob:
    """The end of a job on a side stream, with the tensors that must be kept until then."""

    def __init__(self, lane: StreamLane, producers: set[Any], kept: list[Tensor]) -> None:
        self.event, self.lane = lane.side.record_event(), lane
        self.producers, self.kept = producers, kept

    def wait(self) -> None:
        """Make the current stream and those of the tensors wait for the job, then free the tensors."""
        for stream in {self.lane.producer(), *self.producers}:
            stream.wait_event(self.event)
        self.kept.clear()


def current_stream(device: torch.device) -> Any:
    """Return the accelerator's stream for the caller's work; None on a CPU, which has no queue."""
    return None if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device)


def _wait(later: Any, earlier: Any) -> None:
    if later is not None and earlier is not None and later != earlier:
        later.wait_stream(earlier)


def lane_for(device: torch.device, overlap: bool) -> Lane:
    """Return the lane for this device's collectives."""
    if device.type == "meta":
        return LazyLane() if overlap else InlineLane()
    if device.type == "cpu":
        return ThreadLane() if overlap else InlineLane()
    current = partial(torch.accelerator.current_stream, device)
    if not overlap:
        return InlineStreamLane(current)
    # High priority: otherwise its few kernels would wait behind many of the computation's.
    return StreamLane(torch.Stream(device, priority=-1), current)
