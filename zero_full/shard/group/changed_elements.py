"""Which elements of this rank's slice of the parameters steps have changed, as one bit each.

Made only for runs that ask for it, by `engine.weights(delta=True)`. An element counts as changed until
`take`, also if a later step changes it back. There are two ways of a step:

    marked     the operator writes 16-bit copies of the masters on the CPU, and sets their bits on its way
               (`adam_step` in `kernels/reference.py`). No copy is kept, and nothing is read again
    compared   all others: the slice's old values are kept while the step writes the new ones, unless both
               are in memory anyway, and their bits are compared in a second pass

Between steps user code and loads may write to the slice, too. Where it is a copy of the master, the master
finds that out anyway (see [Note: writes to parameters] in `master.py`). Where it is the master itself, its
column sums are noted after each step. If they differ before the next step, or when the changes are read,
every element counts as changed.
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
        self.sums: Tensor | None = None  # column sums of the slice after the last step; None: not noted
        self.old: Tensor | None = None  # the rounded values before the running step
        self.is_kept = False  # `keep` was called in this step
        self.is_marked = False  # the stepper sets the bits in this step
        # Whether user code or a load has written to the slice since `take`, as a bool on the device.
        self.written = torch.zeros((), dtype=torch.bool, device=device)
        # Changes that a hand-over sends. They are the next one's as well, unless it comes to its end.
        self.taken: ChangedElements | None = None

    def held(self) -> list[Tensor]:
        """Return the memory of the bits."""
        return [self.bits, *(self.taken.held() if self.taken is not None else ())]

    def bits_of(self, start: int, numel: int) -> Tensor:
        """Return the bytes with the bits of a range that begins at a multiple of 8."""
        return self.bits[start // 8 : -(-(start + numel) // 8)]

    def keep(self, overwritten: Tensor | None) -> None:
        """Keep the slice's values before a step overwrites them in place; None: the step does not."""
        self.is_kept = True
        if overwritten is not None:
            self.old = overwritten.to(self.dtype, copy=True)

    def compare(self, old: Tensor | None, new: Tensor | None) -> None:
        """Add the elements that a step has changed. `old`: None if they were kept, or the step has marked."""
        kept, self.old = self.old, None
        if self.is_kept and new is not None and (kept is not None or old is not None):
            self._add(kept, old, new)
        elif not self.is_marked:  # a step on another way: old values are gone
            self.bits.fill_(255)
        self.is_kept = self.is_marked = False

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

    def note_sums(self, present: Tensor) -> None:
        """Note the column sums of the slice after a step, in which user code may write unseen."""
        self.sums = column_sums(present)

    def look(self, present: Tensor) -> None:
        """Count every element as changed if the slice is not as the last step has left it. No host waits."""
        if self.sums is not None:
            sums = column_sums(present)  # of another shape once a frozen parameter is trained
            self._count_all_if(
                (sums != self.sums if sums.shape == self.sums.shape else torch.ones_like(sums)).any()
            )

    def look_for_writes(self, slice_: Tensor, master: Tensor) -> None:
        """Count every element as changed if the slice is not the rounded master. No host waits.

        A slice with NaN may count as written: NaN has many bits, and kernels round it to different ones.
        """
        chunks = zip(slice_.split(CHUNK), master.split(CHUNK), strict=True)
        differ = [differing(written, values.to(written.dtype)).any() for written, values in chunks]
        if differ:
            self._count_all_if(torch.stack(differ).any())

    def count_all(self) -> None:
        """Count every element as changed, because all of them were written between steps."""
        self.bits.fill_(255)
        self.written.fill_(True)

    def _count_all_if(self, differs: Tensor) -> None:
        self.written |= differs.bool()
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

    def take(self, watched: Tensor | None) -> None:
        """Move the changes so far to `taken`, and count later ones from now on.

        watched  the slice, if user code may write to it unseen
        """
        taken, left = ChangedElements(0, self.dtype, self.bits.device), self.taken
        taken.bits, taken.written = self.bits, self.written
        if left is not None:
            taken.bits |= left.bits
            taken.written |= left.written
        self.bits, self.written = torch.zeros_like(self.bits), torch.zeros_like(self.written)
        self.sums = None if watched is None else column_sums(watched)
        self.taken = taken


def _unpacked(bits: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits.unsqueeze(1) >> shifts) & 1).view(-1)


def _integers(values: Tensor) -> Tensor:
    """View the values as integers, to compare their bits: -0.0 is not 0.0, and NaN equals itself."""
    return values.view(BITS[values.element_size()])


def differing(old: Tensor, new: Tensor) -> Tensor:
    """Return which elements of two contiguous tensors differ in their bits."""
    return (_integers(old) ^ _integers(new)).bool()
