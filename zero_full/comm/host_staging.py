"""Ranks that share an accelerator hand each other their slices through the host's memory.

NCCL refuses two ranks on one device. Here a collective's slices are copied into page-locked memory, travel
there as those of CPU ranks do (`shared.py`, else `transport.py`), and are copied back.

[Note: staging] All is queued on the current stream, in this order:

    copy into a room; signal "number n is ready"; wait for "number n is done"; copy back

A thread, the worker, takes the collectives in the order in which the host has made them, which is the same on
all ranks; it waits until the room is ready, exchanges what is in it, and says that it is done. Each room has
its own "ready", because collectives may be queued on several streams, which come to them in any order.

What is larger than a room passes in pieces, through three rooms in turn: while the worker has one piece, the
device copies the next one in and the last one back. Whoever takes a room first lets the current stream wait
until its last copy back is over, so a room is never written while somebody reads it.

If an exchange fails the worker keeps the exception. This collective and all later ones end at once, in bytes
of ones, which are NaN; the next call raises, and so does `check`, for those who have waited for the device.

Who waits for "ready" and "done" is the queue's business (`device_queue.py`): the host; or the stream, and
then a call returns at once, as NCCL's do.
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
from zero_full.comm.transport import Exchange, Splits, own_slice

ROOMS = 3
ROOM = 32 * 2**20  # bytes, at most
HALF = 32 * 2**20  # of a window of the shared memory behind: few meetings, since a device copies large pieces
ALIGNED = 64  # bytes, where the fields of a room begin
END_S = 2.0  # how long whoever drops a transport waits for its worker


class Carried(NamedTuple):
    """A piece of a tensor on the device, and whether it is copied into the room, and back."""

    tensor: Tensor
    enters: bool
    leaves: bool


class Load(NamedTuple):
    """As much of a collective as fits into a room. Each field becomes one flat tensor there."""

    kind: str
    fields: Sequence[Sequence[Carried]]
    exchange: Callable[..., object]  # is called with the fields


class Room:
    """Memory that the device and the host use in turn."""

    def __init__(self, queue: Queue, start: int) -> None:
        self.queue, self.ready = queue, queue.flag(start)
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.passed: Mark | None = None  # the end of the last copy back

    def fields_for(self, load: Load) -> list[Tensor]:
        """Flat tensors here for the fields. The room grows when it has to, up to the next power of two."""
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
    """What the worker has to do."""

    kind: str
    exchange: Callable[[], object]
    is_ready: Callable[[], bool]
    look: Callable[[], object]  # raises if it will never be ready
    results: Sequence[Tensor]  # what the exchange changes
    finish: Callable[[], object]


@dataclass
class Desk:
    """What the worker and the transport share. The worker keeps no transport alive."""

    rooms: "deque[Room]"
    done: Flag
    tasks: "SimpleQueue[Task | None]" = field(default_factory=SimpleQueue)
    failure: tuple[str, BaseException] | None = None  # the kind of the collective, and why
    is_closing: bool = False

    def fail(self, kind: str, error: BaseException) -> None:
        """From now on nothing is exchanged."""
        self.failure = self.failure or (kind, error)


def _work(desk: Desk) -> None:
    """The worker's life."""
    with torch.no_grad():
        while (task := desk.tasks.get()) is not None:
            _do(task, desk)
            del task  # and the memory that it is about
        with suppress(RuntimeError, TimeoutError):  # the device may have failed
            for room in desk.rooms:  # their streams still look at the flags
                if room.passed is not None:
                    wait_until(room.passed.query, lambda: None, END_S)


def _do(task: Task, desk: Desk) -> None:
    def look() -> None:
        # Not before: who frees device memory may wait for this worker, and hold a lock that this asks for.
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
    """Let the worker finish what was queued, and end."""
    desk.is_closing = True
    desk.tasks.put(None)
    if worker is not threading.current_thread():
        worker.join(patience_s)


