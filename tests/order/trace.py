"""What one rank asks of its device and does on its host: operations, events, waits and memory, in order.

[Note: queues] Work is done by queues, each of which does one thing after the other: the streams of a device
that is not there (`device.py`), and the threads of the host. All tensors are the CPU's, and operations are
computed as they are asked for. `Recorder` writes down which queue would have done each, which bytes it reads
and writes, and what orders it: a stream does nothing before a thread has asked for it; an event makes a queue
wait for another one, also a thread for a stream, as where a value is read. `clocks.py` looks through such a
record for accesses that nothing orders, `playback.py` computes it anew in other orders that are as good.

Memory is a `Block` from when it is made until the last reference is gone, or until its storage is shrunk. On
the device it belongs to the stream that was current when it was made, which may be given the same bytes the
next time that it makes something: that counts as a write. The host's is written at once when it is let go, by
a queue of its own. Threads have a reference while they use it, and so come before; what a stream does with it
must be over.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Leaf = TypeVar("Leaf")
ROOT = str(Path(__file__).parents[2])
MACHINERY = {str(Path(__file__).with_name(name)) for name in ("trace.py", "device.py")}
BYTES = torch.uint8
READS = {  # operations whose result the host waits for
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
}
MAKES = {  # and writes nothing there
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
}
WITHOUT_ACCESS = {torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset}
INDEXES = {  # with places that may be on the host
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
}
COPIES = {torch.ops.aten.copy_.default}  # between device and host, too
COMPUTE, HOST, ALLOCATOR = 0, 1, 2  # the numbers of `Recorder.compute`, `.main` and `.allocator`


@dataclass(frozen=True)
class Ref:
    """A tensor of the record: a window into a block."""

    block: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def span(self) -> tuple[int, int]:
        """The bytes from its first to behind its last element."""
        if 0 in self.size:
            return 0, 0
        reach = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        width = self.dtype.itemsize
        return self.offset * width, (self.offset + reach + 1) * width


@dataclass(frozen=True)
class Access:
    """Bytes of a block that are read or written."""

    block: int
    start: int
    stop: int
    writes: bool


@dataclass
class Item:
    """What a queue does: op, read (whose result decides what follows), record, wait, make or free."""

    kind: str
    queue: int
    thread: int  # which has asked for it: that queue itself, or a thread if that is a stream
    accesses: list[Access] = field(default_factory=list)
    event: int = -1  # of record and wait
    call: Any = None  # of op and read: the operation, its arguments and its results, with `Ref` for tensors
    seen: Any = None  # of read: what the host has got
    stops_host: bool = False  # the thread waits until the device has done it
    stack: tuple[str, ...] = ()  # of what has accesses


@dataclass
class Block:
    """Memory."""

    nbytes: int
    owner: int | None  # stream; None: it is the host's
    made: str  # where
    gone: str = ""  # where it was let go
    before: Tensor | None = None  # what was in it when it was first seen, if nobody was seen to make it
    name: str = ""
    queues: set[int] = field(default_factory=set)  # those that have used it


class Queue:
    """What does one thing after the other."""

    is_host = False

    def __init__(self, recorder: "Recorder", name: str) -> None:
        self.recorder, self.name = recorder, name
        self.number = len(recorder.queues)
        recorder.queues.append(self)

    def record_event(self, event: "SimEvent | None" = None) -> "SimEvent":
        """Mark the end of what is queued here so far."""
        event = event or SimEvent(self.recorder)
        self.recorder.events += 1
        event.number, event.queue = self.recorder.events, self
        self.recorder.add("record", self, event=event.number)
        return event

    def wait_event(self, event: "SimEvent") -> None:
        """What is queued here from now on comes after the event."""
        self.recorder.add("wait", self, event=event.number)


class SimStream(Queue):
    """What the package asks of a torch.Stream."""

    def wait_stream(self, other: "SimStream") -> None:
        """What is queued here from now on comes after all that is queued there."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """The thread waits for all that is queued here."""
        self.record_event().synchronize()

    def __enter__(self) -> None:
        self.recorder.thread.entered.append(self)

    def __exit__(self, *_: object) -> None:
        self.recorder.thread.entered.pop()


class SimThread(Queue):
    """A thread of the host."""

    is_host = True

    def __init__(self, recorder: "Recorder", name: str, default: SimStream) -> None:
        super().__init__(recorder, name)
        self.entered = [default]  # streams; the last one is current
        self.with_grad = True

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is done inside is done by this thread."""
        before, self.recorder.thread = self.recorder.thread, self
        grad_before = torch.is_grad_enabled()
        torch.set_grad_enabled(self.with_grad)  # each thread has its own
        try:
            yield
        finally:
            self.with_grad, self.recorder.thread = torch.is_grad_enabled(), before
            torch.set_grad_enabled(grad_before)


