"""Ranks of one host hand each other their slices through shared memory.

[Note: windows] Each rank owns a window of memory that all others can read, in two halves. A collective
goes through it piece by piece: everyone writes a piece into the current half of its window, all meet (see
`spin_barrier.py`; where that does not work, by a tiny all-reduce), and everyone reads from the others'
windows. The next piece uses the other half. When it is this half's turn again everybody has met once more in
between, which nobody does before having read what was here. So one meeting a piece is enough.

The memory has no name in the file system: it is gone when the last process that maps it is.
"""

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from zero_full._compat import timeout_of
from zero_full.comm import spin_barrier
from zero_full.comm.transport import OverGroup, Splits, add_up, own_slice

CPU = torch.device("cpu")
HALF = 2 * 2**20  # bytes


def window_of(half: int) -> int:
    """The bytes of a window with halves of this size: behind them is where ranks meet."""
    return 2 * half + spin_barrier.PLACE


class SharedMemory(OverGroup):
    """A transport for gloo ranks on one Linux host. See [Note: windows]."""

    name = "shared memory"

    def __init__(self, group: dist.ProcessGroup, windows: list[Tensor], pids: Sequence[int]) -> None:
        super().__init__(group)
        self.windows, self.half = windows, (windows[0].numel() - spin_barrier.PLACE) // 2
        self.turn = 0
        self.barrier: spin_barrier.SpinBarrier | None = None
        if all(pids):
            places = [window[2 * self.half :] for window in windows]
            self.barrier = spin_barrier.SpinBarrier(places, self.rank, pids, timeout_of(group, CPU))

    def _half(self, rank: int, dtype: torch.dtype) -> Tensor:
        start = self.turn % 2 * self.half
        return self.windows[rank][start : start + self.half].view(dtype)

    def _slot(self, owner: int, reader: int, dtype: torch.dtype, room: int) -> Tensor:
        """The part of `owner`'s window that is for `reader`, with room for so many elements."""
        place = reader - (reader > owner)
        return self._half(owner, dtype)[place * room : (place + 1) * room]

    def meet(self) -> None:
        """Wait for every rank to come as often as this one; DesyncError if one makes another collective."""
        if self.barrier is not None:
            self.barrier(self.call)
        else:
            dist.barrier(self.group)

    def awaited_by(self) -> list[int]:
        """The ranks that have come more often than this one."""
        return [] if self.barrier is None else self.barrier.ahead()

    def reduce_scatter(self, whole: Tensor, out: Tensor, divisor: float) -> None:
        """Each rank shows the others their slices, and sums its own."""
        slices = [own_slice(whole, rank, self.size) for rank in range(self.size)]
        room = self.half // whole.element_size() // (self.size - 1)
        for low in range(0, out.numel(), room):
            pieces = [s[low : low + room] for s in slices]
            for reader in self.others:
                self._slot(self.rank, reader, whole.dtype, pieces[0].numel()).copy_(pieces[reader])
            self.meet()
            for rank in self.others:
                pieces[rank] = self._slot(rank, self.rank, whole.dtype, pieces[0].numel())
            add_up(pieces, out[low : low + room], divisor)
            self.turn += 1

    def all_gather(self, whole: Tensor) -> None:
        """Each rank shows its slice, and copies the others'."""
        slices = [own_slice(whole, rank, self.size) for rank in range(self.size)]
        room = self.half // whole.element_size()
        for low in range(0, slices[0].numel(), room):
            pieces = [s[low : low + room] for s in slices]
            numel = pieces[0].numel()
            self._half(self.rank, whole.dtype)[:numel].copy_(pieces[self.rank])
            self.meet()
            for rank in self.others:
                pieces[rank].copy_(self._half(rank, whole.dtype)[:numel])
            self.turn += 1

    def all_to_all(self, sent: Tensor, received: Tensor, splits: Splits) -> None:
        """Each rank shows the others what it has for them, and copies what they have for it."""
        theirs, mine = sent.split(list(splits.sent)), received.split(list(splits.received))
        mine[self.rank].copy_(theirs[self.rank])
        room = self.half // sent.element_size() // (self.size - 1)
        for low in range(0, splits.most, room):
            for reader in self.others:
                shown = theirs[reader][low : low + room]
                self._slot(self.rank, reader, sent.dtype, room)[: shown.numel()].copy_(shown)
            self.meet()
            for rank in self.others:
                piece = mine[rank][low : low + room]
                piece.copy_(self._slot(rank, self.rank, sent.dtype, room)[: piece.numel()])
            self.turn += 1

    def sum_numbers(self, numbers: Tensor) -> None:
        """An all-reduce of the numbers and of padding, so that they can be cut evenly."""
        if not numbers.is_floating_point():  # fp32, in which slices are summed, does not hold all of them
            super().sum_numbers(numbers)
            return
        flat = numbers.reshape(-1)
        padded = flat.new_zeros(-(-flat.numel() // self.size) * self.size)
        padded[: flat.numel()] = flat
        self.all_reduce(padded, 1)
        numbers.copy_(padded[: flat.numel()].view(numbers.shape))

    def all_reduce(self, whole: Tensor, divisor: float) -> None:
        """A reduce-scatter and an all-gather."""
        self.reduce_scatter(whole, own_slice(whole, self.rank, self.size), divisor)
        self.all_gather(whole)


def share_memory(group: dist.ProcessGroup, wanted: bool = True, half: int = HALF) -> SharedMemory | None:
    """A transport; or None on every rank, if two cannot see each other's memory or one does not want to.

    `half`: the bytes of half a window, a multiple of 8, the same on every rank.
    """
    secret = secrets.token_bytes(16)
    size = window_of(half)
    descriptor, path = _make_window(secret, size) if wanted else (None, "")
    addresses: list[tuple[bytes, str, int]] = [(b"", "", 0)] * group.size()
    pid = os.getpid() if spin_barrier.works_here() else 0
    dist.all_gather_object(addresses, (secret, path, pid), group=group)
    windows = [_open_window(secret, path, size) for secret, path, _ in addresses]
    seen = torch.tensor([float(all(window is not None for window in windows))])
    dist.all_reduce(seen, dist.ReduceOp.MIN, group=group)  # also: nobody closes before all have opened
    if descriptor is not None:
        os.close(descriptor)
    if not seen.item():
        return None
    mapped = [window for window in windows if window is not None]
    return SharedMemory(group, mapped, [pid for _, _, pid in addresses])


def _make_window(secret: bytes, size: int) -> tuple[int | None, str]:
    """A window with the secret at its start, so that whoever opens it knows it is the right one."""
    if not hasattr(os, "memfd_create"):  # not Linux
        return None, ""
    try:
        descriptor = os.memfd_create("zero_full")
    except OSError:  # a container forbids it; the others wait for an answer all the same
        return None, ""
    with suppress(OSError):  # then nobody finds the secret
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, secret, 0)
    return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"


def _open_window(secret: bytes, path: str, size: int) -> Tensor | None:
    with suppress(OSError, RuntimeError):  # another host, another container, no permission
        # Look before mapping: mapping would enlarge whatever file stands under that path elsewhere.
        if path and _start_of(path, len(secret)) == secret:
            return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    return None


def _start_of(path: str, length: int) -> bytes:
    with Path(path).open("rb") as file:
        return file.read(length)
