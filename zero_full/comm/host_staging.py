"""Host staging: collectives for ranks that share an accelerator, through pinned host memory.

NCCL fails with two ranks on one device. Here a collective's slices are copied into pinned memory, exchanged
as those of CPU ranks are (`shared.py`, else `transport.py`), and copied back.

[Note: staging] The host queues these operations on the current stream:

    copy into a room; signal "number n is ready"; wait for "number n is done"; copy back

A room is a staging buffer. A worker thread takes the collectives in the order in which the host makes them,
which is equal on all ranks. It waits until the room is ready, exchanges its contents, and signals "done".
Each room has its own "ready", since collectives may be queued on several streams, which run in any order.

A collective larger than a room passes in pieces, through three rooms in turn: while the worker exchanges one
piece, the device copies the next one in and the last one back. Before a room is used again, the current
stream waits for the last copy back from it, so no room is written while it is read.

If an exchange fails, the worker keeps the exception. This collective and all later ones end at once with NaN
as their result (all bits set). The next call raises, and so does `check`, which callers use after waiting for
the device.

Either the host or the stream waits for "ready" and "done": see `device_queue.py`. If the stream waits, a call
returns at once, as NCCL's do.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_full.comm.device_queue import NUMBERS, Flag, Mark, Queue, wait_until
from zero_full.comm.forked import only_here
from zero_full.comm.shared import SharedMemory
from zero_full.comm.transport import NO_CALL, Exchange, Splits, own_slice

ROOMS = 3
ROOM = 32 * 2**20  # bytes, at most
HALF = 32 * 2**20  # bytes of half a window in shared memory: large pieces need few barriers
ALIGNED = 64  # bytes, where the fields of a room begin
END_S = 2.0  # how long the finalizer of a transport waits for its worker


class Carried(NamedTuple):
    """A piece of a tensor on the device, and in which directions it is copied."""

    tensor: Tensor
    enters: bool  # is copied into the room
    leaves: bool  # is copied back


class Load(NamedTuple):
    """The part of a collective that fits into a room. Each field becomes one flat tensor in the room."""

    kind: str
    fields: Sequence[Sequence[Carried]]
    exchange: Callable[..., object]  # is called with the fields


class Room:
    """A staging buffer, which the device and the host use in turn."""

    def __init__(self, queue: Queue, start: int) -> None:
        self.queue, self.ready = queue, queue.flag(start)
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.passed: Mark | None = None  # the end of the last copy back

    def fields_for(self, load: Load) -> list[Tensor]:
        """Flat tensors in this room for a load's fields. Grows the room to a power of two if necessary."""
        sizes = [sum(part.tensor.nbytes for part in parts) for parts in load.fields]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // ALIGNED) * ALIGNED)
        if starts[-1] > self.memory.numel():
            self.memory = self.queue.memory(1 << (starts[-1] - 1).bit_length())
        return [
            self.memory[start : start + size].view(parts[0].tensor.dtype)
            for start, size, parts in zip(starts[:-1], sizes, load.fields, strict=True)
        ]


class Task(NamedTuple):
    """One exchange for the worker."""

    kind: str
    exchange: Callable[[], object]
    is_ready: Callable[[], bool]
    look: Callable[[], object]  # raises if the device has failed
    results: Sequence[Tensor]  # what the exchange changes
    finish: Callable[[], object]


@dataclass
class Desk:
    """State shared by the worker and its transport, which can be collected while the worker runs."""

    rooms: "deque[Room]"
    done: Flag
    tasks: "SimpleQueue[Task | None]" = field(default_factory=SimpleQueue)
    failure: tuple[str, BaseException] | None = None  # the kind of the collective, and why
    is_closing: bool = False

    def fail(self, kind: str, error: BaseException) -> None:
        """Keep the first failure. Later collectives are not exchanged."""
        self.failure = self.failure or (kind, error)


def _work(desk: Desk) -> None:
    """Run the worker's tasks until None comes."""
    with torch.no_grad():
        while (task := desk.tasks.get()) is not None:
            _do(task, desk)
            del task  # frees the memory of its tensors
        with suppress(RuntimeError, TimeoutError):  # the device may have failed
            for room in desk.rooms:  # their streams still read the flags
                if room.passed is not None:
                    wait_until(room.passed.query, lambda: None, END_S)


