"""Fake offload for a plan: tiers and parameter stores on the meta device, which count bytes.

They replace those of `zero_full.offload`, and allocate neither host memory nor a spill file.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from zero_full._compat import identity_of
from zero_full.comm.lane import Done, InlineLane, Pending
from zero_full.kernels.files import PAGE
from zero_full.offload import BlockTier, CopyThreads, HostTier, ParamSlice, ParamStore, Tier
from zero_full.offload.arena import Places
from zero_full.offload.block_memory import memory_for
from zero_full.offload.nvme_state import bytes_of_block
from zero_full.offload.param_store import MemoryFirstStore
from zero_full.offload.spill_file import whole_pages
from zero_full.plan.memory_tracker import MemoryTracker

META = torch.device("meta")


def fake_tier(tier: Tier, planned: torch.device, tracker: MemoryTracker) -> Tier:
    """Return the fake of a configuration's tier. `planned` is the device of the planned run."""
    if isinstance(tier, BlockTier):
        return FakeBlockTier(**vars(tier), planned=planned, tracker=tracker)
    if isinstance(tier, HostTier):
        return FakeHostTier(**vars(tier), planned=planned, tracker=tracker)
    return tier


@dataclass(frozen=True)
class FakeHostTier(HostTier):
    """Fake host tier. Its tensors are on the meta device, and are not counted as device memory."""

    planned: torch.device = field(kw_only=True)
    tracker: MemoryTracker = field(kw_only=True)

    def open(self, sizes: Sequence[int], device: torch.device) -> Tier:
        """Return the tier without delayed updates, which step at another time than `step`."""
        return replace(self, delay_after=None)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make a tensor without memory."""
        with self.tracker.counting(None):
            return torch.empty(numel, dtype=dtype, device=META)

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return a copy, as a device-to-host copy would."""
        with self.tracker.counting(None):
            return tensor.clone()

    def copy_threads(self, device: torch.device, sums: bool) -> CopyThreads | None:
        """Return the host-device copies of the planned device, which complete immediately."""
        if self.planned.type == "cpu":
            return None
        return CopyThreads(
            self.allocate, device, (FakeCopier(), FakeCopier()), sums, lambda name: InlineLane()
        )

    def param_store(self, device: torch.device) -> ParamStore:
        """Return the fake parameter store; for a plan on a CPU, the model's own memory."""
        return ParamStore() if self.planned.type == "cpu" else FakeHostParamStore(self.locks(self.planned))


@dataclass(frozen=True)
class FakeBlockTier(FakeHostTier, BlockTier):
    """Fake NVMe tier: the optimizer state, or parameters, in a spill file."""

    # Bytes of each block of each part in the last step, and the elements of a block.
    blocks: list[list[int]] = field(default_factory=list)
    numels: list[int] = field(default_factory=list)
    moves = True

    def open(self, sizes: Sequence[int], device: torch.device) -> Tier:
        """Return the tier itself."""
        return self

    def load_parts(
        self, parts: Sequence[Sequence[Any]], tensors_of: Callable[[Any], list[Tensor]]
    ) -> Generator[Sequence[Any]]:
        """Yield each part, and record the sizes of its blocks in the file after the step."""
        self.blocks.clear()
        self.numels.clear()
        for part in parts:
            yield part
            found = [tensors_of(group) for group in part]
            self.blocks.append([bytes_of_block(_sizes(tensors)) for tensors in found])
            self.numels.extend(tensors[0].numel() for tensors in found)

    @property
    def in_memory(self) -> int:
        """Bytes of memory for state, during and between steps."""
        parts = [sum(part) for part in self.blocks]
        return memory_for(sum(parts), sum(self.numels), max(parts, default=0), self.state_numel)

    def param_store(self, device: torch.device) -> ParamStore:
        """Return the fake parameter store in a spill file."""
        return FakeFileParamStore(self, super().param_store(device))


def _sizes(tensors: Sequence[Tensor]) -> list[int]:
    """Return the bytes of the first tensor, and of the others unless they are views of it."""
    first, *others = tensors
    mine = identity_of(first.untyped_storage())
    return [first.nbytes, *(t.nbytes for t in others if identity_of(t.untyped_storage()) != mine)]


