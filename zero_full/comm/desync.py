"""`debug.check_collectives`: check before each collective that all ranks make the same one.

Each rank writes its call into the store that started the process group, increments the counter of ranks that
make the same call, and waits until all ranks have been counted. If calls differ, or a rank does not come in
time, *every* rank raises DesyncError with all calls: the first rank with a verdict writes it into the store,
and all ranks use it. This costs a few round trips to the store per rank and collective, so it is meant for
finding a hang, not for training runs.
"""

import time
from collections import deque
from collections.abc import Sequence
from zlib import crc32

from zero_full._compat import default_store, prefix_store
from zero_full.comm.stores import numbered_topic
from zero_full.errors import DesyncError

KEEP = 2  # calls that stay in the store: another rank may still be reading the previous one
GO = "go"


class CallCheck:
    """Compares the calls on one communicator between its ranks."""

    def __init__(self, ranks: Sequence[int], rank: int, timeout_s: float) -> None:
        self.ranks, self.rank, self.timeout_s = list(ranks), rank, timeout_s
        # These ranks may have several communicators.
        self.store = prefix_store(f"zero_full/{numbered_topic('calls', ranks, rank)}", default_store())
        self.number = 0
        self.calls: deque[str] = deque()  # the last ones, whose keys are still in the store

    def __call__(self, call: str) -> None:
        """Compare this call between all ranks; every rank raises DesyncError if they differ."""
        self.number += 1
        alike, arrived, verdict_key = self._keys(self.number, call)
        self.store.set(f"last/{self.rank}", f"{self.number} {call}")
        self.store.add(alike, 1)
        self.store.add(arrived, 1)
        verdict = self.store.compare_set(verdict_key, "", self._own_verdict(alike, arrived)).decode()
        if verdict != GO:
            raise DesyncError(verdict)
        self.calls.append(call)
        if len(self.calls) > KEEP:
            old = self._keys(self.number - KEEP, self.calls.popleft())
            if self.rank == self.ranks[0]:
                for key in old:
                    self.store.delete_key(key)

    @staticmethod
    def _keys(number: int, call: str) -> tuple[str, str, str]:
        """Return a call's keys in the store: ranks that make this call, ranks that make any, the verdict."""
        return f"{number}/{crc32(call.encode())}", f"{number}/arrived", f"{number}/verdict"

    def _own_verdict(self, alike: str, arrived: str) -> str:
        """Return this rank's verdict: `GO` if all ranks make the same call, else the text of the error."""
        deadline = time.monotonic() + self.timeout_s
        # Polls, since `store.wait` would block the connection for this rank's other threads.
        while int(self.store.get(arrived)) < len(self.ranks) and time.monotonic() < deadline:
            time.sleep(0.001)
        if int(self.store.get(alike)) == len(self.ranks):
            return GO
        known = {rank: self._last_call(rank) for rank in self.ranks}
        if any(number != self.number for number, _ in known.values()):
            lines = [f"rank {rank}: {self._describe(*last)}" for rank, last in known.items()]
        elif len(set(known.values())) == 1:
            return GO  # the last rank came after the deadline, and before this rank looked
        else:
            lines = [f"rank {rank}: {call}" for rank, (_, call) in known.items()]
        return "\n  ".join([f"the ranks disagree at collective call {self.number}:", *lines])

    def _last_call(self, rank: int) -> tuple[int, str]:
        """Return the number and text of a rank's last call; 0 before its first."""
        if not self.store.check([f"last/{rank}"]):
            return 0, ""
        number, _, call = self.store.get(f"last/{rank}").decode().partition(" ")
        return int(number), call

    def _describe(self, number: int, call: str) -> str:
        """Describe a rank by its last call, which may be an earlier one."""
        last = f"call {number}, {call}" if number else "no call yet"
        is_late = number != self.number
        return f"did not come within {self.timeout_s:g} s; last seen at {last}" if is_late else last
