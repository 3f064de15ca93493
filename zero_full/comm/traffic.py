"""Traffic: bytes that this rank has sent, by kind of collective.

These are logical bytes, which an optimal algorithm puts on the wire. Shared memory sends none and a poor
algorithm sends more, but the count is the same, so that runs can be compared with the formulas.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class CollectiveCall:
    """A collective that is about to run."""

    by: object  # the communicator
    number: int  # of the communicator's calls before this one
    kind: str
    name: str  # of the data: a bucket, a parameter
    sent: int  # bytes


class Listener(Protocol):
    """Observes every collective: see `flight/recorder.py`."""

    def collective(self, call: CollectiveCall, make: Callable[[], None]) -> None:
        """Call `make`, which makes the collective, and record it."""


class Traffic:
    """Bytes sent by this rank, by kind of collective."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.listener: Listener | None = None

    def add(self, kind: str, sent: int) -> None:
        """Count the bytes of one collective."""
        if sent:
            self.sent[kind] += sent

    def total(self) -> int:
        """Return the sum of the bytes of all kinds."""
        return sum(self.sent.values())

    def clear(self) -> None:
        """Reset all counts to zero."""
        self.sent.clear()