class SimEvent:
    """A place in a queue: what the package asks of a torch.Event."""

    def __init__(self, recorder: "Recorder") -> None:
        self.recorder, self.number = recorder, 0
        self.queue: Queue = recorder.main  # where it was recorded last

    def record(self, stream: SimStream | None = None) -> None:
        """Be at the end of what the stream has queued so far."""
        (stream or self.recorder.current()).record_event(self)

    def wait(self, stream: SimStream | None = None) -> None:
        """What the stream queues from now on comes after this."""
        (stream or self.recorder.current()).wait_event(self)

    def synchronize(self) -> None:
        """The thread waits."""
        self.recorder.thread.wait_event(self)

    def query(self) -> bool:
        """It has been, now that the thread knows: a thread that has seen it comes after it."""
        self.synchronize()
        return True


class Recorder(TorchDispatchMode):
    """See [Note: queues]."""

    # Storages on the device; of all recorders, because tensors in caches outlive a run.
    on_device: ClassVar[set[int]] = set()

    def __init__(self, late: bool = False) -> None:
        """`late`: threads run a job only when somebody waits for it, and else at once."""
        super().__init__()
        self.late = late
        self.queues: list[Queue] = []
        self.compute = SimStream(self, "compute")
        self.thread = self.main = SimThread(self, "the host", self.compute)
        self.allocator = SimThread(self, "the host's allocator", self.compute)
        known = self.compute, self.main, self.allocator
        assert tuple(queue.number for queue in known) == (COMPUTE, HOST, ALLOCATOR)
        self.items: list[Item] = []
        self.blocks: list[Block] = []
        self.block_of: dict[int, int] = {}  # by storage, of those that have memory
        self.let_go: dict[int, list[int]] = {}  # by stream: blocks that it may be given again
        self.watched: set[int] = set()  # storages of which the end is told
        self.locked: set[int] = set()  # storages of page-locked memory of torch's, which waits for its copies
        self.makes_on_device: bool | None = None  # what is called now; None: where its tensors are
        self.events = 0
        self.last_call: dict[Any, tuple[Queue, SimEvent]] = {}  # by communicator: the stream, and its end
        self.doing = ""  # what the next collective is about
        self.order: list[tuple[Any, str, int]] = []  # of collectives
        self.finals: dict[str, Tensor] = {}  # what has come out
        self.active = False

    @property
    def streams(self) -> list[SimStream]:
        """The queues of the device."""
        return [queue for queue in self.queues if isinstance(queue, SimStream)]

    def stream(self, name: str) -> SimStream:
        """A new stream."""
        return SimStream(self, name)

    def new_thread(self, name: str) -> SimThread:
        """A new thread."""
        return SimThread(self, name, self.compute)

    def current(self) -> SimStream:
        """The stream that the thread queues work on now."""
        return self.thread.entered[-1]

    def add(self, kind: str, queue: Queue, accesses: Sequence[Access] = (), **rest: Any) -> Item:
        """The queue will do this."""
        thread = queue if queue.is_host else self.thread
        item = Item(kind, queue.number, thread.number, list(accesses), **rest)
        if self.active:
            if accesses:
                item.stack = _stack()
            self.items.append(item)
            for access in accesses:
                self.blocks[access.block].queues.add(queue.number)
        return item

    @contextmanager
    def recording(self) -> Iterator["Recorder"]:
        """From now on, all that is done with tensors is written down."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
            self._resized(storage, nbytes)
            return resize(storage, nbytes)

        self.active = True
        try:
            with mock.patch.object(torch.UntypedStorage, "resize_", resized):
                yield self
        finally:
            self.active = False

    # Where memory is -----------------------------------------------------------------------------

    def is_on_device(self, tensor: Tensor) -> bool:
        """Whether the tensor is on the device that is not there."""
        return tensor.untyped_storage()._cdata in self.on_device

    def put_on_device(self, tensor: Tensor) -> None:
        """From now on the memory of this tensor is the device's."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.on_device:
            self.on_device.add(storage._cdata)
            weakref.finalize(storage, self.on_device.discard, storage._cdata).atexit = False

    def queue_of(self, tensors: Sequence[Tensor]) -> Queue:
        """What does an operation with these tensors: the current stream if one is on the device."""
        on_device = self.makes_on_device
        if on_device is None:
            on_device = any(map(self.is_on_device, tensors))
        return self.current() if on_device else self.thread

    # Memory --------------------------------------------------------------------------------------

    def ref(self, tensor: Tensor) -> Ref:
        """The tensor as a window. Memory that is new here was there before, with what is in it now."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.block_of:
            with _disable_current_modes():
                before = torch.empty(0, dtype=BYTES).set_(storage).clone()
            owner = self.compute.number if storage._cdata in self.on_device else None
            self._begin(storage, Block(storage.nbytes(), owner, here(), before=before))
        block, size, stride = self.block_of[storage._cdata], tuple(tensor.size()), tuple(tensor.stride())
        return Ref(block, tensor.dtype, size, stride, int(tensor.storage_offset()))

    def _begin(self, storage: torch.UntypedStorage, block: Block) -> int:
        key = storage._cdata
        self.block_of[key] = number = len(self.blocks)
        self.blocks.append(block)
        if key not in self.watched:
            self.watched.add(key)
            weakref.finalize(storage, self._gone, key).atexit = False
        return number

    def make(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """The current stream, or the host, gives memory to a storage."""
        on_device = storage._cdata in self.on_device
        queue: Queue = self.current() if on_device else self.thread
        for number in self.let_go.pop(queue.number, []):
            self.add("free", queue, [Access(number, 0, self.blocks[number].nbytes, writes=True)])
        block = self._begin(storage, Block(nbytes, queue.number if on_device else None, here()))
        self.add("make", queue, [Access(block, 0, nbytes, writes=True)])

    def _gone(self, key: int) -> None:
        self.watched.discard(key)
        self._free(key)
        self.locked.discard(key)

    def _free(self, key: int) -> None:
        number = self.block_of.pop(key, None)
        if not self.active or number is None:
            return
        block = self.blocks[number]
        block.gone = here()
        if block.owner is not None:
            self.let_go.setdefault(block.owner, []).append(number)
        elif key not in self.locked and any(not self.queues[each].is_host for each in block.queues):
            users = {self.thread.number, *(each for each in block.queues if self.queues[each].is_host)}
            for each in sorted(users):
                self.allocator.wait_event(self.queues[each].record_event())
            self.add("free", self.allocator, [Access(number, 0, block.nbytes, writes=True)])

    def _resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        if self.active and nbytes != storage.nbytes():
            self._free(storage._cdata)
            if nbytes:
                self.make(storage, nbytes)

    def called(self, what: str, tensor: Tensor) -> None:
        """Name the memory of a tensor."""
        self.blocks[self.ref(tensor).block].name = what

    # Operations ----------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._dispatched(func, args, kwargs or {})

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in WITHOUT_ACCESS:
            return func(*args, **kwargs)
        tensors = list(_tensors((args, kwargs)))
        queue = self.queue_of(tensors)
        mixed = [tensor for tensor in tensors if self.is_on_device(tensor) is queue.is_host]
        if func not in COPIES and self.makes_on_device is None:
            args, kwargs = self._brought(func, mixed, args, kwargs)
        given = mapped(self.ref, Tensor, (args, kwargs)) if self.active else None
        results = func(*args, **kwargs)
        here_before = {tensor.untyped_storage()._cdata for tensor in tensors}
        for result in _tensors(results):
            if result.untyped_storage()._cdata not in here_before:
                self._made(result, queue)
        if self.active and func not in MAKES:
            waits = func in COPIES and bool(mixed) and not (kwargs.get("non_blocking") or any(args[2:]))
            self._note(queue, func, given, mapped(self.ref, Tensor, results), results, waits)
        return results

    def _brought(self, func: Any, mixed: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        """The arguments, with what torch itself takes from the host: numbers, and places to index."""
        taken: dict[int, Tensor] = {}
        for tensor in mixed:
            if func in INDEXES and not self.is_on_device(tensor):
                taken[id(tensor)] = self._copied_up(tensor)
            elif tensor.dim() or self.is_on_device(tensor):
                raise RuntimeError(f"{func} has tensors of the device and of the host")
            else:
                self.host_reads(tensor)
                taken[id(tensor)] = number = tensor.clone()
                self.locked.add(number.untyped_storage()._cdata)  # it travels with the call
        if not taken:
            return args, kwargs
        return mapped(lambda each: taken.get(id(each), each), Tensor, (args, kwargs))

    def _copied_up(self, tensor: Tensor) -> Tensor:
        """A copy on the device, for which the thread waits."""
        self.makes_on_device = True
        with self:
            room = torch.empty_like(tensor)
            self.makes_on_device = None
            return room.copy_(tensor)

    def _made(self, result: Tensor, queue: Queue) -> None:
        storage = result.untyped_storage()
        if storage._cdata in self.block_of:
            return
        if not queue.is_host:
            self.put_on_device(result)
        if self.active:
            self.make(storage, storage.nbytes())

    def _note(self, queue: Queue, func: Any, given: Any, returned: Any, results: Any, waits: bool) -> None:
        accesses = list(_accesses(func, *given))
        known = {access.block for access in accesses}
        new = [ref for ref in _refs(returned) if ref.block not in known]
        call = (func, given, returned)
        if func in READS:
            self.add("read", queue, accesses, call=call, seen=results, stops_host=not queue.is_host)
            self._stop(queue)
        elif new or any(access.writes for access in accesses):  # anything else is a view
            accesses += [Access(ref.block, *ref.span(), writes=True) for ref in new]
            self.add("op", queue, accesses, call=call, stops_host=waits)
            if waits:
                self._stop(queue)

    def _stop(self, queue: Queue) -> None:
        """The thread waits for a stream."""
        if not queue.is_host:
            queue.record_event().synchronize()

    def host_reads(self, tensor: Tensor) -> None:
        """The thread reads these values; of the device's it waits for them."""
        if not self.active:
            return
        ref, queue = self.ref(tensor), self.queue_of([tensor])
        read = [Access(ref.block, *ref.span(), writes=False)]
        call = (torch.ops.aten.clone.default, ((ref,), {}), None)
        with _disable_current_modes():
            seen = tensor.detach().clone()
        self.add("read", queue, read, call=call, seen=seen, stops_host=not queue.is_host)
        self._stop(queue)

    @contextmanager
    def collective(self, communicator: Any, kind: str, *tensors: Tensor) -> Iterator[None]:
        """A call on a communicator comes after the last one on it, on whatever stream that was queued."""
        if not all(map(self.is_on_device, tensors)):
            raise RuntimeError(f"{kind} of {self.doing}: the backend has tensors of the host")
        stream = self.current()
        if not self.active:
            yield
            return
        self.order.append((communicator, f"{kind} of {self.doing}", tensors[0].numel() if tensors else 0))
        if communicator in self.last_call and self.last_call[communicator][0] is not stream:
            stream.wait_event(self.last_call[communicator][1])
        yield
        self.last_call[communicator] = (stream, stream.record_event())


