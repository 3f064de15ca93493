"""`debug.check_collectives`: do all ranks make the same calls?

Before every collective each rank writes what it is about to do into the store that started the process
group, and reads what the others wrote. If they differ, or one does not come in time, *every* rank raises
with both sides: the first rank with an opinion on a call writes it down, and it becomes everyone's. That
costs a few round trips to the store per collective, so it is for finding a hang, not for training runs.
"""

import time
from collections.abc import Sequence

from zero_full._compat import default_store, keys_under

KEEP = 2  # calls that stay in the store: someone may still be reading the one before
GO = "go"


class DesyncError(RuntimeError):
    """The ranks of a group are about to make different calls, or one of them makes none."""


class DisagreementError(ValueError):
    """The ranks were given different things, or are about to step with different numbers."""


class CallCheck:
    """Compares the calls on one communicator between its ranks."""

    def __init__(self, ranks: Sequence[int], rank: int, timeout_s: float) -> None:
        self.ranks, self.rank, self.patience_s = list(ranks), rank, timeout_s
        name = "zero_full/calls/" + "-".join(map(str, ranks))
        made = keys_under(name, default_store()).add(f"made/{rank}", 1)  # the same ranks may meet in several
        self.store = keys_under(f"{name}/{made}", default_store())
        self.number = 0

    def __call__(self, call: str) -> None:
        """Compare this call with everyone's; raise on every rank if they differ."""
        self.number += 1
        self.store.set(f"{self.number}/{self.rank}", call)
        self.store.set(f"last/{self.rank}", f"call {self.number}, {call}")
        verdict = self.store.compare_set(f"{self.number}/verdict", "", self._opinion()).decode()
        if verdict != GO:
            raise DesyncError(verdict)
        if self.number > KEEP:
            self.store.delete_key(f"{self.number - KEEP}/{self.rank}")
            if self.rank == self.ranks[0]:
                self.store.delete_key(f"{self.number - KEEP}/verdict")

    def _opinion(self) -> str:
        """`GO` if all ranks make the same call; else the text of the error."""
        keys = {rank: f"{self.number}/{rank}" for rank in self.ranks}
        deadline = time.monotonic() + self.patience_s
        # Not `store.wait`: it would keep the connection from calls that this rank makes beside this one.
        while (absent := [rank for rank, key in keys.items() if not self.store.check([key])]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.001)
        if absent:
            lines = [f"rank {rank}: {self._whereabouts(rank, absent)}" for rank in self.ranks]
        else:
            calls = [self.store.get(key).decode() for key in keys.values()]
            if len(set(calls)) == 1:
                return GO
            lines = [f"rank {rank}: {call}" for rank, call in zip(self.ranks, calls, strict=True)]
        return "\n  ".join([f"the ranks part ways at call {self.number}:", *lines])

    def _whereabouts(self, rank: int, absent: Sequence[int]) -> str:
        last = f"last/{rank}"
        known = self.store.get(last).decode() if self.store.check([last]) else "no call yet"
        return f"did not come within {self.patience_s:g} s; last seen at {known}" if rank in absent else known
