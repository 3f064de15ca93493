"""Where stage 3 keeps this rank's slices of parameters that nobody uses at the moment.

    beside the model    in memory of its device: a `Shelf`
    on the host         page-locked if wanted: a `HostShelf`
    in a file           read ahead of their use: `nvme_params.py`

[Note: slices at rest] A slice at rest can be seen as a tensor, `values`, wherever it is. So whoever reads or
writes it outside a pass (a checkpoint, a load, `GatheredParameters`) needs to know nothing of all this. A
gather copies the slice to its place in the gathered buffer, on the lane on which the collective follows.
After a step the optimizer hands over the new values.
"""

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero_full.offload.arena import Arena


class Slice:
    """One rank's part of a flat buffer, in memory of the model's device. See [Note: slices at rest]."""

    apart = False  # whether it lies elsewhere than what it is gathered to
    kind = "parameters"  # under which name its bytes are told

    def __init__(self, values: Tensor) -> None:
        self.at_rest = values

    @property
    def values(self) -> Tensor:
        """The slice, to be read or written now."""
        return self.at_rest

    def begin(self, ahead: bool = False) -> bool:
        """It is gathered next. Returns whether it can come near now; `ahead`: nobody waits for it yet."""
        return True

    def copy_to(self, place: Tensor) -> None:
        """Put the values into the gathered buffer: on the lane that gathers."""
        place.copy_(self.at_rest)

    def fetch(self, device: torch.device) -> Tensor:
        """The values on the device where they are stepped."""
        return self.values.to(device)

    def update(self, updated: Tensor) -> None:
        """After a step: the new values, which may be what was fetched."""
        if updated is not self.at_rest:
            self.values.copy_(updated)


class SliceOnHost(Slice):
    """A slice in host memory, which is copied to the device without waiting for it."""

    apart, kind = True, "host"

    def __init__(self, values: Tensor, arena: Arena) -> None:
        """`arena`: of which the values are all."""
        super().__init__(values)
        self.arena = arena  # whose memory is page-locked for as long
        self.copied: Any = None  # the event behind the last copy, which may still be under way

    @property
    def values(self) -> Tensor:
        """The slice, from which nothing is being copied."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None
        return self.at_rest

    def copy_to(self, place: Tensor) -> None:
        """Queue the copy on the current stream."""
        place.copy_(self.at_rest, non_blocking=True)
        if place.device.type != "cpu":
            self.copied = torch.accelerator.current_stream(place.device).record_event()


class Shelf:
    """Slices stay beside the model."""

    apart = False  # whether slices wait elsewhere than beside the model
    can_lose = False  # whether `lost` may ever say something
    reach = sys.maxsize  # elements of slices that may come near at a time
    place = ""  # which disk of this host it is on
    advice = ""  # in words, what whoever has chosen it should know about it
    failure = ""  # in words, why no further step can be taken
    lost = ""  # in words, which parameters are gone

    def of(self, numel: int) -> "Shelf":
        """The one that takes a slice of so many elements; ask once for each."""
        return self

    def kinds(self, numels: Sequence[int]) -> list[str]:
        """Under which names the bytes of slices of so many elements will be told, in this order."""
        return [Slice.kind] * len(numels)

    def moved(self) -> dict[str, int]:
        """Bytes moved so far between memory and what is farther away, by which way."""
        return {}

    def put(self, values: Tensor) -> Slice:
        """A slice with a copy of these values."""
        return Slice(values.clone())

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device) -> Slice:
        """A slice of zeros."""
        return Slice(torch.zeros(numel, dtype=dtype, device=device))

    def give_up_ahead(self) -> None:
        """Let go of what was read ahead and not used."""

    def refuse_too_little(self, need: int) -> None:
        """OSError if there is no room for so many bytes, of all ranks of this host in the same `place`."""

    def close(self) -> None:
        """Let go of files and threads."""


class ShelfBehindMemory(Shelf):
    """What memory does not take waits farther away: on a disk."""

    def __init__(self, memory_numel: int, in_memory: Shelf) -> None:
        """`in_memory`: what takes the first slices, with so many elements together."""
        self.left, self.in_memory = memory_numel, in_memory

    def of(self, numel: int) -> Shelf:
        """Memory takes the first ones."""
        if numel > self.left:
            return self
        self.left -= numel
        return self.in_memory

    def kinds(self, numels: Sequence[int]) -> list[str]:
        """What memory does not take is on the disk."""
        left, found = self.left, []
        for numel, in_memory in zip(numels, self.in_memory.kinds(numels), strict=True):
            found.append("disk" if numel > left else in_memory)
            left -= 0 if numel > left else numel
        return found


class HostShelf(Shelf):
    """Slices wait in the host's memory: for a model on an accelerator."""

    apart = True

    def __init__(self, cudart: Any = None) -> None:
        """`cudart`: by what each slice is page-locked, in memory of just its size; None: it is not."""
        self.cudart = cudart
        self.arenas: weakref.WeakSet[Arena] = weakref.WeakSet()

    def kinds(self, numels: Sequence[int]) -> list[str]:
        """All are on the host."""
        return [SliceOnHost.kind] * len(numels)

    def put(self, values: Tensor) -> Slice:
        """A copy on the host."""
        slice_ = self.reserve(values.numel(), values.dtype, values.device)
        slice_.values.copy_(values)
        return slice_

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device) -> Slice:
        """Zeros on the host."""
        arena = Arena([numel * dtype.itemsize], self.cudart)
        self.arenas.add(arena)
        values = arena.take(numel, dtype)
        return SliceOnHost(torch.zeros(0, dtype=dtype) if values is None else values, arena)

    def close(self) -> None:
        """Nothing is page-locked any more. Slices stay what they are as long as somebody has them."""
        for arena in self.arenas:
            arena.close()
