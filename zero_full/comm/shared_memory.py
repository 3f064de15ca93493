"""Shared memory: ranks of one host pass each other their slices without messages.

[Note: windows] Each rank owns a window, memory that all ranks of the host can read, in two halves. A
collective passes through them piece by piece. Each rank writes a piece into the current half of its own
window, all ranks enter a barrier (see [Note: spin barrier]), and each reads from the others' windows. The
next piece uses the other half. One barrier a piece is enough: a rank writes to a half again only after the
barrier of the next piece, and no rank enters that one before it has read this piece. The current half follows
from the number of barriers that a rank has entered, and is written once their waits are over. So ranks agree
on it also after a collective that an interrupt (KeyboardInterrupt) has ended on one of them.

The memory has no name in the file system. The kernel frees it when the last process that maps it ends.

[Note: nontemporal stores] What a window held before is in the caches of the cores that have read it. If
these share no cache with the writer's core, each line is fetched from there before it is written, which
takes five times as long as nontemporal stores, past the caches. If they share one, plain stores are faster,
also for the readers. Nothing tells a process which it is, and a virtual machine's cores move. So each rank
by itself measures both ways in every round of pieces. The bytes are the same.

[Note: spin barrier] Every rank has a counter that all ranks can read: how many barriers it has entered. To
enter one, a rank increments its own and waits until the others' are as high. That takes microseconds, where a
message takes a quarter of a millisecond. It needs stores that become visible in the order in which they are
made: x86 guarantees that, other machines do not. A rank that waits checks whether the other's process still
runs. The counter of a rank that has left its group is below zero.

[Note: the same call] Beside its counter each rank writes a checksum of the collective that it makes: one
for even and one for odd barriers, as no rank enters a barrier before all have left the last but one. If
checksums differ, no rank reads the others' data, which belongs to another collective. Each rank writes its
own call as text, waits for the others' texts, and raises DesyncError.
"""

import ctypes
import os
import platform
import secrets
import select
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import NamedTuple, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from zero_full._compat import timeout_of
from zero_full.comm.fork_safety import in_this_process_only
from zero_full.comm.transport import BackendTransport, Call, Splits, add_up, describe_call, own_slice
from zero_full.errors import DesyncError
from zero_full.kernels.load import compiled_for, operators

CPU = torch.device("cpu")
HALF = 2 * 2**20  # bytes of half a window

NEVER = timedelta(days=365)  # the barrier's timeout where the group has none
SPINS = 200  # looks before sleeping
SLEEP_S = 2e-5  # the shortest sleep of an operating system: about 80 microseconds in fact
LONG_SLEEP_S = 1e-3
SHORT_WAIT_S = 0.05  # then a rank sleeps longer, and looks each time whether the other's process runs
NUMBER, TEXT = 8, 256  # bytes
PLACE = 3 * NUMBER + TEXT  # bytes of a rank: its counter, two checksums, the text of its call
TIMED = 2**16  # bytes of the smallest piece that is worth a choice between two ways to write it
PIECES, TRIES = 250, 6  # of a round: those in the present way, then those in the other, of which two are slow
TEXTS_WAIT_S = 2.0  # how long a rank waits for the texts of the others
ORDERED_STORES = ("x86_64", "AMD64")


def window_of(half: int) -> int:
    """Return the bytes of a window with halves of this size; the barrier's counters lie behind them."""
    return 2 * half + PLACE


class Half(NamedTuple):
    """The same half of every rank's window, as tensors of one type."""

    numel: int  # elements of a half
    whole: list[Tensor]  # by rank: its half, where all others read the same
    slot: int  # elements of a slot, the part of a half that is for one other rank
    sent: dict[int, Tensor]  # by reader: the slots of this rank's half
    received: dict[int, Tensor]  # by owner: this rank's slots in the halves of the others


class Halves(dict[torch.dtype, tuple[Half, Half]]):
    """Both halves of all ranks' windows, by dtype. Their tensors are made at the first use of a type."""

    def __init__(self, windows: Sequence[Tensor], rank: int, half: int) -> None:
        super().__init__()
        self.windows, self.rank, self.half = windows, rank, half

    @torch.inference_mode(False)  # the first use may be an evaluation, and a later one is in training
    def __missing__(self, dtype: torch.dtype) -> tuple[Half, Half]:
        others = [rank for rank in range(len(self.windows)) if rank != self.rank]

        def cut(start: int) -> Half:
            whole = [window[start : start + self.half].view(dtype) for window in self.windows]
            room = len(whole[0]) // len(others)

            def slot(owner: int, reader: int) -> Tensor:
                place = reader - (reader > owner)  # an owner needs no slot for itself
                return whole[owner][place * room : (place + 1) * room]

            sent = {reader: slot(self.rank, reader) for reader in others}
            received = {owner: slot(owner, self.rank) for owner in others}
            return Half(len(whole[0]), whole, room, sent, received)

        self[dtype] = cut(0), cut(self.half)
        return self[dtype]


