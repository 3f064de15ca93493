"""What flows between a device and the host that keeps its state: gradients down, parameters up.

[Note: flow] Copies run beside the device's work and the host's, on three threads of a rank:

    down      averaged gradient slices, each as soon as it is there, while backward goes on
    on host   what is left to do with them: adding up micro-batches, and the sum of squares for the norm
    up        parameters' slices, while later parts are still stepped

A slice of the device is kept until its copy is done, and at most UNDER_WAY of them are: who makes another
one waits. Where the host's slice has values already, or another type, a copy goes through staging memory.

Sums of squares are one number for each bucket, made when its last gradients are down, and added up in the
order of the buckets: the same bits whenever copies are done. A slice that was written since is summed again.

Who wants values waits for them, and is told what has failed. A failure stays until the gradients are let go.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial

import torch
from torch import Tensor

from zero_full._compat import version_of
from zero_full.comm.lane import Done, Lane, Pending, Thread
from zero_full.comm.ledger import Traffic
from zero_full.errors import CopyError
from zero_full.offload.copies import Copier
from zero_full.precision.norms import squared_norm

HOST = torch.device("cpu")
UNDER_WAY = 2  # slices of the device at a time that wait for their copies
Room = Callable[[int, torch.dtype, torch.device], Tensor]


class Flow:
    """See [Note: flow]. One for each rank."""

    def __init__(
        self,
        room: Room,
        device: torch.device,
        copiers: tuple[Copier, Copier],
        sums: bool,
        lane: Callable[[str], Lane] = Thread,
    ) -> None:
        """`room` reserves host memory. `copiers`: down and up. `sums`: somebody will ask for the norm."""
        self.room, self.device, self.sums = room, device, sums
        self.down, self.up = copiers
        names = ("gradients-down", "gradients-on-host", "parameters-up")
        self.going_down, self.on_host, self.going_up = (lane(f"zero_full-{name}") for name in names)
        self.copied = Traffic()  # bytes, by what and which way
        self.under_way: deque[tuple[Pending, Tensor]] = deque()
        self.stages = [_Stage() for _ in range(UNDER_WAY)]

    def wait_for_turn(self) -> None:
        """Until one more slice of the device may wait for its copy."""
        self._wait_until(UNDER_WAY - 1)

    def wait_for_copies(self) -> None:
        """Until nothing of the device is copied from. What has failed is told to who wants the values."""
        self._wait_until(0)

    def _wait_until(self, left: int) -> None:
        while len(self.under_way) > left:
            pending, _ = self.under_way.popleft()
            with suppress(Exception):
                pending.wait()

    def send_down(self, target: Tensor, source: Tensor, after: Pending) -> Pending:
        """Begin a copy of gradients that are on the device, to memory that is free after that job."""
        pending = self.going_down.submit(_Copy(self.down, target, source, after), [], [])
        self.under_way.append((pending, source))
        self.copied.add("gradients down", source.nbytes)
        return pending

    def fetch(self, target: Tensor, source: Tensor) -> None:
        """Copy parameters from the device, and wait."""
        self.copied.add("parameters down", source.nbytes)
        self.going_down.submit(_Copy(self.down, target, source, Done()), [], []).wait()

    def send_up(self, target: Tensor, source: Tensor) -> Pending:
        """Begin a copy of parameters to the device."""
        self.copied.add("parameters up", source.nbytes)
        return self.going_up.submit(_Copy(self.up, target, source, Done()), [], [])

    def stage(self, numel: int, dtype: torch.dtype) -> "_Stage":
        """Host memory on the way of one copy; the next one gets another. All are as large as the largest."""
        size = numel * dtype.itemsize
        if self.stages[0].memory.numel() < size:
            for each in self.stages:  # copies that are under way keep what they have
                each.memory = self.room(size, torch.uint8, self.device)
        self.stages.append(self.stages.pop(0))
        return self.stages[-1]

    def held(self) -> list[Tensor]:
        """The host memory that is nobody else's."""
        return [stage.memory for stage in self.stages if stage.memory.numel()]

    def close(self) -> None:
        """Wait for what is under way, and end the threads."""
        self.wait_for_copies()
        for lane in (self.going_down, self.on_host, self.going_up):
            lane.close()


class _Stage:
    """Memory for one slice."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.free: Pending = Done()  # when the slice that was there last is done with

    def of(self, numel: int, dtype: torch.dtype) -> Tensor:
        """So many elements of it."""
        return self.memory[: numel * dtype.itemsize].view(dtype)


class _Copy:
    """A job. When it is over it keeps no memory."""

    def __init__(self, copier: Copier, target: Tensor, source: Tensor, after: Pending) -> None:
        self.copier, self.after, self.mark = copier, after, copier.mark()
        self.pair: tuple[Tensor, Tensor] | None = (target, source)

    def __call__(self) -> None:
        pair, self.pair = self.pair, None
        assert pair is not None
        with suppress(Exception):  # of another copy: whose values that spoils hears of it
            self.after.wait()
        self.copier.copy(*pair, self.mark)


class HostSlice:
    """A bucket's averaged gradients of this rank, on the host: they come, and add up there."""

    def __init__(self, flow: Flow, name: str, numel: int, dtype: torch.dtype) -> None:
        self.flow, self.name, self.numel, self.dtype = flow, name, numel, dtype
        self.copied: Pending = Done()  # what came last from the device is not needed there any more
        self.pending: Pending = Done()  # all that was sent is here
        self.squares, self.squared_version = 0.0, -1  # of which version of the memory
        self.on_last: Callable[[], None] = lambda: None  # the last ones of a step are on their way

    @cached_property
    def memory(self) -> Tensor:
        """The values, which perhaps are not there yet: `arrived`."""
        return self.flow.room(self.numel, self.dtype, self.flow.device)

    def receive(self, source: Tensor, adds: bool, last: bool) -> None:
        """What is on the device comes, and is added if `adds`. `last`: nothing more comes in this step."""
        flow, memory = self.flow, self.memory
        stage = flow.stage(source.numel(), source.dtype) if adds or source.dtype != memory.dtype else None
        target = memory if stage is None else stage.of(source.numel(), source.dtype)
        free: Pending = Done() if stage is None else stage.free
        self.copied = flow.send_down(target, source, free)
        staged = None if stage is None else target
        take = partial(self._take, self.pending, self.copied, staged, adds, last and flow.sums)
        self.pending = flow.on_host.submit(take, [], [])
        if stage is not None:
            stage.free = self.pending
        if last:
            self.on_last()

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

    def let_go(self) -> None:
        """Until the device's values may be written over. What has failed is told to who wants the values."""
        with suppress(Exception):
            self.copied.wait()

    def zero(self) -> Tensor:
        """Nothing has come, which counts as zeros."""
        return self.arrived().zero_()

    def arrived(self) -> Tensor:
        """The values, when all that was sent is here. They may be written."""
        try:
            self.pending.wait()
        except Exception as error:
            raise CopyError(
                f"gradients of {self.name} have not come from {self.flow.device} to the host: {error}. "
                "Nothing was changed by them: call zero_grad to go on without"
            ) from error
        return self.memory

    def squared(self) -> float:
        """The sum of squares of the values as they are now."""
        if version_of(self.arrived()) != self.squared_version:
            self.flow.on_host.submit(self._square, [], []).wait()
        return self.squares

    def forget(self) -> None:
        """What has come, or is on its way, is not wanted any more."""
        with suppress(Exception):
            self.pending.wait()
        self.pending = self.copied = Done()
        self.squared_version = -1
        self.flow.wait_for_copies()
