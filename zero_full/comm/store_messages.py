"""Notes that ranks leave each other in the store which started their process group.

For what goes on beside the training: a collective there would come between the training's own, at another
place on every rank.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from zero_full._compat import default_store, keys_under, timeout_of
from zero_full.comm.communicator import Communicator
from zero_full.errors import AbsentError

FIRST_LOOK_S, LAST_LOOK_S = 0.0005, 0.25  # between looks for a note: more and more
USUAL_S = 1800.0  # where a group does not tell its timeout


def patience_of(groups: Sequence[Communicator]) -> float:
    """How long collectives of these groups wait for a rank, in seconds."""
    told = [timeout_of(each.group) for each in groups if each.group is not None]
    known = [timeout.total_seconds() for timeout in told if timeout is not None]
    return max(known, default=USUAL_S)


class Notes:
    """The notes of some ranks about one matter."""

    def __init__(self, matter: str, ranks: Sequence[int], look: Callable[[], None]) -> None:
        """`look` is called now and then while this rank waits; what it raises ends the waiting."""
        self.ranks, self.look = list(ranks), look
        self.store: Any = keys_under(f"zero_full/{matter}", self._store())

    def _store(self) -> Any:
        known: Any = dist  # torch does not say that it exports this one
        return known.HashStore() if len(self.ranks) == 1 else default_store()

    def leave(self, key: str, text: str) -> None:
        """Leave a note for the others."""
        self.store.set(key, text)

    def read(self, keys: Sequence[str], patience_s: float) -> list[str]:
        """These notes, when all are there; AbsentError if one is not in time."""
        if not self._wait(lambda: bool(self.store.check(list(keys))), patience_s):
            absent = [key for key in keys if not self.store.check([key])]
            raise AbsentError(f"nothing was heard of {', '.join(absent)} within {patience_s:g} s")
        return [text.decode() for text in self.store.multi_get(list(keys))]

    def part(self, keys: Sequence[str], patience_s: float) -> None:
        """Say that this rank has read everything, and wait for the others: the store may end with its host.

        keys  notes of this rank's that nobody needs any longer
        """
        with suppress(RuntimeError):  # the others have read everything: they are gone, and so is the store
            self.store.add("parted", 1)
            everybody = self._wait(lambda: int(self.store.add("parted", 0)) >= len(self.ranks), patience_s)
            for key in keys if everybody else ():
                self.store.delete_key(key)

    def _wait(self, is_there: Callable[[], bool], patience_s: float) -> bool:
        # Not `store.wait`: it would keep the connection from calls that this rank makes beside this one.
        deadline, pause = time.monotonic() + patience_s, FIRST_LOOK_S
        while not is_there():
            if time.monotonic() > deadline:
                return False
            self.look()
            time.sleep(pause)
            pause = min(2 * pause, LAST_LOOK_S)
        return True
