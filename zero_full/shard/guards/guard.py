"""Protocol of the guards, which detect changes by user code that a step would ignore."""

from typing import Protocol


class Guard(Protocol):
    """Check for one kind of change by user code."""

    def check(self) -> None:
        """Raise if user code made a change that a step would ignore; undo those that can be undone."""
