"""Host-device copies for offloaded optimizer state: gradients to the host, parameters to the device.

[Note: copy threads] Copies run beside the work of device and host, on three threads of a rank:

    down      slices of averaged gradients, each as soon as it is reduced, during backward
    on host   the work on these slices: accumulation over micro-batches, and the sum of squares for the norm
    up        slices of parameters, while later parts are still stepped

A thread queues a copy on the device behind an event, and then the next copy at once, so that the device goes
from one to the next without the host. The code that needs a copy waits for it.

A slice on the device is kept until its copy is done. There are at most UNDER_WAY such slices; making another
one waits. If the host's slice has values already, or another dtype, a copy goes through a staging buffer. It
is no region of the arena: on CUDA it is torch's pinned memory, whose size is a power of two.

There is one sum of squares per parameter group, computed when its last gradients are on the host. They are
added in the order of groups, so bits do not depend on the timing of copies. A slice written since is summed
again.

Reading values waits for their copies and raises their errors. An error stays until the gradients are dropped.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from zero_full._compat import version_of
from zero_full.comm.lane import Done, Lane, Pending, ThreadLane
from zero_full.comm.traffic import Traffic
from zero_full.errors import CopyError
from zero_full.precision.norms import squared_norm

HOST = torch.device("cpu")
UNDER_WAY = 2  # slices on the device with pending copies, at most
Allocate = Callable[[int, torch.dtype, torch.device], Tensor]

NAP_S, LONG_NAP_S = 2e-5, 5e-4  # seconds between two polls of a copy, the shortest and the longest


class Copier(Protocol):
    """Copies in one direction between a device and the host."""

    def mark(self) -> Any:
        """Return an event behind the caller's work on the device so far."""

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Pending:
        """Begin a copy that waits until the device has reached the event `after`.

        The result keeps both tensors until the copy is done.
        """


class StreamCopier:
    """Copies on their own stream of an accelerator, beside its other work."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.Stream(device)

    def mark(self) -> Any:
        """Record an event on the caller's stream."""
        return torch.accelerator.current_stream(self.device).record_event()

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Pending:
        """Queue the copy behind the event and behind earlier copies. Pageable memory makes this wait."""
        with self.stream:
            self.stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            return _StreamCopy(self.stream.record_event(), (target, source))


class _StreamCopy:
    """A copy in the queue of a stream. Several threads may wait for it."""

    def __init__(self, event: Any, pair: tuple[Tensor, Tensor]) -> None:
        self.event = event
        self.pair: tuple[Tensor, Tensor] | None = pair

    def wait(self) -> None:
        """Poll for the end of the copy with sleeps in between, so that other threads run."""
        nap = NAP_S
        while not self.event.query():
            time.sleep(nap)
            nap = min(2 * nap, LONG_NAP_S)
        self.pair = None


class CopyThreads:
    """The threads and staging buffers of one rank's copies. See [Note: copy threads]."""

    def __init__(
        self,
        allocate: Allocate,
        device: torch.device,
        copiers: tuple[Copier, Copier],
        sums: bool,
        lane: Callable[[str], Lane] = ThreadLane,
    ) -> None:
        """`allocate` allocates host memory. `copiers`: down and up. `sums`: the norm will be needed."""
        self.allocate, self.device, self.sums = allocate, device, sums
        self.down, self.up = copiers
        names = ("gradients-down", "gradients-on-host", "parameters-up")
        self.going_down, self.on_host, self.going_up = (lane(f"zero_full-{name}") for name in names)
        self.copied = Traffic()  # bytes, by kind and direction
        self.under_way: deque[tuple[Pending, Tensor]] = deque()
        self.last_up: Pending = Done()  # the last copy of parameters to the device
        self.stages = [_Stage() for _ in range(UNDER_WAY)]

    def wait_for_turn(self) -> None:
        """Wait until one more slice on the device may have a pending copy."""
        self._wait_until(UNDER_WAY - 1)

    def wait_for_copies(self) -> None:
        """Wait for all copies from the device. Reading their values raises their errors."""
        self._wait_until(0)

    def _wait_until(self, left: int) -> None:
        while len(self.under_way) > left:
            pending, _ = self.under_way.popleft()
            with suppress(Exception):
                pending.wait()

    def send_down(self, target: Tensor, source: Tensor, after: Pending) -> Pending:
        """Begin a copy of gradients to host memory that is free when the job `after` is done."""
        pending = _queue(self.going_down, self.down, target, source, after)
        self.under_way.append((pending, source))
        self.copied.add("gradients down", source.nbytes)
        return pending

    def fetch(self, target: Tensor, source: Tensor) -> None:
        """Copy parameters from the device to the host, and wait."""
        self.copied.add("parameters down", source.nbytes)
        _queue(self.going_down, self.down, target, source, Done()).wait()

    def send_up(self, target: Tensor, source: Tensor) -> Pending:
        """Begin a copy of parameters to the device."""
        self.copied.add("parameters up", source.nbytes)
        self.last_up = _queue(self.going_up, self.up, target, source, Done())
        return self.last_up

    def stage(self, numel: int, dtype: torch.dtype) -> "_Stage":
        """Return the staging buffer of the next copy. The buffers alternate. Each fits the largest copy."""
        size = numel * dtype.itemsize
        if self.stages[0].memory.numel() < size:
            for each in self.stages:  # pending copies keep their memory
                each.memory = self.allocate(size, torch.uint8, self.device)
        self.stages.append(self.stages.pop(0))
        return self.stages[-1]

    def held(self) -> list[Tensor]:
        """Return the staging buffers."""
        return [stage.memory for stage in self.stages if stage.memory.numel()]

    def close(self) -> None:
        """Wait for pending copies, and end the threads."""
        self.wait_for_copies()
        with suppress(Exception):  # who uses the parameters gets the error
            self.last_up.wait()
        for lane in (self.going_down, self.on_host, self.going_up):
            lane.close()


