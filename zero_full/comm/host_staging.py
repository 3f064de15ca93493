"""Host staging: collectives for ranks that share an accelerator, through pinned host memory.

NCCL fails with two ranks on one device. Here slices are copied to the host, exchanged as those of CPU ranks
are (`shared_memory.py`, else `transport.py`), and copied back. The host waits for every copy, so a collective
is complete when its call returns, and overlaps nothing. Meanwhile the device works for the other ranks.

A collective larger than the staging buffer is made in pieces, which bounds pinned memory.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from zero_full.comm.shared_memory import SharedMemory
from zero_full.comm.transport import NO_CALL, Exchange, Splits, own_slice

STAGING = 32 * 2**20  # bytes of the staging buffer, at most
HALF = 32 * 2**20  # bytes of half a window in shared memory: large pieces need few barriers
ALIGNMENT = 64  # bytes: where the fields of the staging buffer begin


class StagedPart(NamedTuple):
    """A part of a tensor on the device, to be copied to the host, from the host, or both."""

    tensor: Tensor
    to_host: bool
    to_device: bool


class HostStaging:
    """Transport for ranks with tensors on a shared accelerator.

    `inner`: the transport for host memory, whose process group has no other user. `staging`: the most bytes
    of the staging buffer.
    """

    name = "host staging"
    call = NO_CALL

    def __init__(self, inner: SharedMemory | Exchange, staging: int = STAGING) -> None:
        self.inner, self.staging = inner, staging
        self.rank, self.size = inner.rank, inner.size
        self.gather_objects, self.awaited_by = inner.gather_objects, inner.awaited_by
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.failure = ""  # why an earlier collective failed

    def reduce_scatter(self, whole: Tensor, out: Tensor, divisor: float) -> None:
        """Copy pieces of all slices to the host, and pieces of the sum back."""
        slices = [own_slice(whole, rank, self.size) for rank in range(self.size)]
        step = self._step(self.size * whole.element_size() + out.element_size(), fields=2)
        for low in range(0, out.numel(), step):
            sent = [StagedPart(each[low : low + step], True, False) for each in slices]
            summed = [StagedPart(out[low : low + step], False, True)]
            self._stage(partial(self.inner.reduce_scatter, divisor=divisor), sent, summed)

    def all_gather(self, whole: Tensor) -> None:
        """Copy pieces of this rank's slice to the host, and pieces of the others' back."""
        slices = [own_slice(whole, rank, self.size) for rank in range(self.size)]
        step = self._step(self.size * whole.element_size())
        for low in range(0, slices[0].numel(), step):
            parts = [
                StagedPart(each[low : low + step], rank == self.rank, rank != self.rank)
                for rank, each in enumerate(slices)
            ]
            self._stage(self.inner.all_gather, parts)

    def all_reduce(self, whole: Tensor, divisor: float) -> None:
        """Copy pieces to the host and back. Their size is a multiple of the group's."""
        step = self._step(self.size * whole.element_size()) * self.size
        for piece in _pieces(whole, step):
            self._stage(partial(self.inner.all_reduce, divisor=divisor), [StagedPart(piece, True, True)])

    def sum_numbers(self, numbers: Tensor) -> None:
        """Copy pieces to the host and back."""
        for piece in _pieces(numbers.view(-1), self._step(numbers.element_size())):
            self._stage(self.inner.sum_numbers, [StagedPart(piece, True, True)])

    def broadcast(self, tensor: Tensor) -> None:
        """Copy pieces to the host on the first rank, and back on the others."""
        is_first = self.rank == 0
        for piece in _pieces(tensor.view(-1), self._step(tensor.element_size())):
            self._stage(self.inner.broadcast, [StagedPart(piece, is_first, not is_first)])

    def all_to_all(self, sent: Tensor, received: Tensor, splits: Splits) -> None:
        """Copy pieces of the parts for all ranks to the host, and pieces of the parts from all ranks back.

        A part that is shorter than the longest has no elements in the last pieces.
        """
        theirs, mine = sent.split(list(splits.sent)), received.split(list(splits.received))
        step = self._step(2 * self.size * sent.element_size(), fields=2)
        for low in range(0, splits.most, step):
            leaving = [StagedPart(part[low : low + step], True, False) for part in theirs]
            coming = [StagedPart(part[low : low + step], False, True) for part in mine]
            numels = [[part.tensor.numel() for part in parts] for parts in (leaving, coming)]
            of_piece = Splits(numels[0], numels[1], min(step, splits.most - low))
            self._stage(partial(self.inner.all_to_all, splits=of_piece), leaving, coming)

    def _step(self, size: int, fields: int = 1) -> int:
        """Return the elements per slice of one piece, if one element of each slice takes `size` bytes."""
        return max(1, (self.staging - fields * ALIGNMENT) // size)

    def _stage(self, exchange: Callable[..., object], *fields: Sequence[StagedPart]) -> None:
        """Copy parts to the host, pass one flat tensor for each field to `exchange`, and copy parts back."""
        if self.failure:  # other ranks may still be in the middle of that collective
            raise RuntimeError(f"an earlier collective of this group failed: {self.failure}. Restart the run")
        self.inner.call = self.call
        try:
            with torch.no_grad():
                flats, copies = self._laid_out(fields)
                for place, part in copies:
                    if part.to_host:
                        place.copy_(part.tensor)  # waits for the current stream
                exchange(*flats)
                for place, part in copies:
                    if part.to_device:
                        part.tensor.copy_(place)
        except BaseException as error:
            self.failure = str(error) or type(error).__name__
            raise

    def _laid_out(
        self, fields: Sequence[Sequence[StagedPart]]
    ) -> tuple[list[Tensor], list[tuple[Tensor, StagedPart]]]:
        """Return a flat tensor of the staging buffer for each field, and the place of each part in it."""
        starts, ends = [], [0]
        for parts in fields:
            starts.append(-(-ends[-1] // ALIGNMENT) * ALIGNMENT)
            ends.append(starts[-1] + sum(part.tensor.nbytes for part in parts))
        if ends[-1] > self.buffer.numel():
            size = 1 << (ends[-1] - 1).bit_length()  # as torch's allocator of pinned memory rounds it
            is_pinned = not fields[0][0].tensor.is_cpu
            self.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
        flats, copies = [], list[tuple[Tensor, StagedPart]]()
        for start, end, parts in zip(starts, ends[1:], fields, strict=True):
            flats.append(self.buffer[start:end].view(parts[0].tensor.dtype))
            places = flats[-1].split([part.tensor.numel() for part in parts])
            copies += zip(places, parts, strict=True)
        return flats, copies


def _pieces(flat: Tensor, step: int) -> list[Tensor]:
    return [flat[low : low + step] for low in range(0, flat.numel(), step)]  # none of an empty tensor
