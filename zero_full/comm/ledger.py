"""Bytes this rank has sent, counted at the collective.

Logical bytes: what an exchange without waste puts on the wire. A transport through shared memory sends
nothing, and one with a poor algorithm sends more; the count is the same, so that runs can be compared
with the formulas.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class CollectiveCall:
    """A collective that is about to be made."""

    by: object  # the communicator
    number: int  # how many calls it has made before
    kind: str
    name: str  # of what travels
    sent: int  # bytes


class Listener(Protocol):
    """Who wants to hear of every collective: see `flight/recorder.py`."""

    def collective(self, call: CollectiveCall, make: Callable[[], None]) -> None:
        """Make the call, and note what there is to note."""


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
        """Bytes of all kinds together."""
        return sum(self.sent.values())

    def clear(self) -> None:
        """Start counting from zero again."""
        self.sent.clear()
