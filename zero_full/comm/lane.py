"""Where a collective runs: at once, on a thread beside backward, or on a stream beside it.

A job put on a lane runs after all jobs put there before, and `wait` returns (on a GPU: holds back the
current stream) until it is done. That is all that "overlap" means in this package.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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

    def submit(self, job: Job, tensors: Iterable[Tensor], producers: Iterable[Any]) -> Pending:
        """Run the job, which uses these tensors, after what `producers` (streams) have queued so far."""

    def producer(self) -> Any:
        """A mark for all work that the caller has queued so far, to be passed to `submit` later."""

    def close(self) -> None:
        """Free what the lane holds. No job may be submitted afterwards."""


class Done:
    """A job that is over."""

    def wait(self) -> None:
        """Return at once."""


class Inline:
    """No overlap: the caller runs each job when it submits it."""

    def submit(self, job: Job, tensors: Iterable[Tensor], producers: Iterable[Any]) -> Pending:
        """Run the job and return when it is done."""
        job()
        return Done()

    def producer(self) -> Any:
        """None: on one stream everything is in order already."""
        return None

    def close(self) -> None:
        """Do nothing."""


class Late:
    """For tensors without values: a job is done when somebody waits for it. Till then most is in memory."""

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

    def __init__(self) -> None:
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="zero_full-collectives")

    def submit(self, job: Job, tensors: Iterable[Tensor], producers: Iterable[Any]) -> Pending:
        """Queue the job for the thread."""
        return _Future(self.worker.submit(_without_grad, job))

    def producer(self) -> Any:
        """None: what the CPU has computed is complete."""
        return None

    def close(self) -> None:
        """End the thread."""
        self.worker.shutdown()


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
    side stream waits for all of them and not only for the one that completed the bucket. Tensors that the
    job uses are marked, or the allocator would hand their memory to others as soon as we let go of them.
    """

    def __init__(self, device: torch.device) -> None:
        self.side = torch.Stream(device)
        self.device = device

    def producer(self) -> Any:
        """The stream that this code queues its work on."""
        return torch.accelerator.current_stream(self.device)

    def submit(self, job: Job, tensors: Iterable[Tensor], producers: Iterable[Any]) -> Pending:
        """Queue the job's kernels on the side stream."""
        for stream in {self.producer(), *producers}:
            self.side.wait_stream(stream)
        with self.side:
            job()
        for tensor in tensors:
            tensor.record_stream(self.side)
        return _Event(self)

    def close(self) -> None:
        """Do nothing."""


class _Event:
    def __init__(self, lane: Stream) -> None:
        self.event, self.lane = lane.side.record_event(), lane

    def wait(self) -> None:
        self.lane.producer().wait_event(self.event)


def lane_for(device: torch.device, overlap: bool) -> Lane:
    """The lane on which this device's collectives run."""
    if not overlap:
        return Inline()
    if device.type == "meta":
        return Late()
    return Thread() if device.type == "cpu" else Stream(device)
