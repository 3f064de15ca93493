"""Messages between ranks through the store that started their process group.

They serve work in the background of the training, where a collective would interleave with those of the
training in a different order on each rank.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from zero_full._compat import default_store, prefix_store, timeout_of
from zero_full.comm.communicator import Communicator
from zero_full.errors import AbsentError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0005, 0.25  # between looks for a message: each pause is twice the last
USUAL_S = 1800.0  # where a group has no known timeout


def longest_timeout(groups: Sequence[Communicator]) -> float:
    """Return the longest timeout of these groups' collectives, in seconds."""
    timeouts = [timeout_of(each.group) for each in groups if each.group is not None]
    known = [timeout.total_seconds() for timeout in timeouts if timeout is not None]
    return max(known, default=USUAL_S)


class StoreMessages:
    """Text messages between the ranks of a group, through the store, in keys of their own."""

    def __init__(self, topic: str, ranks: Sequence[int], on_poll: Callable[[], None]) -> None:
        """`on_poll` is called repeatedly while this rank waits. An exception from it ends the wait."""
        self.ranks, self.on_poll = list(ranks), on_poll
        known: Any = dist  # torch's type stubs do not list HashStore
        store = known.HashStore() if len(self.ranks) == 1 else default_store()
        self.store: Any = prefix_store(f"zero_full/{topic}", store)

    def write(self, key: str, text: str) -> None:
        """Write a message for the other ranks."""
        self.store.set(key, text)

    def read(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        """Wait for these messages and return them; AbsentError if one does not come in time."""
        if not self._wait(lambda: bool(self.store.check(list(keys))), timeout_s):
            absent = [key for key in keys if not self.store.check([key])]
            raise AbsentError(f"no message from {', '.join(absent)} within {timeout_s:g} s")
        return [text.decode() for text in self.store.multi_get(list(keys))]

    def finish(self, keys: Sequence[str], timeout_s: float) -> None:
        """Wait until all ranks have read all messages: the store may end with the process that hosts it.

        keys  messages of this rank, deleted when all ranks have read them
        """
        with suppress(RuntimeError):  # the store has ended, because all other ranks have read and left
            self.store.add("parted", 1)
            all_parted = self._wait(lambda: int(self.store.add("parted", 0)) >= len(self.ranks), timeout_s)
            for key in keys if all_parted else ():
                self.store.delete_key(key)

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        # Polls, since `store.wait` would block the connection for this rank's other threads.
        deadline, pause = time.monotonic() + timeout_s, FIRST_PAUSE_S
        while not condition():
            if time.monotonic() > deadline:
                return False
            self.on_poll()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return True
