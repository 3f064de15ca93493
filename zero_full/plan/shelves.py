"""Simulated parameter stores for a plan, in place of those in `offload/param_store.py`."""

import torch
from torch import Tensor

from zero_full.kernels.files import PAGE
from zero_full.offload import BlockTier, HostTier, Shelf, Slice, Tier
from zero_full.offload.arena import Places
from zero_full.offload.param_store import ShelfBehindMemory
from zero_full.offload.spill_file import whole_pages
from zero_full.plan.watch import Watch


def pretended_shelf(tier: Tier, planned: torch.device, watch: Watch) -> Shelf:
    """Return the simulated parameter store of a tier. `planned` is the device of the real run."""
    if not isinstance(tier, HostTier):
        return Shelf()
    # On a CPU, host memory is device memory.
    on_host = Shelf() if planned.type == "cpu" else PretendedShelf(tier.locks(planned))
    return PretendedFileShelf(tier, on_host, watch, planned) if isinstance(tier, BlockTier) else on_host


def page_locked(shelf: Shelf) -> int:
    """Return the page-locked bytes of slices and staging buffers."""
    if isinstance(shelf, PretendedFileShelf):
        return page_locked(shelf.in_memory) + (shelf.buffers if shelf.locks else 0)
    return shelf.locked if isinstance(shelf, PretendedShelf) else 0


class PretendedSlice(Slice):
    """A parameter slice in simulated host memory, on the meta device."""

    apart, kind = True, "host"

    def fetch(self, device: torch.device) -> Tensor:
        """Return a copy, as a host-to-device copy would."""
        return self.values.clone()


class PretendedShelf(Shelf):
    """Simulated store of parameter slices in host memory."""

    apart = True

    def __init__(self, locks: bool) -> None:
        self.locks, self.locked = locks, 0  # bytes

    def put(self, values: Tensor) -> Slice:
        """Store a slice without allocating memory."""
        self.locked += Places([values.nbytes]).size if self.locks else 0
        return PretendedSlice(torch.empty_like(values))


class PretendedFileShelf(ShelfBehindMemory):
    """Simulated store of parameter slices in a spill file.

    It takes staging buffers in the same order as a real run, so that their peak is known.
    """

    apart = can_lose = True

    def __init__(self, tier: BlockTier, in_memory: Shelf, watch: Watch, planned: torch.device) -> None:
        super().__init__(tier.memory_numel, in_memory)
        self.reach = tier.buffer_numel
        self.watch, self.on_cpu, self.locks = watch, planned.type == "cpu", tier.locks(planned)
        self.disk = self.read = self.written = 0  # bytes
        self.used: list[PretendedFileSlice] = []  # slices that have a staging buffer
        self.ahead: list[PretendedFileSlice] = []  # prefetched slices, not used yet
        self.buffers = 0  # peak bytes of staging buffers

    def put(self, values: Tensor) -> Slice:
        """Store a slice in the file."""
        made = PretendedFileSlice(self, torch.empty_like(values))
        self.disk += made.room
        return made

    def take(self, slice_: "PretendedFileSlice", ahead: bool = False) -> bool:
        """Take a staging buffer for a slice. Returns False for a prefetch if the buffers are in use."""
        if sum(each.numel for each in self.used) + slice_.numel > self.reach:
            if ahead:
                return False
            self.give_up_ahead()
        self.used.append(slice_)
        self.buffers = max(self.buffers, sum(each.room + PAGE for each in self.used))
        return True

    def give_up_ahead(self) -> None:
        """Release the buffers of prefetched slices that were not used."""
        for slice_ in self.ahead:
            self.used.remove(slice_)
        self.ahead.clear()


class PretendedFileSlice(PretendedSlice):
    """A parameter slice in a simulated spill file."""

    kind = "disk"

    def __init__(self, shelf: PretendedFileShelf, values: Tensor) -> None:
        super().__init__(values)
        self.shelf, self.room = shelf, max(whole_pages(values.nbytes), PAGE)
        self.numel = self.room // values.itemsize

    def begin(self, ahead: bool = False) -> bool:
        """Begin to read: take a staging buffer. `ahead`: as a prefetch. Returns False without a buffer."""
        if self not in self.shelf.used:
            if not self.shelf.take(self, ahead):
                return False
            if ahead:
                self.shelf.ahead.append(self)
        if not ahead and self in self.shelf.ahead:
            self.shelf.ahead.remove(self)
        return True

    def copy_to(self, place: Tensor) -> None:
        """Read the slice, copy it, and release the buffer."""
        self._read()
        self.shelf.used.remove(self)
        super().copy_to(place)

    def _read(self) -> None:
        self.begin()
        self.shelf.read += self.room

    def fetch(self, device: torch.device) -> Tensor:
        """Read the slice and return it on the device: on a CPU, the staging buffer itself."""
        self._read()
        with self.shelf.watch.of(None if self.shelf.on_cpu else self.shelf.watch.kind):
            return super().fetch(device)

    def update(self, updated: Tensor) -> None:
        """Write new values to the file from a staging buffer."""
        if updated is not self.values:
            self.begin()
            self.shelf.written += self.room
        if self in self.shelf.used:
            self.shelf.used.remove(self)
        super().update(updated)
