"""User calls: a public call that uses collectives is made by every rank, or raises before it sends data.

`if rank == 0: torch.save(engine.module_state_dict(), path)` would gather parameters on one rank while the
others train, and its collectives would pair with theirs, which carry other tensors. So each rank first writes
its call into the process group's store, and waits until all ranks have. A training step does not do this.

A rank raises when the others do not come within the group's timeout. In shared memory it can raise earlier:
it sees that others wait for it in a collective of the step, a wait that would never end.
"""

import logging
import time
from collections.abc import Callable, Iterable

from zero_full.comm.communicator import Communicator
from zero_full.comm.store_messages import StoreMessages, longest_timeout
from zero_full.comm.stores import numbered_topic, write_error
from zero_full.errors import AbsentError, DesyncError

log = logging.getLogger("zero_full")
WARN_AFTER_S = 10.0  # how long a rank waits before it warns
STUCK_AFTER_S = 1.0  # how long this rank and others wait for each other before it raises
EVERY_RANK = "Every rank must make this call, not only one inside `if rank == 0`"


class UserCalls:
    """Compares the user's calls of one engine between the ranks of a group."""

    def __init__(self, group: Communicator, communicators: Iterable[Communicator]) -> None:
        """`communicators` are all communicators of the engine, in which other ranks may wait for this one."""
        self.group, self.communicators, self.number = group, communicators, 0
        self.rank = group.ranks[group.rank]
        topic = numbered_topic("user_calls", group.ranks, self.rank)
        self.messages = StoreMessages(topic, group.ranks, self._on_poll)
        self.drain: Callable[[], object] = list
        self.started = self.stuck_since = 0.0
        self.has_warned = False
        self.call = ""

    def announce(self, call: str) -> None:
        """Write this rank's call for the others, without waiting for theirs."""
        self.group.check_open(call)
        self.number += 1
        self.messages.write(f"{self.number}/{self.rank}", call)

    def __call__(self, call: str, drain: Callable[[], object]) -> None:
        """Wait until all ranks have made this call; DesyncError if one makes another call or does not come.

        drain  waits for the queued collectives of this rank
        """
        self.announce(call)
        self.call, self.drain = call, drain
        self.started, self.stuck_since, self.has_warned = time.monotonic(), 0.0, False
        keys = [f"{self.number}/{rank}" for rank in self.group.ranks]
        try:
            calls = self.messages.read(keys, longest_timeout([self.group]))
        except AbsentError:
            raise self._desync_error(", and the group's timeout is over") from None
        if len(set(calls)) > 1:
            lines = (f"rank {rank}: {text}" for rank, text in zip(self.group.ranks, calls, strict=True))
            raise DesyncError("\n  ".join(["the ranks make different calls, and nothing was sent:", *lines]))
        if self.number > 1:  # all ranks have read it: they are at the next call
            self.messages.store.delete_key(f"{self.number - 1}/{self.rank}")

    def _on_poll(self) -> None:
        """Raise if other ranks wait for this one in a collective, and warn after a long wait."""
        now = time.monotonic()
        awaited_by = sorted({rank for each in self.communicators for rank in each.awaited_by()})
        if not awaited_by:
            self.stuck_since = 0.0
        elif not self.stuck_since:
            self.drain()
            self.stuck_since = time.monotonic()
        elif now - self.stuck_since > STUCK_AFTER_S:
            raise self._desync_error(
                f", while ranks {awaited_by} wait for rank {self.rank} in a collective of forward, backward "
                "or step"
            )
        if now - self.started > WARN_AFTER_S and not self.has_warned:
            self.has_warned = True
            log.warning("%s. %s", self._absent_ranks(), EVERY_RANK)

    def _desync_error(self, why: str) -> DesyncError:
        """Return the error of a rank that made a call which other ranks did not make."""
        error = DesyncError(f"{self._absent_ranks()}{why}. {EVERY_RANK}")
        write_error(self.group.store, self.rank, error)
        return error

    def _absent_ranks(self) -> str:
        absent = [r for r in self.group.ranks if not self.messages.store.check([f"{self.number}/{r}"])]
        return f"rank {self.rank} waits in {self.call} for ranks {absent}"
