"""Which elements of this rank's slice of the parameters steps have changed, as one bit each.

Made only for runs that ask for it, by `engine.weights(delta=True)`. A step keeps the slice's old values while
it writes the new ones, and compares their bits. An element counts as changed until `clear`, also if a later
step changes it back.

Between steps user code and loads may write to the slice, too. So the column sums of the slice are noted after
each step. If they differ before the next step, or when the changes are read, every element counts as changed.
"""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from zero_full.shard.group.checksum import column_sums

CHUNK = 2**20  # elements that are compared at a time, so that temporary tensors stay in the cache
PACK = 0x0102040810204080  # as a factor of eight bytes of 0 or 1: their bits are then in the highest byte
HIGHEST = 7 if sys.byteorder == "little" else 0  # place in memory of an int64's highest byte
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # integers, by bytes


class ChangedElements:
    """The changed elements of one slice, whose size is a multiple of 8.

    `dtype`: values are rounded to it before they are compared. It is the dtype that is handed over.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.bits = torch.full((numel // 8,), 255, dtype=torch.uint8, device=device)
        self.sums: Tensor | None = None  # column sums of the slice after the last step; None: not known
        self.old: Tensor | None = None  # the rounded values before the running step
        self.is_kept = False  # `keep` was called in this step
        # Whether user code or a load has written to the slice since `clear`, as a bool on the device.
        self.written = torch.zeros((), dtype=torch.bool, device=device)

    def keep(self, overwritten: Tensor | None) -> None:
        """Keep the slice's values before a step overwrites them in place; None: the step does not."""
        self.is_kept = True
        if overwritten is not None:
            self.look(overwritten)
            self.old = overwritten.to(self.dtype, copy=True)

    def compare(self, old: Tensor | None, new: Tensor) -> None:
        """Add the elements that a step has changed. `old`: None if they were kept."""
        if old is not None:
            self.look(old)
        kept, self.old = self.old, None
        if (kept is None and old is None) or not self.is_kept:  # a step on another way: old values are gone
            self.bits.fill_(255)
        else:
            self._add(kept, old, new)
        self.is_kept, self.sums = False, column_sums(new)

    def _add(self, kept: Tensor | None, old: Tensor | None, new: Tensor) -> None:
        for low in range(0, new.numel(), CHUNK):
            after = _integers(new[low : low + CHUNK].to(self.dtype))
            if kept is not None:  # memory of our own, which is not read again
                differ = _integers(kept[low : low + CHUNK]).bitwise_xor_(after).bool()
            else:
                assert old is not None
                differ = (_integers(old[low : low + CHUNK].to(self.dtype)) ^ after).bool()
            packed = differ.view(torch.int64) * PACK
            self.bits[low // 8 : low // 8 + packed.numel()] |= packed.view(torch.uint8)[HIGHEST::8]

    def look(self, present: Tensor) -> None:
        """Count every element as changed if the slice is not as the last step has left it. No host waits."""
        if self.sums is not None:
            sums = column_sums(present)  # of another shape once a frozen parameter is trained
            differs = (sums != self.sums if sums.shape == self.sums.shape else torch.ones_like(sums)).any()
            self.written |= differs
            self.bits |= differs.to(torch.uint8) * 255

    def indices(self, start: int, stop: int) -> Iterator[Tensor]:
        """Yield the changed elements of a range, ascending, counted from its start, a multiple of 8."""
        for low in range(start, stop, CHUNK):
            high = min(stop, low + CHUNK)
            flags = _unpacked(self.bits[low // 8 : -(-high // 8)])[: high - low]
            yield flags.nonzero().view(-1).add_(low - start)

    def count(self, start: int, stop: int) -> Tensor:
        """Return the number of changed elements of a range, on the device."""
        parts = [
            _unpacked(self.bits[low // 8 : -(-min(stop, low + CHUNK) // 8)])[
                : min(stop, low + CHUNK) - low
            ].sum()
            for low in range(start, stop, CHUNK)
        ]
        return torch.stack(parts).sum() if parts else self.bits.new_zeros((), dtype=torch.int64)

    def clear(self, present: Tensor) -> None:
        """Count no element as changed any more. `present`: the slice."""
        self.bits.zero_()
        self.written.zero_()
        self.sums = column_sums(present)


def _unpacked(bits: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits.unsqueeze(1) >> shifts) & 1).view(-1)


def _integers(values: Tensor) -> Tensor:
    """View the values as integers, to compare their bits: -0.0 is not 0.0, and NaN equals itself."""
    return values.view(BITS[values.element_size()])


def differing(old: Tensor, new: Tensor) -> Tensor:
    """Return which elements of two contiguous tensors differ in their bits."""
    return (_integers(old) ^ _integers(new)).bool()
