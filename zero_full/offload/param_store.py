"""Storage of this rank's parameter slices at stage 3, between their gathers.

    on the device    beside the model: a `ParamStore`
    on the host      page-locked if wanted: a `HostParamStore`
    in a file        prefetched before their use: `nvme_params.py`

[Note: slices at rest] `values` is a slice at rest as a tensor, wherever it is stored. So code that reads or
writes slices outside a pass (a checkpoint, a load, `GatheredParameters`) does not depend on the storage. A
gather copies the slice to its place in the gathered buffer, on the lane of the all-gather. After a step the
optimizer passes the new values to `update`.

[Note: uploads] On an accelerator, copies from host memory into gathered buffers have a stream of their own.
There a copy waits until the buffer's memory is free, and the all-gather waits for the copy. So the copies of
units that are prefetched do not wait for the all-gathers of units before them. If masters are on the device,
a step copies slices in both directions, and the host waits for neither.
"""

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero_full.comm.lane import current_stream
from zero_full.offload.arena import Arena
from zero_full.offload.storage import Storage


class ParamSlice:
    """One rank's slice of a flat buffer, in device memory. See [Note: slices at rest]."""

    is_offloaded = False  # whether it is stored off the device
    kind = "parameters"  # the name of its bytes in reports

    values: Tensor  # the slice at rest, to be read or written now

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def start_read(self, optional: bool = False) -> bool:
        """Begin to read the slice for a gather. Returns False if it is `optional` and no buffer is free."""
        return True

    def copy_to(self, place: Tensor, owner_stream: Any = None) -> None:
        """Copy the values into the gathered buffer, on the lane of the all-gather.

        `owner_stream`: the stream that the buffer's memory belongs to; None on a CPU.
        """
        place.copy_(self.values)

    def fetch(self, device: torch.device) -> Tensor:
        """Return the values on the device where they are stepped."""
        return self.values.to(device)

    def update(self, updated: Tensor) -> None:
        """Store the values after a step. `updated` may be the tensor that was fetched."""
        if updated is not self.values:
            self.values.copy_(updated)


class Uploads:
    """The streams of copies into gathered buffers, one for each device. See [Note: uploads]."""

    def __init__(self) -> None:
        self.streams: dict[torch.device, Any] = {}

    def copy(self, place: Tensor, values: Tensor, owner_stream: Any, after: Any = None) -> Any:
        """Queue a copy from host memory, make the current stream wait for it, and return the event behind it.

        `owner_stream`: the stream that the memory of `place` belongs to. `after`: an event before the copy.
        """
        current = current_stream(place.device)
        if current is None:
            place.copy_(values)
            return None
        if place.device not in self.streams:
            self.streams[place.device] = torch.Stream(place.device)
        stream = self.streams[place.device]
        stream.wait_stream(current if owner_stream is None else owner_stream)
        if after is not None:
            stream.wait_event(after)
        with stream:
            place.copy_(values, non_blocking=True)
        done = stream.record_event()
        current.wait_event(done)
        return done


class HostParamSlice(ParamSlice):
    """A slice in host memory, which is copied to and from the device without waiting for it."""

    is_offloaded, kind = True, "host"

    def __init__(self, values: Tensor, arena: Arena, uploads: Uploads) -> None:
        """`arena` has the memory of `values`."""
        self.at_rest, self.arena, self.uploads = values, arena, uploads
        self.copied: Any = None  # the event behind the last copy, which may be pending

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """The slice at rest, once the last copy from or to it is done."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None
        return self.at_rest

    def copy_to(self, place: Tensor, owner_stream: Any = None) -> None:
        """Queue the copy on the stream of uploads, behind the last copy."""
        self.copied = self.uploads.copy(place, self.at_rest, owner_stream, self.copied)

    def fetch(self, device: torch.device) -> Tensor:
        """Return the values on the device where they are stepped, by a copy on the current stream."""
        stream = current_stream(device)
        if stream is None:
            return self.values.to(device)
        self._follow(stream)
        fetched = self.at_rest.to(device, non_blocking=True, copy=True)
        self.copied = stream.record_event()
        return fetched

    def update(self, updated: Tensor) -> None:
        """Store the values after a step, from a device by a copy on the current stream."""
        stream = current_stream(updated.device)
        if stream is None:
            super().update(updated)
            return
        self._follow(stream)
        self.at_rest.copy_(updated, non_blocking=True)
        self.copied = stream.record_event()

    def _follow(self, stream: Any) -> None:
        """Make a stream wait for the last copy."""
        if self.copied is not None:
            stream.wait_event(self.copied)


class ParamStore(Storage):
    """The store of slices on the model's device, and the base of the others."""

    is_offloaded = False  # whether slices are stored off the device
    can_fail = False  # whether `lost` may ever be set
    prefetch_numel = sys.maxsize  # elements of slices that may be prefetched at a time

    def of(self, numel: int) -> "ParamStore":
        """Return the store for a slice of `numel` elements. Call it once for each slice."""
        return self

    def kinds(self, numels: Sequence[int]) -> list[str]:
        """Return the names by which reports call slices of these sizes, in this order."""
        return [ParamSlice.kind] * len(numels)

    def add(self, values: Tensor) -> ParamSlice:
        """Store a copy of these values."""
        return ParamSlice(values.clone())

    def add_zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> ParamSlice:
        """Store zeros."""
        return ParamSlice(torch.zeros(numel, dtype=dtype, device=device))

    def cancel_prefetches(self) -> None:
        """Drop prefetched slices that were not used."""


class MemoryFirstStore(ParamStore):
    """A store that keeps the first slices in memory and the others on a disk."""

    def __init__(self, memory_numel: int, in_memory: ParamStore) -> None:
        """`in_memory` stores the first slices, up to `memory_numel` elements together."""
        self.left, self.in_memory = memory_numel, in_memory

    def of(self, numel: int) -> ParamStore:
        """Return the store in memory until it is full, then the one on the disk."""
        if numel > self.left:
            return self
        self.left -= numel
        return self.in_memory

    def kinds(self, numels: Sequence[int]) -> list[str]:
        """Return the names by which reports call slices: "disk" for those that do not fit in memory."""
        left, found = self.left, []
        for numel, in_memory in zip(numels, self.in_memory.kinds(numels), strict=True):
            found.append("disk" if numel > left else in_memory)
            left -= 0 if numel > left else numel
        return found


class HostParamStore(ParamStore):
    """The store in host memory, for a model on an accelerator."""

    is_offloaded = True

    def __init__(self, locker: Any = None) -> None:
        """`locker` (from `page_locker()`) page-locks each slice, at its exact size; None: pageable."""
        self.locker, self.uploads = locker, Uploads()
        self.arenas: weakref.WeakSet[Arena] = weakref.WeakSet()

    def kinds(self, numels: Sequence[int]) -> list[str]:
        """Return the names by which reports call slices: "host" for all."""
        return [HostParamSlice.kind] * len(numels)

    def add(self, values: Tensor) -> ParamSlice:
        """Store a copy on the host."""
        slice_ = self.add_zeros(values.numel(), values.dtype, values.device)
        slice_.values.copy_(values)
        return slice_

    def add_zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> ParamSlice:
        """Store zeros on the host."""
        arena = Arena([numel * dtype.itemsize], self.locker)
        self.arenas.add(arena)
        values = arena.take(numel, dtype)
        return HostParamSlice(torch.zeros(0, dtype=dtype) if values is None else values, arena, self.uploads)

    def close(self) -> None:
        """End the page-locking. Slices stay valid while they are referenced."""
        for arena in self.arenas:
            arena.close()
