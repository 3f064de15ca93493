"""`debug.check_collectives`: do all ranks make the same calls?

Before every collective each rank writes what it is about to do into the store that started the process
group, counts itself among those that do the same, and waits until all have been counted. If they differ,
or one does not come in time, *every* rank raises with both sides: the first rank with an opinion on a call
writes it down, and it becomes everyone's. That costs a few round trips to the store per rank and collective,
so it is for finding a hang, not for training runs.
"""

import time
from collections import deque
from collections.abc import Sequence
from zlib import crc32

from zero_full._compat import default_store, keys_under
from zero_full.errors import DesyncError

KEEP = 2  # calls that stay in the store: someone may still be reading the one before
GO = "go"


class CallCheck:
    """Compares the calls on one communicator between its ranks."""

    def __init__(self, ranks: Sequence[int], rank: int, timeout_s: float) -> None:
        self.ranks, self.rank, self.patience_s = list(ranks), rank, timeout_s
        name = "zero_full/calls/" + "-".join(map(str, ranks))
        made = keys_under(name, default_store()).add(f"made/{rank}", 1)  # the same ranks may meet in several
        self.store = keys_under(f"{name}/{made}", default_store())
        self.number = 0
        self.calls: deque[str] = deque()  # the last ones, whose keys are still there

    def __call__(self, call: str) -> None:
        """Compare this call with everyone's; raise on every rank if they differ."""
        self.number += 1
        alike, arrived, verdict = self._keys(self.number, call)
        self.store.set(f"last/{self.rank}", f"{self.number} {call}")
        self.store.add(alike, 1)
        self.store.add(arrived, 1)
        said = self.store.compare_set(verdict, "", self._opinion(alike, arrived)).decode()
        if said != GO:
            raise DesyncError(said)
        self.calls.append(call)
        if len(self.calls) > KEEP:
            old = self._keys(self.number - KEEP, self.calls.popleft())
            if self.rank == self.ranks[0]:
                for key in old:
                    self.store.delete_key(key)

    @staticmethod
    def _keys(number: int, call: str) -> tuple[str, str, str]:
        """Where it is counted how many ranks make this call, and how many any; and what they make of it."""
        return f"{number}/{crc32(call.encode())}", f"{number}/arrived", f"{number}/verdict"

    def _opinion(self, alike: str, arrived: str) -> str:
        """`GO` if all ranks make the same call; else the text of the error."""
        deadline = time.monotonic() + self.patience_s
        # Not `store.wait`: it would keep the connection from calls that this rank makes beside this one.
        while not (complete := int(self.store.get(arrived)) == len(self.ranks)) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.001)
        if complete and int(self.store.get(alike)) == len(self.ranks):
            return GO
        known = {rank: self._last_of(rank) for rank in self.ranks}
        if any(number != self.number for number, _ in known.values()):
            lines = [f"rank {rank}: {self._whereabouts(*last)}" for rank, last in known.items()]
        elif len(set(known.values())) == 1:
            return GO  # the last one came in the last moment
        else:
            lines = [f"rank {rank}: {call}" for rank, (_, call) in known.items()]
        return "\n  ".join([f"the ranks part ways at call {self.number}:", *lines])

    def _last_of(self, rank: int) -> tuple[int, str]:
        if not self.store.check([f"last/{rank}"]):
            return 0, ""
        number, _, call = self.store.get(f"last/{rank}").decode().partition(" ")
        return int(number), call

    def _whereabouts(self, number: int, call: str) -> str:
        last = f"call {number}, {call}" if number else "no call yet"
        return (
            last
            if number == self.number
            else f"did not come within {self.patience_s:g} s; last seen at {last}"
        )