class Staged:
    """A transport for ranks whose tensors are on an accelerator. See [Note: staging].

    `inner` moves the rooms, which are in the host's memory; nobody else may use its process group. `room` is
    the most bytes of one, and `start` the number before the first collective's.
    """

    name = "staged"
    call: tuple[str, ...] = ()  # not compared: the worker is behind

    def __init__(
        self, inner: SharedMemory | Exchange, queue: Queue, room: int = ROOM, start: int = 0
    ) -> None:
        self.inner, self.queue, self.room, self.number = inner, queue, room, start
        self.rank, self.size = inner.rank, inner.size
        self.is_told = False  # whether a failure was raised
        rooms = deque(Room(queue, start) for _ in range(ROOMS))
        self.desk = Desk(rooms, queue.flag(start))
        worker = threading.Thread(target=_work, args=(self.desk,), name="zero_full-staged", daemon=True)
        worker.start()
        self.worker = worker
        self.dropped = weakref.finalize(self, only_here(_end), self.desk, worker, END_S)

    # Collectives ---------------------------------------------------------------------------------

    def reduce_scatter(self, whole: Tensor, out: Tensor, divisor: float) -> None:
        """Pieces of all slices go in, and of the sum come back."""
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
        """Pieces of this rank's slice go in, and of the others' come back."""
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
        """Pieces that all ranks can cut evenly go in and come back."""
        exchange = partial(_with_divisor, self.inner.all_reduce, divisor)
        step = self._step(self.size * whole.element_size()) * self.size
        self._there_and_back("all_reduce", whole, step, exchange)

    def sum_numbers(self, numbers: Tensor) -> None:
        """Pieces go in and come back."""
        step = self._step(numbers.element_size())
        self._there_and_back("sum", numbers.view(-1), step, self.inner.sum_numbers)

    def broadcast(self, tensor: Tensor) -> None:
        """Pieces go in on the first rank, and come back on the others."""
        flat, is_first = tensor.view(-1), self.rank == 0
        step = self._step(flat.element_size())
        pieces = (
            [Carried(flat[low : low + step], is_first, not is_first)] for low in range(0, flat.numel(), step)
        )
        self._stage(Load("broadcast", [parts], self.inner.broadcast) for parts in pieces)

    def all_to_all(self, sent: Tensor, received: Tensor, splits: Splits) -> None:
        """Pieces of the parts for all ranks go in, and of those from all ranks come back.

        A part that has come to its end has no elements in the pieces that follow.
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
        """The worker gathers them when their turn comes; the host waits."""
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
        """None that can be told from those for whom the worker is about to come."""
        return []

    def check(self) -> None:
        """Raise RuntimeError if a collective has failed that was queued before."""
        if self.desk.failure is not None:
            self.is_told = True
            kind, error = self.desk.failure
            reason = str(error) or type(error).__name__
            raise RuntimeError(f"{kind}, which was queued before, has failed: {reason}") from error

    def close(self) -> None:
        """Wait for what is queued, and end the worker. Raise if a collective has failed and nobody knows."""
        if self.dropped.detach() is not None:
            _end(self.desk, self.worker, None)
        if not self.is_told:
            self.check()

    def _step(self, size: int, fields: int = 1) -> int:
        """How many elements of each slice a piece has, if one of each needs so many bytes."""
        return max(1, (self.room - fields * ALIGNED) // size)

    def _there_and_back(
        self, kind: str, flat: Tensor, step: int, exchange: Callable[[Tensor], object]
    ) -> None:
        pieces = ([Carried(flat[low : low + step], True, True)] for low in range(0, flat.numel(), step))
        self._stage(Load(kind, [parts], exchange) for parts in pieces)

    def _stage(self, loads: Iterable[Load]) -> None:
        """Queue these loads on the current stream. Copies in run ahead of copies back, by all rooms."""
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
        except BaseException as error:  # the others have begun what this rank never will
            self.desk.fail(kind, error)
            self.is_told = True
            raise
        self.check()  # the host may have waited for all of it

    def _enter(self, load: Load) -> Callable[[], None]:
        """Queue the way into a room; returns what queues the way back."""
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