def _do(task: Task, desk: Desk) -> None:
    def look() -> None:
        # Only when closing: a thread that frees device memory may hold a lock that `look` needs, and wait for
        # this worker.
        if desk.is_closing:
            task.look()

    try:
        wait_until(task.is_ready, look)
        if desk.failure is None:
            task.exchange()
    except BaseException as error:
        desk.fail(task.kind, error)
    if desk.failure is not None:
        for result in task.results:
            result.view(torch.uint8).fill_(255)
    task.finish()


def _end(desk: Desk, worker: threading.Thread, patience_s: float | None) -> None:
    """End the worker after its queued tasks."""
    desk.is_closing = True
    desk.tasks.put(None)
    if worker is not threading.current_thread():
        worker.join(patience_s)


class Staged:
    """A transport for ranks whose tensors are on an accelerator. See [Note: staging].

    `inner`: the transport for host memory, whose process group has no other user. `room`: the most bytes of a
    room. `start`: the number before the first collective's.
    """

    name, fails_late = "staged", True
    call = NO_CALL  # not compared between ranks: the worker makes collectives later than the host

    def __init__(
        self, inner: SharedMemory | Exchange, queue: Queue, room: int = ROOM, start: int = 0
    ) -> None:
        self.inner, self.queue, self.room, self.number = inner, queue, room, start
        self.rank, self.size = inner.rank, inner.size
        self.is_told = False  # whether the failure was raised on the host
        rooms = deque(Room(queue, start) for _ in range(ROOMS))
        self.desk = Desk(rooms, queue.flag(start))
        worker = threading.Thread(target=_work, args=(self.desk,), name="zero_full-staged", daemon=True)
        worker.start()
        self.worker = worker
        self.dropped = weakref.finalize(self, only_here(_end), self.desk, worker, END_S)

    # Collectives ---------------------------------------------------------------------------------

    def reduce_scatter(self, whole: Tensor, out: Tensor, divisor: float) -> None:
        """Copy pieces of all slices in, and pieces of the sum back."""
        slices = [own_slice(whole, rank, self.size) for rank in range(self.size)]
        exchange = partial(_with_divisor, self.inner.reduce_scatter, divisor)
        step = self._step(self.size * whole.element_size() + out.element_size(), fields=2)
        pieces = (
            (
                [Carried(s[low : low + step], True, False) for s in slices],
                [Carried(out[low : low + step], False, True)],
            )
            for low in range(0, out.numel(), step)
        )
        self._stage(Load("reduce_scatter", fields, exchange) for fields in pieces)

    def all_gather(self, whole: Tensor) -> None:
        """Copy pieces of this rank's slice in, and pieces of the others' back."""
        slices = [own_slice(whole, rank, self.size) for rank in range(self.size)]
        step = self._step(self.size * whole.element_size())
        pieces = (
            [
                Carried(s[low : low + step], rank == self.rank, rank != self.rank)
                for rank, s in enumerate(slices)
            ]
            for low in range(0, slices[0].numel(), step)
        )
        self._stage(Load("all_gather", [parts], self.inner.all_gather) for parts in pieces)

    def all_reduce(self, whole: Tensor, divisor: float) -> None:
        """Copy pieces in and back. Their size is a multiple of the group's."""
        exchange = partial(_with_divisor, self.inner.all_reduce, divisor)
        step = self._step(self.size * whole.element_size()) * self.size
        self._there_and_back("all_reduce", whole, step, exchange)

    def sum_numbers(self, numbers: Tensor) -> None:
        """Copy pieces in and back."""
        step = self._step(numbers.element_size())
        self._there_and_back("sum", numbers.view(-1), step, self.inner.sum_numbers)

    def broadcast(self, tensor: Tensor) -> None:
        """Copy pieces in on the first rank, and back on the others."""
        flat, is_first = tensor.view(-1), self.rank == 0
        step = self._step(flat.element_size())
        pieces = (
            [Carried(flat[low : low + step], is_first, not is_first)] for low in range(0, flat.numel(), step)
        )
        self._stage(Load("broadcast", [parts], self.inner.broadcast) for parts in pieces)

    def all_to_all(self, sent: Tensor, received: Tensor, splits: Splits) -> None:
        """Copy pieces of the parts for all ranks in, and pieces of the parts from all ranks back.

        A part that is shorter than the longest has no elements in the last pieces.
        """
        ways = [
            (sent.split(list(splits.sent)), True, False),
            (received.split(list(splits.received)), False, True),
        ]
        step = self._step(2 * self.size * sent.element_size(), fields=2)

        def piece(low: int) -> Load:
            fields = [[Carried(part[low : low + step], *way) for part in parts] for parts, *way in ways]
            leaving, coming = ([part.tensor.numel() for part in parts] for parts in fields)
            of_piece = Splits(leaving, coming, min(step, splits.most - low))
            return Load("all_to_all", fields, partial(self.inner.all_to_all, splits=of_piece))

        self._stage(piece(low) for low in range(0, splits.most, step))

    def gather_objects(self, mine: Any) -> list[Any]:
        """Gather on the worker, after the queued collectives; the host waits."""
        self.check()
        answers: list[Any] = []
        finished = threading.Event()

        def gather() -> None:
            answers.extend(self.inner.gather_objects(mine))

        self.desk.tasks.put(Task("gather_objects", gather, lambda: True, lambda: None, (), finished.set))
        finished.wait()
        self.check()
        return answers

    # Order and failure ---------------------------------------------------------------------------

    def awaited_by(self) -> list[int]:
        """No ranks: a rank that waits here may wait for the worker, which is about to come."""
        return []

    def check(self) -> None:
        """Raise RuntimeError if a queued collective has failed."""
        if self.desk.failure is not None:
            self.is_told = True
            kind, error = self.desk.failure
            reason = str(error) or type(error).__name__
            raise RuntimeError(f"{kind}, which was queued before, has failed: {reason}") from error

    def close(self) -> None:
        """End the worker after its queued collectives. Raises a failure that was not raised before."""
        if self.dropped.detach() is not None:
            _end(self.desk, self.worker, None)
        if not self.is_told:
            self.check()

    def _step(self, size: int, fields: int = 1) -> int:
        """Elements of each slice in a piece, if one element of each slice takes `size` bytes."""
        return max(1, (self.room - fields * ALIGNED) // size)

    def _there_and_back(
        self, kind: str, flat: Tensor, step: int, exchange: Callable[[Tensor], object]
    ) -> None:
        """Stage a tensor that is exchanged in place."""
        pieces = ([Carried(flat[low : low + step], True, True)] for low in range(0, flat.numel(), step))
        self._stage(Load(kind, [parts], exchange) for parts in pieces)

    def _stage(self, loads: Iterable[Load]) -> None:
        """Queue loads on the current stream. Copies in run up to `ROOMS` loads ahead of copies back."""
        self.check()
        inside: deque[Callable[[], None]] = deque()
        kind = "a collective"
        try:
            for load in loads:
                kind = load.kind
                if len(inside) == ROOMS:
                    inside.popleft()()
                inside.append(self._enter(load))
            while inside:
                inside.popleft()()
        except BaseException as error:  # other ranks have begun an exchange that this rank will not make
            self.desk.fail(kind, error)
            self.is_told = True
            raise
        self.check()  # if the host has waited, failures of this call are known

    def _enter(self, load: Load) -> Callable[[], None]:
        """Queue the copies into a room. Returns the function that queues the copies back."""
        queue, desk = self.queue, self.desk
        room = desk.rooms[0]
        desk.rooms.rotate(-1)
        if room.passed is not None:
            queue.after(room.passed)
        self.number = number = (self.number + 1) % NUMBERS
        fields, results, back = room.fields_for(load), [], []
        for parts, flat in zip(load.fields, fields, strict=True):
            places = flat.split([part.tensor.numel() for part in parts])
            for part, place in zip(parts, places, strict=True):
                if part.enters:
                    queue.copy(place, part.tensor)
                if part.leaves:
                    back.append((part.tensor, place))
                    results.append(place)
        queue.signal(room.ready, number)
        is_ready, look = partial(room.ready.has_reached, number), queue.mark().query
        finish = partial(desk.done.set, number)
        desk.tasks.put(Task(load.kind, partial(load.exchange, *fields), is_ready, look, results, finish))

        def leave() -> None:
            queue.wait(desk.done, number)
            for tensor, place in back:
                queue.copy(tensor, place)
            room.passed = queue.mark()

        return leave


def _with_divisor(collective: Callable[..., object], divisor: float, *tensors: Tensor) -> None:
    collective(*tensors, divisor)