class _Stage:
    """A staging buffer for one slice."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.free: Pending = Done()  # the job that last used the buffer

    def of(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the first `numel` elements, in this dtype."""
        return self.memory[: numel * dtype.itemsize].view(dtype)


class _Copy:
    """A job that begins a copy, and drops its own references to the two tensors."""

    def __init__(self, copier: Copier, target: Tensor, source: Tensor, after: Pending) -> None:
        self.copier, self.after, self.mark = copier, after, copier.mark()
        self.pair: tuple[Tensor, Tensor] | None = (target, source)
        self.begun: Pending = Done()

    def __call__(self) -> None:
        pair, self.pair = self.pair, None
        assert pair is not None
        with suppress(Exception):  # of another copy: reading its values raises it
            self.after.wait()
        self.begun = self.copier.copy(*pair, self.mark)


class _QueuedCopy:
    """A copy that a lane will begin."""

    def __init__(self, job: Pending, copy: _Copy) -> None:
        self.job, self.copy = job, copy

    def wait(self) -> None:
        """Wait until the copy was begun, and until it is done."""
        self.job.wait()
        self.copy.begun.wait()


def _queue(lane: Lane, copier: Copier, target: Tensor, source: Tensor, after: Pending) -> Pending:
    """Let a lane begin a copy when the job `after` is done."""
    copy = _Copy(copier, target, source, after)
    return _QueuedCopy(lane.submit(copy, [], []), copy)


class HostGradientSlice:
    """This rank's slice of a parameter group's averaged gradients, copied to and accumulated on the host."""

    def __init__(self, copy_threads: CopyThreads, name: str, numel: int, dtype: torch.dtype) -> None:
        self.copy_threads, self.name, self.numel, self.dtype = copy_threads, name, numel, dtype
        self.copied: Pending = Done()  # the last copy, after which the device's slice is free
        self.pending: Pending = Done()  # the last job on the host, after which values are complete
        self.squares, self.squared_version = 0.0, -1  # the version of `memory` that was summed

    @cached_property
    def memory(self) -> Tensor:
        """The host's memory for the slice. Its values are complete after `arrived`."""
        return self.copy_threads.allocate(self.numel, self.dtype, self.copy_threads.device)

    def receive(self, source: Tensor, adds: bool, last: bool) -> None:
        """Copy or, if `adds`, accumulate a slice from the device. `last`: it is the last one of this step."""
        copy_threads, memory = self.copy_threads, self.memory
        stage = (
            copy_threads.stage(source.numel(), source.dtype) if adds or source.dtype != memory.dtype else None
        )
        target = memory if stage is None else stage.of(source.numel(), source.dtype)
        free: Pending = Done() if stage is None else stage.free
        self.copied = copy_threads.send_down(target, source, free)
        staged = None if stage is None else target
        take = partial(self._take, self.pending, self.copied, staged, adds, last and copy_threads.sums)
        self.pending = copy_threads.on_host.submit(take, [], [])
        if stage is not None:
            stage.free = self.pending

    def _take(self, before: Pending, copied: Pending, staged: Tensor | None, adds: bool, sums: bool) -> None:
        before.wait()
        copied.wait()
        if staged is not None and adds:
            self.memory.add_(staged)
        elif staged is not None:
            self.memory.copy_(staged)
        if sums:
            self._square()

    def _square(self) -> None:
        self.squares = float(squared_norm([self.memory], HOST))
        self.squared_version = version_of(self.memory)

    def wait_until_copied(self) -> None:
        """Wait until the slice on the device may be overwritten. Reading the values raises errors."""
        with suppress(Exception):
            self.copied.wait()

    def zero(self) -> Tensor:
        """Set the slice to zeros, because no gradients have been copied."""
        return self.arrived().zero_()

    def arrived(self) -> Tensor:
        """Wait for all copies and return the values, which may be written. Raises CopyError."""
        try:
            self.pending.wait()
        except Exception as error:
            raise CopyError(
                f"gradients of {self.name} could not be copied from {self.copy_threads.device} to the host: "
                f"{error}. Nothing was updated. Call zero_grad to continue without these gradients."
            ) from error
        return self.memory

    def squared(self) -> float:
        """Return the sum of squares of the present values."""
        if version_of(self.arrived()) != self.squared_version:
            self.copy_threads.on_host.submit(self._square, [], []).wait()
        return self.squares

    def forget(self) -> None:
        """Drop the values, and wait for pending copies."""
        with suppress(Exception):
            self.pending.wait()
        self.pending = self.copied = Done()
        self.squared_version = -1
        self.copy_threads.wait_for_copies()
