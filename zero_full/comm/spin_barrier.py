"""Ranks of one host wait for each other at numbers in shared memory.

[Note: meetings] Every rank has a number that all can read: how many meetings it has come to. To meet is to
raise one's own and to wait until the others' are as high, which takes microseconds where a message takes a
quarter of a millisecond. It needs stores that become visible in the order in which they are made: x86
promises that, other machines do not. A rank that has died is noticed by its process; one that has left its
group shows a number below zero.

[Note: the same call] Beside its number each rank shows a checksum of the collective that it meets for, one
for even and one for odd meetings: nobody comes to a meeting before all have left the last but one. If
checksums differ, nobody reads what others have shown, as it belongs to another collective. Each rank writes
down which one it makes, and all raise.
"""

import ctypes
import os
import platform
import select
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from zlib import crc32

from torch import Tensor

from zero_full.comm.forked import only_here
from zero_full.errors import DesyncError

NEVER = timedelta(days=365)
SPINS = 200  # looks before sleeping
NAP_S = 2e-5  # the shortest that a system gives: in fact about 80 microseconds
LONG_NAP_S = 1e-3
PATIENCE_S = 0.05  # after that naps are long, and each is followed by a look whether the other lives
NUMBER, TEXT = 8, 256  # bytes
PLACE = 3 * NUMBER + TEXT  # of a rank: meetings, two checksums, which collective it makes
TELLING_S = 2.0  # how long a rank waits for another one to write down its own
ORDERED_STORES = ("x86_64", "AMD64")


def in_words(call: tuple[str, ...]) -> str:
    """A collective as `debug.check_collectives` names it, too."""
    kind, what, numel, dtype = call or ("a meeting", "all ranks", "0", "")
    return f"{kind} of {what}: {numel} x {dtype.removeprefix('torch.')}"


def works_here() -> bool:
    """Whether this machine keeps stores in order and can tell when a process has died."""
    if platform.machine() not in ORDERED_STORES or not hasattr(os, "pidfd_open"):
        return False
    try:
        return not _has_ended(os.getpid())
    except OSError:  # an old kernel, or a container that forbids it
        return False


class SpinBarrier:
    """One rank's view of everyone's place in shared memory, which holds zeros at first."""

    def __init__(
        self, places: Sequence[Tensor], rank: int, pids: Sequence[int], timeout: timedelta | None
    ) -> None:
        self.memory = list(places)  # keeps the addresses valid
        addresses = [place.data_ptr() for place in places]
        counters = [ctypes.c_int64.from_address(address) for address in addresses]
        self.checksums = [(ctypes.c_int64 * 2).from_address(address + NUMBER) for address in addresses]
        self.texts = [(ctypes.c_char * TEXT).from_address(address + 3 * NUMBER) for address in addresses]
        self.rank, self.mine = rank, counters[rank]
        self.call: tuple[str, ...] = ()
        self.checksum = 0
        weakref.finalize(self, only_here(_leave), self.mine, self.memory)
        self.others = {r: counter for r, counter in enumerate(counters) if r != rank}
        self.pids = list(pids)
        self.timeout_s = (timeout or NEVER).total_seconds()
        self.met = 0

    def __call__(self, call: tuple[str, ...] = ()) -> None:
        """Wait until every rank has come as often as this one; DesyncError if one makes another call."""
        if call is not self.call:
            self.call, self.checksum = call, crc32("".join(call).encode())
        self.met += 1
        odd = self.met & 1
        self.checksums[self.rank][odd] = self.checksum
        self.mine.value = self.met
        for rank, theirs in self.others.items():
            if theirs.value < self.met:
                self._wait_for(rank, theirs)
        for rank in self.others:
            if self.checksums[rank][odd] != self.checksum:
                self._tell_all()

    def ahead(self) -> list[int]:
        """The ranks that are at a meeting to which this one has not come."""
        return [rank for rank, theirs in self.others.items() if theirs.value > self.met]

    def _tell_all(self) -> None:
        """Raise DesyncError with everyone's call: see [Note: the same call]."""
        mine = in_words(self.call).encode()[: TEXT - 1]
        self.texts[self.rank].value = mine
        deadline = time.monotonic() + TELLING_S
        while time.monotonic() < deadline and not all(text.value for text in self.texts):
            time.sleep(LONG_NAP_S)
        lines = [
            f"rank {rank}: {text.value.decode(errors='replace') or 'another call'}"
            for rank, text in enumerate(self.texts)
        ]
        raise DesyncError("\n  ".join(["the ranks part ways, and nothing was exchanged:", *lines]))

    def _has_come(self, theirs: ctypes.c_int64) -> bool:
        number = theirs.value
        return max(number, -number - 1) >= self.met  # see `_leave`

    def _wait_for(self, rank: int, theirs: ctypes.c_int64) -> None:
        for _ in range(SPINS):
            if theirs.value >= self.met:
                return
        started = time.monotonic()
        while not self._has_come(theirs):
            waited = time.monotonic() - started
            if waited > PATIENCE_S:
                self._look_after(rank, theirs, waited)
            time.sleep(LONG_NAP_S if waited > PATIENCE_S else NAP_S)

    def _look_after(self, rank: int, theirs: ctypes.c_int64, waited: float) -> None:
        ended = _has_ended(self.pids[rank])
        if self._has_come(theirs):  # and left later
            return
        if ended:
            raise RuntimeError(f"the process of rank {rank} has ended")
        if theirs.value < 0:
            raise RuntimeError(f"rank {rank} has left the group")
        if waited > self.timeout_s:
            raise RuntimeError(f"timed out: rank {rank} has not come within {self.timeout_s:g} s")


def _leave(mine: ctypes.c_int64, memory: Sequence[Tensor]) -> None:
    """Mark that this rank has left. How often it had come can still be read."""
    mine.value = -mine.value - 1


def _has_ended(pid: int) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))  # also if nobody has collected its exit status yet
    finally:
        os.close(descriptor)
