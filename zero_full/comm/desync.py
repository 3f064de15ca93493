"""`debug.check_collectives`: do all ranks make the same calls?

Before every collective each rank writes what it is about to do into the store that started the process
group, and reads what the others wrote. If they differ, or one does not come in time, *every* rank raises
with both sides. It costs a round trip to the store per collective, so it is for finding a hang, not for
training runs.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from zero_full._compat import default_store, keys_under

KEEP = 2  # calls that stay in the store: someone may still be reading the one before


class DesyncError(RuntimeError):
    """The ranks of a group are about to make different calls, or one of them makes none."""


class CallCheck:
    """One process group's record of calls."""

    def __init__(self, ranks: Sequence[int], rank: int, timeout_s: float) -> None:
        name = "-".join(map(str, ranks))
        self.store = keys_under(f"zero_full/calls/{name}", default_store())
        self.ranks, self.rank, self.patience = list(ranks), rank, timedelta(seconds=timeout_s)
        self.number = 0

    def __call__(self, call: str) -> None:
        """Compare this call with everyone's; raise on every rank if they differ."""
        self.number += 1
        keys = {rank: f"{self.number}/{rank}" for rank in self.ranks}
        self.store.set(keys[self.rank], call)
        self.store.set(f"last/{self.rank}", f"call {self.number}, {call}")
        try:
            self.store.wait(list(keys.values()), self.patience)
        except dist.DistStoreError:
            absent = [rank for rank, key in keys.items() if not self.store.check([key])]
            self._fail([self._whereabouts(rank, absent) for rank in self.ranks])
        if self.store.check(["failed"]):
            raise DesyncError(self.store.get("failed").decode())
        calls = [self.store.get(keys[rank]).decode() for rank in self.ranks]
        if len(set(calls)) > 1:
            self._fail([f"rank {rank}: {theirs}" for rank, theirs in zip(self.ranks, calls, strict=True)])
        if self.number > KEEP:
            self.store.delete_key(f"{self.number - KEEP}/{self.rank}")

    def _whereabouts(self, rank: int, absent: Sequence[int]) -> str:
        last = f"last/{rank}"
        known = self.store.get(last).decode() if self.store.check([last]) else "no call yet"
        seconds = self.patience.total_seconds()
        return f"rank {rank}: " + (
            f"did not come within {seconds:g} s; last seen at {known}" if rank in absent else known
        )

    def _fail(self, lines: Sequence[str]) -> None:
        message = "\n  ".join([f"the ranks part ways at call {self.number}:", *lines])
        self.store.set("failed", message)  # for a rank that comes late
        raise DesyncError(message)
