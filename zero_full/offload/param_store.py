"""Storage of this rank's parameter slices at stage 3, between their gathers.

    on the device    beside the model: a `ParamStore`
    on the host      page-locked if wanted: a `HostParamStore`
    in a file        prefetched before their use: `nvme_params.py`

[Note: slices at rest] `values` is a slice at rest as a tensor, wherever it is stored. So code that reads or
writes slices outside a pass (a checkpoint, a load, `GatheredParameters`) does not depend on the storage. A
gather copies the slice to its place in the gathered buffer, on the lane of the all-gather. After a step the
optimizer passes the new values to `update`.
"""

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
        """Prefetch the slice for a gather. Returns False if there is no room, which `optional` allows."""
        return True

    def copy_to(self, place: Tensor) -> None:
        """Copy the values into the gathered buffer, on the lane of the all-gather."""
        place.copy_(self.values)

    def fetch(self, device: torch.device) -> Tensor:
        """The values on the device where they are stepped."""
        return self.values.to(device)

    def update(self, updated: Tensor) -> None:
        """Store the values after a step. `updated` may be the tensor that was fetched."""
        if updated is not self.values:
            self.values.copy_(updated)


class HostParamSlice(ParamSlice):
    """A slice in host memory, which is copied to the device without waiting for it."""

    is_offloaded, kind = True, "host"

    def __init__(self, values: Tensor, arena: Arena) -> None:
        """`arena`: the memory of `values`."""
        self.at_rest, self.arena = values, arena
        self.copied: Any = None  # the event behind the last copy, which may be pending

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """The slice at rest, once the last copy from it is done."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None
        return self.at_rest

    def copy_to(self, place: Tensor) -> None:
        """Queue the copy on the current stream."""
        place.copy_(self.at_rest, non_blocking=True)
        if place.device.type != "cpu":
            self.copied = torch.accelerator.current_stream(place.device).record_event()


class ParamStore(Storage):
    """The store of slices on the model's device, and the base of the others."""

    is_offloaded = False  # whether slices are stored off the device
    can_fail = False  # whether `lost` may ever be set
    prefetch_numel = sys.maxsize  # elements of slices that may be prefetched at a time

    def of(self, numel: int) -> "ParamStore":
        """The store for a slice of `numel` elements. Call it once for each slice."""
        return self

    def kinds(self, numels: Sequence[int]) -> list[str]:
        """The names in reports of slices of these sizes, in this order."""
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
        """`in_memory`: the store of the first slices, up to `memory_numel` elements together."""
        self.left, self.in_memory = memory_numel, in_memory

    def of(self, numel: int) -> ParamStore:
        """The store in memory until it is full, then this one."""
        if numel > self.left:
            return self
        self.left -= numel
        return self.in_memory

    def kinds(self, numels: Sequence[int]) -> list[str]:
        """The names in reports: "disk" for slices that do not fit in memory."""
        left, found = self.left, []
        for numel, in_memory in zip(numels, self.in_memory.kinds(numels), strict=True):
            found.append("disk" if numel > left else in_memory)
            left -= 0 if numel > left else numel
        return found


class HostParamStore(ParamStore):
    """The store in host memory, for a model on an accelerator."""

    is_offloaded = True

    def __init__(self, cudart: Any = None) -> None:
        """`cudart`: the CUDA runtime that page-locks each slice, at its exact size; None: pageable."""
        self.cudart = cudart
        self.arenas: weakref.WeakSet[Arena] = weakref.WeakSet()

    def kinds(self, numels: Sequence[int]) -> list[str]:
        """The names in reports: "host" for all slices."""
        return [HostParamSlice.kind] * len(numels)

    def add(self, values: Tensor) -> ParamSlice:
        """Store a copy on the host."""
        slice_ = self.add_zeros(values.numel(), values.dtype, values.device)
        slice_.values.copy_(values)
        return slice_

    def add_zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> ParamSlice:
        """Store zeros on the host."""
        arena = Arena([numel * dtype.itemsize], self.cudart)
        self.arenas.add(arena)
        values = arena.take(numel, dtype)
        return HostParamSlice(torch.zeros(0, dtype=dtype) if values is None else values, arena)

    def close(self) -> None:
        """End the page-locking. Slices stay valid while they are referenced."""
        for arena in self.arenas:
            arena.close()
