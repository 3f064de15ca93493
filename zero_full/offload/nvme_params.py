"""Parameter slices in a file, prefetched before the gathers that need them (ZeRO-Infinity).

[Note: reading ahead] The gatherer knows the order of units, and prefetches as many slices as fit in the
buffers. A lane reads one slice after the other, each by several threads, past the page cache where the file
system supports that. A gather copies a slice from its buffer to the gathered buffer, and frees it for a later
slice. In the first pass the order is unknown: a slice is read when it is needed.

[Note: writing behind] Slices that a step has updated are written on the same lane, while the step goes on.
Access to a slice waits for its write. Reads that are queued later follow the write on the lane.

A slice at rest is a window into the file (see `spill_file.py`). If the window is written by user code after a
prefetch has begun, the read is repeated. The system keeps page cache and disk coherent.

[Note: what can go wrong] Written slices have checksums, which are compared when they are read. A slice that
cannot be written stays in memory, and so do all later ones: the step is finished, everything can be saved,
and the next step raises on all ranks. A slice that cannot be read becomes NaN, so that every rank continues
to the end of the pass or step, where all of them raise.
"""

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero_full._compat import version_of
from zero_full.comm.lane import Pending, ThreadLane, current_stream
from zero_full.kernels.files import PAGE
from zero_full.offload.arena import Arena
from zero_full.offload.param_store import MemoryFirstStore, ParamSlice, ParamStore, Uploads
from zero_full.offload.spill_file import DAMAGED, NAN_BYTE, SpillFile, page_checksums, whole_pages
from zero_full.offload.storage import FileStorage


@dataclass(eq=False)
class Buffer:
    """A buffer for a slice that is read or written."""

    memory: Tensor
    arena: Arena  # of this memory
    numel: int  # elements of the slice's dtype
    copied: Any = None  # the event behind a copy to the device

    def synchronize(self) -> None:
        """Wait until no copy to a device reads the buffer."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None


def event_behind(device: torch.device) -> Any:
    """Record an event behind the caller's work on the device; None on a CPU."""
    stream = current_stream(device)
    return None if stream is None else stream.record_event()


class BufferPool:
    """A pool of buffers, in use or free for a slice of the same size, with a limit on their elements."""

    def __init__(self, numel: int, locker: Any = None) -> None:
        """`locker` (from `page_locker()`) page-locks each buffer, at its exact size; None: pageable."""
        self.limit, self.locker = numel, locker
        self.numel = 0
        self.free: list[Buffer] = []
        self.lock = threading.Lock()

    def take(self, size: int, itemsize: int, exceed: bool = False) -> Buffer | None:
        """Take a buffer of `size` bytes; None if that would exceed the limit, unless `exceed`."""
        numel = size // itemsize
        with self.lock:
            sizes = [(buffer.memory.numel(), buffer.numel) for buffer in self.free]
            if (size, numel) in sizes:
                return self.free.pop(sizes.index((size, numel)))
            while self.free and self.numel + numel > self.limit:
                self.numel -= self.free.pop().numel
            if self.numel + numel > self.limit and not exceed:
                return None
            self.numel += numel
        arena = Arena([size], self.locker, optional="a buffer of parameters in a file (offload_param)")
        if self.locker is not None and not arena.locked:
            self.locker = None  # one warning is enough
        with torch.inference_mode(False):  # it outlives the pass
            memory = arena.take(size, torch.uint8)
        assert memory is not None
        return Buffer(memory, arena, numel)

    def give(self, buffer: Buffer) -> None:
        """Give a buffer back to the pool. Only the copy behind `buffer.copied` may still read it."""
        with self.lock:
            if self.numel <= self.limit:
                self.free.append(buffer)
            else:
                self.numel -= buffer.numel

    def clear(self) -> None:
        """Free the unused buffers."""
        with self.lock:
            self.free.clear()


