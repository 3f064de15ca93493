"""Ranks of one host wait for each other at numbers in shared memory.

[Note: meetings] Every rank has a number that all can read: how many meetings it has come to. To meet is to
raise one's own and to wait until the others' are as high, which takes microseconds where a message takes a
quarter of a millisecond. It needs stores that become visible in the order in which they are made: x86
promises that, other machines do not. A rank that has died is noticed by its process; one that has left its
group shows a number below zero.
"""

import ctypes
import os
import platform
import select
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor

NEVER = timedelta(days=365)
SPINS = 200  # looks before sleeping
NAP_S = 2e-5  # the shortest that a system gives: in fact about 80 microseconds
LONG_NAP_S = 1e-3
PATIENCE_S = 0.05  # after that naps are long, and each is followed by a look whether the other lives
ORDERED_STORES = ("x86_64", "AMD64")


def works_here() -> bool:
    """Whether this machine keeps stores in order and can tell when a process has died."""
    if platform.machine() not in ORDERED_STORES or not hasattr(os, "pidfd_open"):
        return False
    try:
        return not _has_ended(os.getpid())
    except OSError:  # an old kernel, or a container that forbids it
        return False


class SpinBarrier:
    """One rank's view of everyone's number: int64 in shared memory, zero at first."""

    def __init__(
        self, numbers: Sequence[Tensor], rank: int, pids: Sequence[int], timeout: timedelta | None
    ) -> None:
        self.memory = list(numbers)  # keeps the addresses valid
        counters = [ctypes.c_int64.from_address(number.data_ptr()) for number in numbers]
        self.mine = counters[rank]
        weakref.finalize(self, _leave, self.mine, self.memory)
        self.others = {r: counter for r, counter in enumerate(counters) if r != rank}
        self.pids = list(pids)
        self.timeout_s = (timeout or NEVER).total_seconds()
        self.met = 0

    def __call__(self) -> None:
        """Wait until every rank has come as often as this one."""
        self.met += 1
        self.mine.value = self.met
        for rank, theirs in self.others.items():
            if theirs.value < self.met:
                self._wait_for(rank, theirs)

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