class SharedMemory(BackendTransport):
    """A transport for gloo ranks on one Linux host. See [Note: windows]."""

    name = "shared memory"

    def __init__(self, group: dist.ProcessGroup, windows: list[Tensor], pids: Sequence[int]) -> None:
        super().__init__(group)
        half = (windows[0].numel() - PLACE) // 2
        self.windows, self.halves = windows, Halves(windows, self.rank, half)
        self.write = WindowWriter()
        self.barrier: SpinBarrier | MessageBarrier = MessageBarrier(group)
        if all(pids):
            places = [window[2 * half :] for window in windows]
            self.barrier = SpinBarrier(places, self.rank, pids, timeout_of(group, CPU))

    def awaited_by(self) -> list[int]:
        """Return the ranks that wait at a barrier which this rank has not entered."""
        return self.barrier.ahead()

    def reduce_scatter(self, whole: Tensor, out: Tensor, divisor: float) -> None:
        """Write the other ranks' slices into this rank's window, and sum its own slice from theirs."""
        shard, halves = out.numel(), self.halves[whole.dtype]
        for low in range(0, shard, halves[0].slot):
            half, numel = halves[self.barrier.turn()], min(halves[0].slot, shard - low)
            for rank in self.others:
                start = rank * shard + low
                self.write(whole[start : start + numel], half.sent[rank][:numel])
            self.barrier(self.call)
            start = self.rank * shard + low
            pieces = [whole[start : start + numel]] * self.size
            for rank in self.others:
                pieces[rank] = half.received[rank][:numel]
            add_up(pieces, out[low : low + numel], divisor)

    def all_gather(self, whole: Tensor) -> None:
        """Write this rank's slice into its window, and copy the others' from theirs."""
        shard, halves = whole.numel() // self.size, self.halves[whole.dtype]
        for low in range(0, shard, halves[0].numel):
            half, numel = halves[self.barrier.turn()], min(halves[0].numel, shard - low)
            start = self.rank * shard + low
            self.write(whole[start : start + numel], half.whole[self.rank][:numel])
            self.barrier(self.call)
            for rank in self.others:
                start = rank * shard + low
                whole[start : start + numel].copy_(half.whole[rank][:numel])

    def sum_numbers(self, numbers: Tensor) -> None:
        """Write all numbers into this rank's window, and sum all ranks' from theirs.

        An all-reduce meets three times to read less: worth it for a large buffer, not for a few numbers.
        """
        if not numbers.is_floating_point():  # `add_up` sums in fp32, which does not hold every integer
            super().sum_numbers(numbers)
            return
        flat, halves = numbers.reshape(-1), self.halves[numbers.dtype]
        for low in range(0, flat.numel(), halves[0].numel):
            piece, half = flat[low : low + halves[0].numel], halves[self.barrier.turn()]
            pieces = [window[: piece.numel()] for window in half.whole]
            pieces[self.rank].copy_(piece)
            self.barrier(self.call)
            # Every rank adds the same numbers in rank order, so all get the same bits. No second barrier: as
            # in an all-gather, others only read this half until all have met for the piece after this one.
            add_up(pieces, piece, 1)
        if not numbers.is_contiguous():  # then `flat` is a copy
            numbers.copy_(flat.view(numbers.shape))

    def all_to_all(self, sent: Tensor, received: Tensor, splits: Splits) -> None:
        """Write the other ranks' parts into this rank's window, and copy its own parts from their windows."""
        theirs, mine = sent.split(list(splits.sent)), received.split(list(splits.received))
        mine[self.rank].copy_(theirs[self.rank])
        halves = self.halves[sent.dtype]
        for low in range(0, splits.most, halves[0].slot):
            half, high = halves[self.barrier.turn()], low + halves[0].slot
            for rank in self.others:
                piece = theirs[rank][low:high]
                self.write(piece, half.sent[rank][: piece.numel()])
            self.barrier(self.call)
            for rank in self.others:
                piece = mine[rank][low:high]
                piece.copy_(half.received[rank][: piece.numel()])

    def all_reduce(self, whole: Tensor, divisor: float) -> None:
        """Run a reduce-scatter, then an all-gather."""
        self.reduce_scatter(whole, own_slice(whole, self.rank, self.size), divisor)
        self.all_gather(whole)