class SliceRead:
    """The read of a slice into a buffer."""

    def __init__(self, slice_: "NvmeParamSlice", buffer: Buffer) -> None:
        self.slice, self.buffer = slice_, buffer
        self.version = version_of(slice_.at_rest)  # when the read began
        self.has_checksums = self.version == slice_.checked_version
        self.wrong = ""  # the error, which counts if the slice was not written meanwhile
        self.pending = slice_.store.lane.submit(self._read, [], [])

    def _read(self) -> None:
        """Fill the buffer, and compare checksums where they are known. Runs on the lane."""
        slice_, store, memory = self.slice, self.slice.store, self.buffer.memory
        if slice_.kept is not None:
            return
        try:
            store.file.read(memory, slice_.at, self.buffer).wait()
            store.read_bytes += slice_.padded_size
        except OSError as error:
            self.wrong = str(error)
        if not self.wrong and self.has_checksums and slice_.checksums is not None:
            self.wrong = "" if torch.equal(page_checksums(memory), slice_.checksums) else DAMAGED

    def wait(self) -> bool:
        """Wait for the read. Returns False if the slice at rest was written since it began."""
        self.pending.wait()
        if self.slice.kept is None and self.version != version_of(self.slice.at_rest):
            return False
        if self.wrong:
            self.buffer.memory.fill_(NAN_BYTE)
            self.slice.store.on_read_error(self.wrong)
        return True


class NvmeParamSlice(ParamSlice):
    """A slice in a file. See [Note: reading ahead] and [Note: writing behind]."""

    is_offloaded, kind = True, "disk"

    def __init__(self, store: "NvmeParamStore", numel: int, dtype: torch.dtype) -> None:
        self.store, self.dtype, self.size = store, dtype, numel * dtype.itemsize
        self.padded_size = max(whole_pages(self.size), PAGE)
        self.at = store.file.take(self.size)
        # `data`: torch counts writes to this tensor separately from writes to the window.
        self.at_rest = store.file.window(self.at, self.size).view(dtype).data
        self.reading: SliceRead | None = None
        self.in_use: Buffer | None = None  # the buffer that the optimizer updates during a step
        self.writing: Pending | None = None
        self.kept: Tensor | None = None  # the bytes in memory, after a failed write
        self.checksums: Tensor | None = None  # checksums of the last write ...
        self.checked_version = -1  # ... and the version of the slice at rest then

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """The slice at rest, a window into the file, once its last write is done."""
        if self.writing is not None:
            self.writing.wait()
            self.writing = None
        if self.kept is not None and self.at_rest.data_ptr() != self.kept.data_ptr():
            self.at_rest.data = self._in(self.kept)
        return self.at_rest

    def _in(self, memory: Tensor) -> Tensor:
        return memory[: self.size].view(self.dtype)

    # Reading -------------------------------------------------------------------------------------

    def start_read(self, optional: bool = False) -> bool:
        """Start to read the slice. Returns False if `optional` and no buffer is free."""
        if self.kept is None and self.reading is None:
            buffer = self.store.buffer_for(self, optional)
            if buffer is None:
                return False
            self.reading = SliceRead(self, buffer)
            if optional:
                self.store.prefetched.add(self)
        if not optional:
            self.store.prefetched.discard(self)
        return True

    def cancel_prefetch(self) -> None:
        """Drop a prefetch."""
        reading, self.reading = self.reading, None
        if reading is not None:
            reading.pending.wait()
            self.store.buffers.give(reading.buffer)

    def _wait_for_read(self) -> Buffer | None:
        """Wait for the buffer with the values; None if they are kept in memory."""
        reading, self.reading = self.reading, None
        if reading is None and self.kept is None:  # not prefetched, as when a change is undone
            reading = SliceRead(self, self.store.buffer_beyond(self))
        if reading is None:
            return None
        while not reading.wait():
            reading = SliceRead(self, reading.buffer)
        if self.kept is None:
            return reading.buffer
        self.store.buffers.give(reading.buffer)
        return None

    def copy_to(self, place: Tensor, owner_stream: Any = None) -> None:
        """Wait for the read, and queue a copy into the gathered buffer: see [Note: uploads]."""
        buffer = self._wait_for_read()
        if buffer is None:
            assert self.kept is not None
            place.copy_(self._in(self.kept))
            return
        buffer.copied = self.store.uploads.copy(place, self._in(buffer.memory), owner_stream, buffer.copied)
        self.store.buffers.give(buffer)

    # A step --------------------------------------------------------------------------------------

    def fetch(self, device: torch.device) -> Tensor:
        """Return the values where they are stepped: on a CPU the buffer itself, which `update` writes."""
        if self.in_use is not None:  # by a step that has failed or has updated another tensor
            self.store.buffers.give(self.in_use)
            self.in_use = None
        self.start_read()
        buffer = self._wait_for_read()
        if buffer is None:
            return self.values.to(device)
        if device.type == "cpu":
            self.in_use = buffer
            return self._in(buffer.memory)
        values = self._in(buffer.memory).to(device, non_blocking=True)
        buffer.copied = event_behind(device)
        self.store.buffers.give(buffer)
        return values

    def update(self, updated: Tensor) -> None:
        """Begin to write the new values. See [Note: writing behind]."""
        if updated is self.at_rest:
            return
        self.cancel_prefetch()
        if self.kept is not None:
            self.values.copy_(updated)
            return
        buffer, self.in_use = self.in_use, None
        if buffer is None or updated.data_ptr() != buffer.memory.data_ptr():
            buffer = buffer or self.store.buffer_for(self)
            assert buffer is not None
            buffer.synchronize()
            self._in(buffer.memory).copy_(updated, non_blocking=True)
            buffer.copied = event_behind(updated.device)
        self.checked_version = version_of(self.at_rest)
        self.writing = self.store.lane.submit(partial(self._write, buffer), [], [])

    def _write(self, buffer: Buffer) -> None:
        """Write a slice to the file, or keep it after a failed write. Runs on the lane."""
        buffer.synchronize()  # the copy of `update`
        try:
            if not self.store.write_error:
                self.checksums = page_checksums(buffer.memory)
                self.store.file.write(buffer.memory, self.at, buffer).wait()
                self.store.written_bytes += self.padded_size
        except OSError as error:
            self.store.on_write_error(error)
        if self.store.write_error:
            self.kept = buffer.memory
        else:
            self.store.buffers.give(buffer)