def _accesses(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Access]:
    written = _written(func)
    named = [*zip(written.values(), args, strict=False), *((written[key], kwargs[key]) for key in kwargs)]
    for writes, value in named:
        yield from (Access(ref.block, *ref.span(), writes) for ref in _refs(value))


@cache
def _written(func: Any) -> dict[str, bool]:
    """Whether the operation writes to its arguments, by name and in their order."""
    alias = {argument.name: argument.alias_info for argument in func._schema.arguments}
    return {name: info is not None and info.is_write for name, info in alias.items()}


def _tensors(tree: Any) -> Iterator[Tensor]:
    return _leaves(Tensor, tree)


def _refs(tree: Any) -> Iterator[Ref]:
    return _leaves(Ref, tree)


def _leaves(kind: type[Leaf], tree: Any) -> Iterator[Leaf]:
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, (list, tuple, dict)):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(kind, each)


def mapped(change: Callable[[Leaf], Any], kind: type[Leaf], tree: Any) -> Any:
    """The lists, tuples and dictionaries again, with other leaves of this kind. Tuples become lists."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, (list, tuple)):
        return [mapped(change, kind, each) for each in tree]
    if isinstance(tree, dict):
        return {key: mapped(change, kind, each) for key, each in tree.items()}
    return tree


def _stack(most: int = 8) -> tuple[str, ...]:
    """Where in this repository we are, innermost first."""
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < most:
        if file := _told(frame.f_code.co_filename):
            found.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


@cache
def _told(file: str) -> str:
    """A file's name in this repository; "" for others and for those of this search itself."""
    is_told = file.startswith(ROOT) and "/site-packages/" not in file and file not in MACHINERY
    return file[len(ROOT) + 1 :] if is_told else ""


def here() -> str:
    """The innermost place in this repository."""
    return next(iter(_stack(1)), "")