class WindowWriter:
    """Copies pieces to a window in the faster of two ways: see [Note: nontemporal stores]."""

    def __init__(self) -> None:
        self.nontemporal = False
        self.times: list[float] = []  # seconds a byte, of this round's pieces

    def __call__(self, piece: Tensor, place: Tensor) -> None:
        """Copy a piece to its place."""
        if piece.nbytes < TIMED or not compiled_for(CPU):
            place.copy_(piece)
            return
        tries_other = len(self.times) >= PIECES
        start = time.perf_counter()
        if self.nontemporal is not tries_other:
            operators(CPU).nontemporal_copy(piece, place)
        else:
            place.copy_(piece)
        self.times.append((time.perf_counter() - start) / piece.nbytes)
        if len(self.times) >= PIECES + TRIES:  # more after an interrupt
            present, other = median(self.times[:PIECES]), median(self.times[PIECES:])
            plain, nontemporal = (other, present) if self.nontemporal else (present, other)
            self.nontemporal = 2 * nontemporal < plain  # less gain would be lost by readers
            self.times.clear()


# Barriers ------------------------------------------------------------------------------------------


class MessageBarrier:
    """The backend's barrier, for ranks that cannot use a `SpinBarrier`. It compares no collectives."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.entered = group, 0

    def __call__(self, call: Call) -> None:
        """Wait for every rank."""
        self.entered += 1
        dist.barrier(self.group)

    def turn(self) -> int:
        """Return the current half: 0 or 1."""
        return self.entered % 2

    def ahead(self) -> list[int]:
        """Return no ranks: messages do not show who waits."""
        return []


def can_spin() -> bool:
    """Return whether this machine keeps stores in order and can tell when a process has ended."""
    if platform.machine() not in ORDERED_STORES or not hasattr(os, "pidfd_open"):
        return False
    try:
        return not _has_ended(os.getpid())
    except OSError:  # an old kernel, or a container that forbids it
        return False


class SpinBarrier:
    """One rank's view of all ranks' places in shared memory, which hold zeros at first."""

    def __init__(
        self, places: Sequence[Tensor], rank: int, pids: Sequence[int], timeout: timedelta | None
    ) -> None:
        self.memory = list(places)  # keeps the addresses valid
        addresses = [place.data_ptr() for place in places]
        counters = [ctypes.c_int64.from_address(address) for address in addresses]
        self.checksums = [(ctypes.c_int64 * 2).from_address(address + NUMBER) for address in addresses]
        self.texts = [(ctypes.c_char * TEXT).from_address(address + 3 * NUMBER) for address in addresses]
        self.rank, self.own_counter = rank, counters[rank]
        weakref.finalize(self, in_this_process_only(_leave), self.own_counter, self.memory)
        self.others = {r: counter for r, counter in enumerate(counters) if r != rank}
        self.pids = list(pids)
        self.timeout_s = (timeout or NEVER).total_seconds()
        self.entered = self.left = 0  # barriers, by this rank

    def __call__(self, call: Call) -> None:
        """Wait until every rank has arrived as often as this one; DesyncError if one makes another call."""
        self.entered = entered = self.entered + 1
        # Two places by turns: the fastest rank may be one barrier ahead of the slowest.
        checksum, odd = crc32(repr(call).encode()), entered & 1
        self.checksums[self.rank][odd] = checksum  # before the counter, which tells others to read it
        self.own_counter.value = entered
        self._wait_for_all()
        for rank in self.others:
            if self.checksums[rank][odd] != checksum:
                self._raise_desync(call)

    def turn(self) -> int:
        """Return the current half: 0 or 1. Wait again if an interrupt has ended the last barrier's wait."""
        if self.left < self.entered:
            self._wait_for_all()
        return self.entered % 2

    def _wait_for_all(self) -> None:
        """Wait until every rank has arrived as often as this one."""
        entered = self.entered
        for rank, theirs in self.others.items():
            spins = SPINS
            while theirs.value < entered:
                spins -= 1
                if not spins:
                    self._wait_for(rank, theirs)
                    break
        self.left = entered

    def ahead(self) -> list[int]:
        """Return the ranks that wait at a barrier which this rank has not entered."""
        return [rank for rank, theirs in self.others.items() if theirs.value > self.entered]

    def _wait_for(self, rank: int, theirs: ctypes.c_int64) -> None:
        """Sleep until a rank arrives. Raise RuntimeError if it has ended or left, or after the timeout."""
        started = time.monotonic()
        while True:
            waited = time.monotonic() - started
            is_late = waited > SHORT_WAIT_S
            ended = is_late and _has_ended(self.pids[rank])
            # Read after the process was looked at: a rank may come, and end before this one has seen it.
            number = theirs.value
            if max(number, ~number) >= self.entered:  # below zero of a rank that has left since: see `_leave`
                return
            if ended:
                raise RuntimeError(f"the process of rank {rank} has ended")
            if is_late and number < 0:
                raise RuntimeError(f"rank {rank} has destroyed its engine or exited")
            if waited > self.timeout_s:
                raise RuntimeError(f"timed out: rank {rank} has not come within {self.timeout_s:g} s")
            time.sleep(LONG_SLEEP_S if is_late else SLEEP_S)

    def _raise_desync(self, call: Call) -> NoReturn:
        """Raise DesyncError with the calls of all ranks: see [Note: the same call]."""
        self.texts[self.rank].value = describe_call(call).encode()[: TEXT - 1]
        deadline = time.monotonic() + TEXTS_WAIT_S
        while time.monotonic() < deadline and not all(text.value for text in self.texts):
            time.sleep(LONG_SLEEP_S)
        calls = [text.value.decode(errors="replace") or "another call" for text in self.texts]
        lines = [f"rank {rank}: {text}" for rank, text in enumerate(calls)]
        raise DesyncError("\n  ".join(["the ranks make different collectives; nothing was sent:", *lines]))