class NvmeParamStore(FileStorage, MemoryFirstStore):
    """The store of slices in an unnamed file. See the notes at the top."""

    is_offloaded, can_fail, contents = True, True, "parameters"

    def __init__(
        self, file: SpillFile, buffers: BufferPool, memory_numel: int, in_memory: ParamStore
    ) -> None:
        FileStorage.__init__(self, file, ThreadLane("zero_full-parameters"))
        MemoryFirstStore.__init__(self, memory_numel, in_memory)
        self.buffers, self.prefetch_numel, self.uploads = buffers, buffers.limit, Uploads()
        self.prefetched: set[NvmeParamSlice] = set()  # prefetched and not yet used

    def close(self) -> None:
        """End threads and file, and free the buffers."""
        super().close()
        self.buffers.clear()

    def moved(self) -> dict[str, int]:
        """Return the bytes of parameters read and written so far, by whole slices."""
        return {"parameters read": self.read_bytes, "parameters written": self.written_bytes}

    def add(self, values: Tensor) -> ParamSlice:
        """Make a slice and begin to write these values."""
        slice_ = NvmeParamSlice(self, values.numel(), values.dtype)
        slice_.update(values)
        return slice_

    def add_zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> ParamSlice:
        """Make a slice of zeros, which new space in a file consists of."""
        return NvmeParamSlice(self, numel, dtype)

    # Buffers -------------------------------------------------------------------------------------

    def buffer_for(self, slice_: NvmeParamSlice, optional: bool = False) -> Buffer | None:
        """Take a buffer; None if there is no room and the slice is only prefetched (`optional`)."""
        buffer = self.buffers.take(slice_.padded_size, slice_.dtype.itemsize)
        if buffer is not None or optional:
            return buffer
        self.cancel_prefetches()
        self.lane.drain()  # writes return their buffers
        return self.buffer_beyond(slice_)

    def buffer_beyond(self, slice_: NvmeParamSlice) -> Buffer:
        """Take a buffer, beyond the limit if none is free."""
        buffer = self.buffers.take(slice_.padded_size, slice_.dtype.itemsize, exceed=True)
        assert buffer is not None
        return buffer

    def cancel_prefetches(self) -> None:
        """Drop prefetched slices that were not used."""
        for slice_ in self.prefetched:
            slice_.cancel_prefetch()
        self.prefetched.clear()
