"""Lists and values in messages, cut where nobody reads on."""

from collections.abc import Callable, Sequence

SHOWN = 8  # names of a list
WIDE = 60  # characters of a value


def listed(names: Sequence[str], most: int = SHOWN) -> str:
    """The first names in a row, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def ranks_listed(ranks: Sequence[int]) -> str:
    """All ranks in a row: "ranks 0, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def shown(value: object, write: Callable[[object], str] = repr) -> str:
    """A value on one line, whatever it is, as `write` writes it."""
    try:
        text = " ".join(write(value).split())
    except (TypeError, ValueError, RecursionError):  # what JSON lacks, thousands of digits, a list in itself
        text = f"something of type {type(value).__name__}"
    return text if len(text) <= WIDE else f"{text[: WIDE - 3]}..."