def _leave(mine: ctypes.c_int64, memory: Sequence[Tensor]) -> None:
    """Mark that this rank has left, by its counter's complement, a number below zero."""
    mine.value = ~mine.value


def _has_ended(pid: int) -> bool:
    """Return whether a process has ended, also before its parent has collected the exit status."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(descriptor)


# Opening -------------------------------------------------------------------------------------------


def share_memory(group: dist.ProcessGroup, wanted: bool = True, half: int = HALF) -> SharedMemory | None:
    """Open a shared-memory transport; None on every rank if one cannot read another's memory or opts out.

    `half`: bytes of half a window, a multiple of 8, equal on every rank.
    """
    secret = secrets.token_bytes(16)
    size = window_of(half)
    descriptor, path = _make_window(secret, size) if wanted else (None, "")
    addresses: list[tuple[bytes, str, int]] = [(b"", "", 0)] * group.size()
    pid = os.getpid() if can_spin() else 0
    dist.all_gather_object(addresses, (secret, path, pid), group=group)
    windows = [_open_window(secret, path, size) for secret, path, _ in addresses]
    seen = torch.tensor([float(all(window is not None for window in windows))])
    # Every rank gets the same answer, and closes its own window only when all have opened it.
    dist.all_reduce(seen, dist.ReduceOp.MIN, group=group)
    if descriptor is not None:
        os.close(descriptor)
    if not seen.item():
        return None
    mapped = [window for window in windows if window is not None]
    return SharedMemory(group, mapped, [pid for _, _, pid in addresses])


def can_share_memory() -> bool:
    """Return whether processes of this system can share windows: on Linux."""
    return hasattr(os, "memfd_create")


def _make_window(secret: bytes, size: int) -> tuple[int | None, str]:
    """Create a window. The secret at its start lets other ranks check that they opened the right file."""
    if not can_share_memory():
        return None, ""
    try:
        descriptor = os.memfd_create("zero_full")
    except OSError:  # a container forbids it; the other ranks still need an answer
        return None, ""
    with suppress(OSError):  # then no rank finds the secret
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, secret, 0)
    return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"


def _open_window(secret: bytes, path: str, size: int) -> Tensor | None:
    """Map another rank's window; None if this process cannot read it."""
    with suppress(OSError, RuntimeError):  # another host, another container, no permission
        # Read before mapping: mapping would enlarge another file that has this path on another host.
        if path and _start_of(path, len(secret)) == secret:
            return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    return None


def _start_of(path: str, length: int) -> bytes:
    with Path(path).open("rb") as file:
        return file.read(length)
