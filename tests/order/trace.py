"""What one rank asks of its device: operations, events, waits and memory, in the order in which it asks.

[Note: streams that are not there] Tensors are the CPU's, and operations are computed as the host asks for
them. `Recorder` writes down on which stream each would have been queued, which bytes it reads and writes, and
what orders it: events, waits, and the host where it reads a value. `clocks.py` looks through such a record
for accesses that nothing orders, `playback.py` computes it anew in other orders that a device may choose.

Memory is a `Block` from when it is made until the last reference is gone, or until its storage is shrunk. It
belongs to the stream that was current when it was made, which may be given the same bytes the next time that
it makes something: that counts as a write.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Leaf = TypeVar("Leaf")
ROOT = str(Path(__file__).parents[2])
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
INDEXING = {Tensor.__getitem__, Tensor.__setitem__}  # by a list, which the host copies, and waits
TO_THE_HOST = {Tensor.tolist, Tensor.numpy, Tensor.cpu}  # on a CPU no operation tells of these


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
    """One thing that is queued: op, read (which the host waits for), record, wait, make or free."""

    kind: str
    stream: int
    accesses: list[Access] = field(default_factory=list)
    event: int = -1  # of record and wait
    call: Any = None  # of op and read: the operation, its arguments and its results, with `Ref` for tensors
    seen: Any = None  # of read: what the host has got
    stack: tuple[str, ...] = ()


@dataclass
class Block:
    """Memory."""

    nbytes: int
    owner: int  # stream
    made: str  # where
    gone: str = ""  # where it was let go
    before: Tensor | None = None  # what was in it when it was first seen, if nobody was seen to make it
    name: str = ""


class SimEvent:
    """A place in a stream."""

    def __init__(self, number: int) -> None:
        self.number = number


class SimStream:
    """What the package asks of a torch.Stream."""

    def __init__(self, recorder: "Recorder", number: int, name: str) -> None:
        self.recorder, self.number, self.name = recorder, number, name

    def record_event(self) -> SimEvent:
        """Mark the end of what is queued here so far."""
        self.recorder.events += 1
        self.recorder.add(Item("record", self.number, event=self.recorder.events))
        return SimEvent(self.recorder.events)

    def wait_event(self, event: SimEvent) -> None:
        """What is queued here from now on comes after the event."""
        self.recorder.add(Item("wait", self.number, event=event.number))

    def wait_stream(self, other: "SimStream") -> None:
        """What is queued here from now on comes after all that is queued there."""
        self.wait_event(other.record_event())

    def __enter__(self) -> None:
        self.recorder.entered.append(self)

    def __exit__(self, *_: object) -> None:
        self.recorder.entered.pop()


class Recorder(TorchDispatchMode):
    """See [Note: streams that are not there]."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = [SimStream(self, 0, "compute")]
        self.entered = [self.streams[0]]
        self.items: list[Item] = []
        self.blocks: list[Block] = []
        self.block_of: dict[int, int] = {}  # by storage, of those that have memory
        self.let_go: dict[int, list[int]] = {}  # by stream: blocks that it may be given again
        self.watched: set[int] = set()  # storages of which the end is told
        self.events = 0
        self.last_call: dict[Any, tuple[int, SimEvent]] = {}  # by communicator: the stream, and its end
        self.doing = ""  # what the next collective is about
        self.order: list[tuple[Any, str, int]] = []  # of collectives
        self.finals: dict[str, Tensor] = {}  # what has come out
        self.active = False

    def stream(self, name: str) -> SimStream:
        """A new stream."""
        self.streams.append(SimStream(self, len(self.streams), name))
        return self.streams[-1]

    def current(self) -> SimStream:
        """The stream that work is queued on now."""
        return self.entered[-1]

    def add(self, item: Item) -> None:
        """Queue it."""
        if self.active:
            item.stack = _stack()
            self.items.append(item)

    @contextmanager
    def recording(self) -> Iterator["Recorder"]:
        """From now on, all that this thread does with tensors is written down."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
            self._resized(storage, nbytes)
            return resize(storage, nbytes)

        self.active = True
        with mock.patch.object(torch.UntypedStorage, "resize_", resized), _ToTheHost(self), self:
            yield self
        self.active = False

    # Memory --------------------------------------------------------------------------------------

    def ref(self, tensor: Tensor) -> Ref:
        """The tensor as a window. Memory that is new here was there before, with what is in it now."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.block_of:
            with _disable_current_modes():
                before = torch.empty(0, dtype=BYTES).set_(storage).clone()
            self._begin(storage, Block(storage.nbytes(), 0, _here(), before=before))
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
        """The current stream gives memory to a storage."""
        stream = self.current().number
        for number in self.let_go.pop(stream, []):
            self.add(Item("free", stream, [Access(number, 0, self.blocks[number].nbytes, writes=True)]))
        block = self._begin(storage, Block(nbytes, stream, _here()))
        self.add(Item("make", stream, [Access(block, 0, nbytes, writes=True)]))

    def _gone(self, key: int) -> None:
        self.watched.discard(key)
        self._free(key)

    def _free(self, key: int) -> None:
        block = self.block_of.pop(key, None)
        if self.active and block is not None:
            self.blocks[block].gone = _here()
            self.let_go.setdefault(self.blocks[block].owner, []).append(block)

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
        kwargs = kwargs or {}
        if func in WITHOUT_ACCESS:
            return func(*args, **kwargs)
        given = mapped(self.ref, Tensor, (args, kwargs))
        results = func(*args, **kwargs)
        for storage in (tensor.untyped_storage() for tensor in _tensors(results)):
            if storage._cdata not in self.block_of:
                self.make(storage, storage.nbytes())
        if func not in MAKES:
            self._note(func, given, mapped(self.ref, Tensor, results), results)
        return results

    def _note(self, func: Any, given: Any, returned: Any, results: Any) -> None:
        accesses = list(_accesses(func, *given))
        known = {access.block for access in accesses}
        new = [ref for ref in _refs(returned) if ref.block not in known]
        if func in READS:
            self.add(
                Item("read", self.current().number, accesses, call=(func, given, returned), seen=results)
            )
        elif new or any(access.writes for access in accesses):  # anything else is a view
            accesses += [Access(ref.block, *ref.span(), writes=True) for ref in new]
            self.add(Item("op", self.current().number, accesses, call=(func, given, returned)))

    def host_reads(self, tensor: Tensor) -> None:
        """The host waits for these values."""
        if not self.active:
            return
        ref = self.ref(tensor)
        read = [Access(ref.block, *ref.span(), writes=False)]
        call = (torch.ops.aten.clone.default, ((ref,), {}), None)
        with _disable_current_modes():
            seen = tensor.detach().clone()
        self.add(Item("read", self.current().number, read, call=call, seen=seen))

    @contextmanager
    def collective(self, communicator: Any, kind: str, numel: int) -> Iterator[None]:
        """A call on a communicator comes after the last one on it, on whatever stream that was queued."""
        stream = self.current()
        if not self.active:
            yield
            return
        self.order.append((communicator, f"{kind} of {self.doing}", numel))
        if communicator in self.last_call and self.last_call[communicator][0] != stream.number:
            stream.wait_event(self.last_call[communicator][1])
        yield
        self.last_call[communicator] = (stream.number, stream.record_event())


class _ToTheHost(TorchFunctionMode):
    """Tells the recorder of what no operation tells."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TO_THE_HOST or (func in INDEXING and _has_list(args[1])):
            with torch._C.DisableTorchFunction():
                self.recorder.host_reads(args[0])
        return func(*args, **(kwargs or {}))


def _has_list(index: Any) -> bool:
    return any(isinstance(each, list) for each in (index if isinstance(index, tuple) else (index,)))


def _accesses(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Access]:
    declared = func._schema.arguments
    by_name = {argument.name: argument for argument in declared}
    named = [*zip(declared, args, strict=False), *((by_name[key], value) for key, value in kwargs.items())]
    for argument, value in named:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        yield from (Access(ref.block, *ref.span(), writes) for ref in _refs(value))


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


def _stack() -> tuple[str, ...]:
    """Where in this repository we are, innermost first."""
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < 8:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and "/site-packages/" not in file and file != __file__:
            found.append(f"{file[len(ROOT) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


def _here() -> str:
    return next(iter(_stack()), "")
