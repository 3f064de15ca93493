"""Bytes this rank has sent, counted at the collective.

Logical bytes: what an exchange without waste puts on the wire. A transport through shared memory sends
nothing, and one with a poor algorithm sends more; the count is the same, so that runs can be compared
with the formulas.
"""

from collections import Counter


class Traffic:
    """Bytes sent by this rank, by kind of collective."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()

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
