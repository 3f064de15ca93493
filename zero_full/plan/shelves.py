"""What stands in, in a plan, for where slices of parameters wait. See `offload/param_store.py`."""

import torch
from torch import Tensor

from zero_full.kernels.files import PAGE
from zero_full.offload import BlockTier, HostTier, Shelf, Slice, Tier
from zero_full.offload.arena import Places
from zero_full.offload.param_store import ShelfBehindMemory
from zero_full.offload.spill_file import whole_pages
from zero_full.plan.watch import Watch


def pretended_shelf(tier: Tier, planned: torch.device, watch: Watch) -> Shelf:
    """What keeps slices of a model on this device."""
    if not isinstance(tier, HostTier):
        return Shelf()
    # On a CPU host memory is the device's.
    on_host = Shelf() if planned.type == "cpu" else PretendedShelf(tier.locks(planned))
    return PretendedFileShelf(tier, on_host, watch, planned) if isinstance(tier, BlockTier) else on_host


def page_locked(shelf: Shelf) -> int:
    """Bytes of slices and buffers that are."""
    if isinstance(shelf, PretendedFileShelf):
        return page_locked(shelf.in_memory) + (shelf.buffers if shelf.locks else 0)
    return shelf.locked if isinstance(shelf, PretendedShelf) else 0


class PretendedSlice(Slice):
    """A slice in host memory: on the meta device, too."""

    apart, kind = True, "host"

    def fetch(self, device: torch.device) -> Tensor:
        """A copy, as if it were elsewhere."""
        return self.values.clone()


class PretendedShelf(Shelf):
    """Where such slices are."""

    apart = True

    def __init__(self, locks: bool) -> None:
        self.locks, self.locked = locks, 0  # bytes

    def put(self, values: Tensor) -> Slice:
        """No memory."""
        self.locked += Places([values.nbytes]).size if self.locks else 0
        return PretendedSlice(torch.empty_like(values))


class PretendedFileShelf(ShelfBehindMemory):
    """Slices in a file. It takes buffers as a run does, so that the most at a time is known."""

    apart = can_lose = True

    def __init__(self, tier: BlockTier, in_memory: Shelf, watch: Watch, planned: torch.device) -> None:
        super().__init__(tier.memory_numel, in_memory)
        self.reach = tier.buffer_numel
        self.watch, self.on_cpu, self.locks = watch, planned.type == "cpu", tier.locks(planned)
        self.disk = self.read = self.written = 0  # bytes
        self.used: list[PretendedFileSlice] = []  # what has a buffer now
        self.ahead: list[PretendedFileSlice] = []
        self.buffers = 0  # bytes in them, at the most

    def put(self, values: Tensor) -> Slice:
        """Room in the file."""
        made = PretendedFileSlice(self, torch.empty_like(values))
        self.disk += made.room
        return made

    def take(self, slice_: "PretendedFileSlice", ahead: bool = False) -> bool:
        """Give it a buffer; what is only read ahead gets none, if there are enough already."""
        if sum(each.numel for each in self.used) + slice_.numel > self.reach:
            if ahead:
                return False
            self.give_up_ahead()
        self.used.append(slice_)
        self.buffers = max(self.buffers, sum(each.room + PAGE for each in self.used))
        return True

    def give_up_ahead(self) -> None:
        """Let go of what was read ahead and not used."""
        for slice_ in self.ahead:
            self.used.remove(slice_)
        self.ahead.clear()


class PretendedFileSlice(PretendedSlice):
    """A slice in a file, which is not there."""

    kind = "disk"

    def __init__(self, shelf: PretendedFileShelf, values: Tensor) -> None:
        super().__init__(values)
        self.shelf, self.room = shelf, max(whole_pages(values.nbytes), PAGE)
        self.numel = self.room // values.itemsize

    def begin(self, ahead: bool = False) -> bool:
        """It takes a buffer."""
        if self not in self.shelf.used:
            if not self.shelf.take(self, ahead):
                return False
            if ahead:
                self.shelf.ahead.append(self)
        if not ahead and self in self.shelf.ahead:
            self.shelf.ahead.remove(self)
        return True

    def copy_to(self, place: Tensor) -> None:
        """It has been read, and the buffer is free again."""
        self._read()
        self.shelf.used.remove(self)
        super().copy_to(place)

    def _read(self) -> None:
        self.begin()
        self.shelf.read += self.room

    def fetch(self, device: torch.device) -> Tensor:
        """What has been read: on a CPU the buffer itself."""
        self._read()
        with self.shelf.watch.of(None if self.shelf.on_cpu else self.shelf.watch.kind):
            return super().fetch(device)

    def update(self, updated: Tensor) -> None:
        """The new values are written from a buffer."""
        if updated is not self.at_rest:
            self.begin()
            self.shelf.written += self.room
        if self in self.shelf.used:
            self.shelf.used.remove(self)
        super().update(updated)
