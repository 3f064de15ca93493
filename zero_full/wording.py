"""Lists in messages, cut where nobody reads on."""

from collections.abc import Sequence

SHOWN = 8


def listed(names: Sequence[str], most: int = SHOWN) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def ranks_listed(ranks: Sequence[int]) -> str:
    """All of them."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