class FakeCopier:
    """Fake copier, which copies nothing."""

    def mark(self) -> None:
        """Do nothing: no copy is queued."""

    def copy(self, target: Tensor, source: Tensor, after: None) -> Pending:
        """Do nothing: the tensors have no values."""
        return Done()


class FakeSlice(ParamSlice):
    """A parameter slice in fake host memory, on the meta device."""

    is_offloaded, kind = True, "host"

    def fetch(self, device: torch.device) -> Tensor:
        """Return a copy, as a host-to-device copy would."""
        return self.values.clone()


class FakeHostParamStore(ParamStore):
    """Fake store of parameter slices in host memory."""

    is_offloaded = True

    def __init__(self, locks: bool) -> None:
        self.locks, self.locked = locks, 0  # page-locked bytes

    def add(self, values: Tensor) -> ParamSlice:
        """Store a slice without allocating memory."""
        self.locked += Places([values.nbytes]).size if self.locks else 0
        return FakeSlice(torch.empty_like(values))


class FakeFileParamStore(MemoryFirstStore):
    """Fake store of parameter slices in a spill file.

    It takes staging buffers in the same order as a real run, so that their peak is known.
    """

    is_offloaded = can_fail = True

    def __init__(self, tier: FakeBlockTier, in_memory: ParamStore) -> None:
        super().__init__(tier.memory_numel, in_memory)
        self.prefetch_numel, self.tracker, self.planned = tier.buffer_numel, tier.tracker, tier.planned
        self.locks = tier.locks(tier.planned)  # staging buffers are page-locked
        self.disk = self.read = self.written = 0  # bytes
        self.used: list[FakeFileSlice] = []  # slices that have a staging buffer
        self.ahead: list[FakeFileSlice] = []  # prefetched slices, not used yet
        self.buffers = 0  # peak bytes of staging buffers

    @property
    def locked(self) -> int:
        """Page-locked bytes: staging buffers, and slices in host memory."""
        return getattr(self.in_memory, "locked", 0) + (self.buffers if self.locks else 0)

    def add(self, values: Tensor) -> ParamSlice:
        """Store a slice in the file."""
        made = FakeFileSlice(self, torch.empty_like(values))
        self.disk += made.room
        return made

    def take(self, slice_: "FakeFileSlice", ahead: bool) -> bool:
        """Take a staging buffer for a slice. Returns False for a prefetch if the buffers are in use."""
        if sum(each.numel for each in self.used) + slice_.numel > self.prefetch_numel:
            if ahead:
                return False
            self.cancel_prefetches()
        self.used.append(slice_)
        self.buffers = max(self.buffers, sum(each.room for each in self.used))
        return True

    def cancel_prefetches(self) -> None:
        """Release the buffers of prefetched slices that were not used."""
        for slice_ in self.ahead:
            self.used.remove(slice_)
        self.ahead.clear()


class FakeFileSlice(FakeSlice):
    """A parameter slice in a fake spill file."""

    kind = "disk"

    def __init__(self, param_store: FakeFileParamStore, values: Tensor) -> None:
        super().__init__(values)
        self.param_store, self.room = param_store, max(whole_pages(values.nbytes), PAGE)
        self.numel = self.room // values.itemsize

    def start_read(self, optional: bool = False) -> bool:
        """Take a staging buffer. `optional`: it is a prefetch. Returns False without a buffer."""
        if self not in self.param_store.used:
            if not self.param_store.take(self, optional):
                return False
            if optional:
                self.param_store.ahead.append(self)
        if not optional and self in self.param_store.ahead:
            self.param_store.ahead.remove(self)
        return True

    def copy_to(self, place: Tensor, owner_stream: Any = None) -> None:
        """Read the slice, copy it, and release the buffer."""
        self._read()
        self.param_store.used.remove(self)
        super().copy_to(place)

    def _read(self) -> None:
        self.start_read()
        self.param_store.read += self.room

    def fetch(self, device: torch.device) -> Tensor:
        """Read the slice and return it on the device: on a CPU, the staging buffer itself."""
        self._read()
        tracker = self.param_store.tracker
        with tracker.counting(None if self.param_store.planned.type == "cpu" else tracker.kind):
            return super().fetch(device)

    def update(self, updated: Tensor) -> None:
        """Write new values to the file from a staging buffer."""
        if updated is not self.values:
            self.start_read()
            self.param_store.written += self.room
        if self in self.param_store.used:
            self.param_store.used.remove(self)
        super().update(updated)
