"""Slices of parameters that wait in a file, and are read ahead of the gather that needs them (ZeRO-Infinity).

[Note: reading ahead] The gatherer knows in which order units come. It asks for as many of them as buffers
have room for; a lane reads them one after the other, each by several threads at once, past the page cache
where the file system can do that. A gather copies a slice from its buffer to where it belongs, and the buffer
takes a later one. In the first pass nobody knows the order: a slice is read when it is needed.

[Note: writing behind] What a step has updated is written on the same lane, while the step goes on. Whoever
looks at a slice waits for that first, and what is read later comes behind it on the lane.

A slice at rest is a window into the file (see `spill_file.py`). What others write to it is noticed: a read
that has begun before is repeated. The system keeps page cache and disk the same.

[Note: what can go wrong] What a step has written has checksums, which are compared when it is read again. A
slice that cannot be written stays in memory, and so do all after it: the step is finished, everything can be
saved, and the next step is refused on all ranks. A slice that cannot be read becomes NaN, so that every rank
goes on to where all are told: the end of the pass or the step.
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
    """Memory for a slice on its way."""

    memory: Tensor
    numel: int  # of the slice's type
    copied: Any = None  # the event behind a copy to the device

    def synchronize(self) -> None:
        """Until no device reads it."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None


class Buffers:
    """Buffers with so many elements at a time, in use or free for the next slice of the same size."""

    def __init__(self, numel: int, pinned: bool) -> None:
        self.limit, self.pinned = numel, pinned
        self.numel = 0
        self.free: list[Buffer] = []
        self.lock = threading.Lock()

    def take(self, size: int, itemsize: int, exceed: bool = False) -> Buffer | None:
        """A buffer of so many bytes; None if that would be too many, unless that is to be allowed."""
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
        """It is used no more, but by a copy that `buffer.copied` tells of."""
        with self.lock:
            if self.numel <= self.limit:
                self.free.append(buffer)
            else:
                self.numel -= buffer.numel

    def clear(self) -> None:
        """Let go of what is free."""
        with self.lock:
            self.free.clear()


class Reading:
    """A slice that comes near."""

    def __init__(self, slice_: "FileSlice", buffer: Buffer) -> None:
        self.slice, self.buffer = slice_, buffer
        self.version = version_of(slice_.at_rest)  # of the slice at rest, when it began
        self.has_sums = self.version == slice_.summed
        self.wrong = ""  # in words, if nobody has written to it meanwhile
        self.pending = slice_.shelf.lane.submit(self._read, [], [])

    def _read(self) -> None:
        """On the lane: fill the buffer, and compare checksums where they are known."""
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
        """Wait for it. Returns False if somebody has written to the slice at rest since it began."""
        self.pending.wait()
        if self.slice.kept is None and self.version != version_of(self.slice.at_rest):
            return False
        if self.wrong:
            self.buffer.memory.fill_(LOST)
            self.slice.shelf.lose(self.wrong)
        return True


class FileSlice(Slice):
    """A slice in a file. See the notes above."""

    apart, kind = True, "disk"

    def __init__(self, shelf: "BlockShelf", numel: int, dtype: torch.dtype) -> None:
        self.shelf, self.dtype, self.size = shelf, dtype, numel * dtype.itemsize
        self.room = max(whole_pages(self.size), PAGE)
        self.at = shelf.file.take(self.size)
        super().__init__(shelf.file.window(self.at, self.size).view(dtype).data)  # writes are counted apart
        self.reading: Reading | None = None
        self.lent: Buffer | None = None  # to the optimizer, during a step
        self.writing: Pending | None = None
        self.kept: Tensor | None = None  # in memory, as it could not be written
        self.sums: Tensor | None = None  # of what was written last ...
        self.summed = -1  # ... and the version of the slice at rest then

    @property
    def values(self) -> Tensor:
        """The slice at rest: a window into the file."""
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
        """Begin to read it, if there is a buffer; for who needs it now there always is."""
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
        """What is read is not needed."""
        reading, self.reading = self.reading, None
        if reading is not None:
            reading.pending.wait()
            self.shelf.buffers.give(reading.buffer)

    def _arrive(self) -> Buffer | None:
        """The buffer in which the values are; None: they are kept in memory."""
        reading, self.reading = self.reading, None
        if reading is None and self.kept is None:  # by who asks for all at once, such as an undone change
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
        """Wait until it is read, and put it into the gathered buffer."""
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
        """The values where they are stepped: on a CPU the buffer, which is written afterwards."""
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
        """What was lent to a step that has failed, or has updated something else."""
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
        """On the lane: put a slice into the file; or keep it, if that fails or has failed."""
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
    """Slices wait in a file without a name. See the notes above."""

    apart, can_lose = True, True

    def __init__(self, file: ScratchFile, buffers: Buffers, memory_numel: int, in_memory: Shelf) -> None:
        super().__init__(memory_numel, in_memory)
        self.file, self.directory, self.place, self.buffers = file, file.directory, file.place, buffers
        self.reach, self.advice = buffers.limit, file.advice
        self.lane = Thread("zero_full-parameters")
        self.ahead: set[FileSlice] = set()  # what is read ahead, and is not needed yet
        self.read_bytes = self.written_bytes = 0
        self.failure = self.lost = ""

    def close(self) -> None:
        """End threads and file. Slices stay what they are as long as somebody has them."""
        self.lane.close()
        self.file.end()
        self.buffers.clear()

    def moved(self) -> dict[str, int]:
        """Whole slices."""
        return {"parameters read": self.read_bytes, "parameters written": self.written_bytes}

    def refuse_too_little(self, need: int) -> None:
        """OSError if the disk has not so much space."""
        refuse_more_than_free(self.directory, need)

    def put(self, values: Tensor) -> Slice:
        """A slice with these values, which are being written."""
        slice_ = FileSlice(self, values.numel(), values.dtype)
        slice_.update(values)
        return slice_

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device) -> Slice:
        """A slice of zeros, as new space in a file is."""
        return FileSlice(self, numel, dtype)

    # Buffers -------------------------------------------------------------------------------------

    def buffer_for(self, slice_: FileSlice, ahead: bool = False) -> Buffer | None:
        """A buffer; for what is only read ahead None, if there are enough already."""
        buffer = self.buffers.take(slice_.room, slice_.dtype.itemsize)
        if buffer is not None or ahead:
            return buffer
        self.give_up_ahead()
        self.lane.drain()  # what is written gives its own back
        return self.buffer_beyond(slice_)

    def buffer_beyond(self, slice_: FileSlice) -> Buffer:
        """A buffer, though there may be enough already."""
        buffer = self.buffers.take(slice_.room, slice_.dtype.itemsize, exceed=True)
        assert buffer is not None
        return buffer

    def give_up_ahead(self) -> None:
        """Let go of what was read ahead and not used."""
        for slice_ in self.ahead:
            slice_.give_up()
        self.ahead.clear()

    # What has gone wrong -------------------------------------------------------------------------

    def lose(self, why: str) -> None:
        """Some slice cannot be read."""
        if not self.lost:
            self.lost = (
                f"parameters that wait in {self.directory} cannot be read: {why}. Go on from the last "
                "checkpoint, with a disk that can be read"
            )
            log.error("%s", self.lost)

    def fail(self, error: OSError) -> None:
        """Some slice cannot be written."""
        self.failure = (
            f"parameters cannot be written to {self.directory}: {error}. They stay in memory, and the step "
            "was finished: save a checkpoint now, after zero_grad, and go on from it with a disk that can be "
            "written"
        )
        log.error("%s", self.failure)
