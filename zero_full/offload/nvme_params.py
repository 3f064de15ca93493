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

import logging
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero_full._compat import version_of
from zero_full.comm.lane import Pending, Thread
from zero_full.kernels.files import PAGE, aligned_empty
from zero_full.offload.param_store import Shelf, ShelfBehindMemory, Slice
from zero_full.offload.spill_file import (
    DAMAGED,
    LOST,
    ScratchFile,
    page_sums,
    refuse_more_than_free,
    whole_pages,
)

log = logging.getLogger("zero_full")


@dataclass(eq=False)
class Buffer:
    """A buffer for a slice that is read or written."""

    memory: Tensor
    numel: int  # elements of the slice's dtype
    copied: Any = None  # the event behind a copy to the device

    def synchronize(self) -> None:
        """Wait until no copy to a device reads the buffer."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None


class Buffers:
    """A pool of buffers, in use or free for a slice of the same size, with a limit on their elements."""

    def __init__(self, numel: int, pinned: bool) -> None:
        self.limit, self.pinned = numel, pinned
        self.numel = 0
        self.free: list[Buffer] = []
        self.lock = threading.Lock()

    def take(self, size: int, itemsize: int, exceed: bool = False) -> Buffer | None:
        """Take a buffer of `size` bytes; None if that would exceed the limit, unless `exceed`."""
        numel = size // itemsize
        with self.lock:
            for buffer in self.free:
                if buffer.memory.numel() == size and buffer.numel == numel:
                    self.free.remove(buffer)
                    return buffer
            while self.free and self.numel + numel > self.limit:
                self.numel -= self.free.pop().numel
            if self.numel + numel > self.limit and not exceed:
                return None
            self.numel += numel
        with torch.inference_mode(False):  # it outlives the pass
            return Buffer(aligned_empty(size, torch.uint8, pin=self.pinned), numel)

    def give(self, buffer: Buffer) -> None:
        """Return a buffer, which only the copy behind `buffer.copied` may still read."""
        with self.lock:
            if self.numel <= self.limit:
                self.free.append(buffer)
            else:
                self.numel -= buffer.numel

    def clear(self) -> None:
        """Free the unused buffers."""
        with self.lock:
            self.free.clear()


class Reading:
    """The read of a slice into a buffer."""

    def __init__(self, slice_: "FileSlice", buffer: Buffer) -> None:
        self.slice, self.buffer = slice_, buffer
        self.version = version_of(slice_.at_rest)  # when the read began
        self.has_sums = self.version == slice_.summed
        self.wrong = ""  # the error, which counts if the slice was not written meanwhile
        self.pending = slice_.shelf.lane.submit(self._read, [], [])

    def _read(self) -> None:
        """Fill the buffer, and compare checksums where they are known. Runs on the lane."""
        slice_, shelf, memory = self.slice, self.slice.shelf, self.buffer.memory
        if slice_.kept is not None:
            return
        try:
            shelf.file.read(memory, slice_.at, self.buffer).wait()
            shelf.read_bytes += slice_.room
        except OSError as error:
            self.wrong = str(error)
        if not self.wrong and self.has_sums and slice_.sums is not None:
            self.wrong = "" if torch.equal(page_sums(memory), slice_.sums) else DAMAGED

    def wait(self) -> bool:
        """Wait for the read. Returns False if the slice at rest was written since it began."""
        self.pending.wait()
        if self.slice.kept is None and self.version != version_of(self.slice.at_rest):
            return False
        if self.wrong:
            self.buffer.memory.fill_(LOST)
            self.slice.shelf.lose(self.wrong)
        return True


class FileSlice(Slice):
    """A slice in a file. See [Note: reading ahead] and [Note: writing behind]."""

    apart, kind = True, "disk"

    def __init__(self, shelf: "BlockShelf", numel: int, dtype: torch.dtype) -> None:
        self.shelf, self.dtype, self.size = shelf, dtype, numel * dtype.itemsize
        self.room = max(whole_pages(self.size), PAGE)
        self.at = shelf.file.take(self.size)
        # `data`: torch counts writes to this tensor separately from writes to the window.
        self.at_rest = shelf.file.window(self.at, self.size).view(dtype).data
        self.reading: Reading | None = None
        self.lent: Buffer | None = None  # the buffer that the optimizer updates during a step
        self.writing: Pending | None = None
        self.kept: Tensor | None = None  # the bytes in memory, after a failed write
        self.sums: Tensor | None = None  # checksums of the last write ...
        self.summed = -1  # ... and the version of the slice at rest then

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

    def begin(self, ahead: bool = False) -> bool:
        """Begin to read the slice, if there is a buffer. Without `ahead` there always is one."""
        if self.kept is None and self.reading is None:
            buffer = self.shelf.buffer_for(self, ahead)
            if buffer is None:
                return False
            self.reading = Reading(self, buffer)
            if ahead:
                self.shelf.ahead.add(self)
        if not ahead:
            self.shelf.ahead.discard(self)
        return True

    def give_up(self) -> None:
        """Drop a prefetch."""
        reading, self.reading = self.reading, None
        if reading is not None:
            reading.pending.wait()
            self.shelf.buffers.give(reading.buffer)

    def _arrive(self) -> Buffer | None:
        """Wait for the buffer with the values; None if they are kept in memory."""
        reading, self.reading = self.reading, None
        if reading is None and self.kept is None:  # not prefetched, as when a change is undone
            reading = Reading(self, self.shelf.buffer_beyond(self))
        if reading is None:
            return None
        while not reading.wait():
            reading = Reading(self, reading.buffer)
        if self.kept is None:
            return reading.buffer
        self.shelf.buffers.give(reading.buffer)
        return None

    def copy_to(self, place: Tensor) -> None:
        """Wait for the read, and copy the values into the gathered buffer."""
        buffer = self._arrive()
        if buffer is None:
            assert self.kept is not None
            place.copy_(self._in(self.kept))
            return
        place.copy_(self._in(buffer.memory), non_blocking=True)
        if place.device.type != "cpu":
            buffer.copied = torch.accelerator.current_stream(place.device).record_event()
        self.shelf.buffers.give(buffer)

    # A step --------------------------------------------------------------------------------------

    def fetch(self, device: torch.device) -> Tensor:
        """The values where they are stepped: on a CPU the buffer itself, which `update` writes."""
        self._take_back()
        self.begin()
        buffer = self._arrive()
        if buffer is None:
            return self.values.to(device)
        if device.type == "cpu":
            self.lent = buffer
            return self._in(buffer.memory)
        values = self._in(buffer.memory).to(device)
        self.shelf.buffers.give(buffer)
        return values

    def _take_back(self) -> Buffer | None:
        """Take the buffer back from a step that has failed or has updated another tensor."""
        buffer, self.lent = self.lent, None
        if buffer is not None:
            self.shelf.buffers.give(buffer)
        return buffer

    def update(self, updated: Tensor) -> None:
        """Begin to write the new values. See [Note: writing behind]."""
        if updated is self.at_rest:
            return
        self.give_up()
        if self.kept is not None:
            self.values.copy_(updated)
            return
        buffer, self.lent = self.lent, None
        if buffer is None or updated.data_ptr() != buffer.memory.data_ptr():
            buffer = buffer or self.shelf.buffer_for(self)
            assert buffer is not None
            buffer.synchronize()
            self._in(buffer.memory).copy_(updated)
        self.summed = version_of(self.at_rest)
        self.writing = self.shelf.lane.submit(partial(self._write, buffer), [], [])

    def _write(self, buffer: Buffer) -> None:
        """Write a slice to the file, or keep it after a failed write. Runs on the lane."""
        try:
            if not self.shelf.failure:
                self.sums = page_sums(buffer.memory)
                self.shelf.file.write(buffer.memory, self.at, buffer).wait()
                self.shelf.written_bytes += self.room
        except OSError as error:
            self.shelf.fail(error)
        if self.shelf.failure:
            self.kept = buffer.memory
        else:
            self.shelf.buffers.give(buffer)


class BlockShelf(ShelfBehindMemory):
    """The store of slices in an unnamed file. See the notes at the top."""

    apart, can_lose = True, True

    def __init__(self, file: ScratchFile, buffers: Buffers, memory_numel: int, in_memory: Shelf) -> None:
        super().__init__(memory_numel, in_memory)
        self.file, self.directory, self.place, self.buffers = file, file.directory, file.place, buffers
        self.reach, self.advice = buffers.limit, file.advice
        self.lane = Thread("zero_full-parameters")
        self.ahead: set[FileSlice] = set()  # prefetched and not yet used
        self.read_bytes = self.written_bytes = 0
        self.failure = self.lost = ""

    def close(self) -> None:
        """End threads and file. Slices stay valid while they are referenced."""
        self.lane.close()
        self.file.end()
        self.buffers.clear()

    def moved(self) -> dict[str, int]:
        """Bytes of parameters read and written so far, by whole slices."""
        return {"parameters read": self.read_bytes, "parameters written": self.written_bytes}

    def refuse_too_little(self, need: int) -> None:
        """Raise OSError if the disk does not have `need` free bytes."""
        refuse_more_than_free(self.directory, need)

    def put(self, values: Tensor) -> Slice:
        """Make a slice and begin to write these values."""
        slice_ = FileSlice(self, values.numel(), values.dtype)
        slice_.update(values)
        return slice_

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device) -> Slice:
        """Make a slice of zeros, which new space in a file consists of."""
        return FileSlice(self, numel, dtype)

    # Buffers -------------------------------------------------------------------------------------

    def buffer_for(self, slice_: FileSlice, ahead: bool = False) -> Buffer | None:
        """Take a buffer; None if there is no room and the slice is only prefetched (`ahead`)."""
        buffer = self.buffers.take(slice_.room, slice_.dtype.itemsize)
        if buffer is not None or ahead:
            return buffer
        self.give_up_ahead()
        self.lane.drain()  # writes return their buffers
        return self.buffer_beyond(slice_)

    def buffer_beyond(self, slice_: FileSlice) -> Buffer:
        """Take a buffer, beyond the limit if there is no room."""
        buffer = self.buffers.take(slice_.room, slice_.dtype.itemsize, exceed=True)
        assert buffer is not None
        return buffer

    def give_up_ahead(self) -> None:
        """Drop prefetched slices that were not used."""
        for slice_ in self.ahead:
            slice_.give_up()
        self.ahead.clear()

    # Errors --------------------------------------------------------------------------------------

    def lose(self, why: str) -> None:
        """Note and log that a slice cannot be read."""
        if not self.lost:
            self.lost = (
                f"parameters that wait in {self.directory} cannot be read: {why}. Go on from the last "
                "checkpoint, with a disk that can be read"
            )
            log.error("%s", self.lost)

    def fail(self, error: OSError) -> None:
        """Note and log that a slice cannot be written."""
        self.failure = (
            f"parameters cannot be written to {self.directory}: {error}. They stay in memory, and the step "
            "was finished: save a checkpoint now, after zero_grad, and go on from it with a disk that can be "
            "written"
        )
        log.error("%s", self.failure)
