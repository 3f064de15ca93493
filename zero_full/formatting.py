"""Lists, tables and values in messages, cut where nobody reads on; sizes as people write them."""

import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from itertools import zip_longest

SHOWN = 8  # names of a list
WIDE = 60  # characters of a value
NARROW, INDENT = 40, 4  # characters: of a line at least, and before what has no room behind its name
SCALES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


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


def counted(number: int, what: str) -> str:
    """As in "1 rank" or "2 ranks"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts layers.2 before layers.10."""
    parts = re.split("([0-9]+)", name)
    return [(len(part.lstrip("0")) if place % 2 else 0, part) for place, part in enumerate(parts)]


def printable(text: str) -> str:
    """The text without characters that command a terminal: names in a file can be anybody's."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def terminal() -> int:
    """How many characters a line may have: the terminal's, or COLUMNS; 80 where there is neither."""
    return max(NARROW, shutil.get_terminal_size().columns)


def behind(name: str, value: str, column: int, width: int) -> list[str]:
    """Lines of a table of two columns, whose second begins at `column`. Words stay whole."""
    lines = textwrap.wrap(value, max(width - column, 1), break_long_words=False, break_on_hyphens=False)
    if all(len(line) <= width - column for line in lines):
        return [f"{left:<{column}}{line}".rstrip() for left, line in zip_longest([name], lines, fillvalue="")]
    lines = textwrap.wrap(value, width - INDENT, break_long_words=False, break_on_hyphens=False)
    return [name, *(" " * INDENT + line for line in lines)]  # a path, for example, as far left as possible


def human(size: int | None) -> str:
    """Three digits and a unit; decimal, as in the papers."""
    if size is None:
        return "unknown"
    for scale, unit in SCALES:
        if size >= scale * 0.9995:
            number = size / scale
            return f"{number:.{max(0, 3 - len(str(round(number))))}f} {unit}"
    return f"{size} B"


def duration(seconds: float) -> str:
    """Three digits and a unit."""
    return f"{rate(seconds)} s" if seconds >= 0.9995 else f"{rate(seconds * 1000)} ms"


def rate(number: float) -> str:
    """Three digits, or all those before the point."""
    return f"{number:,.{next((d for d, least in enumerate((99.95, 9.995)) if number >= least), 2)}f}"


def size_of(text: str) -> int:
    """How many bytes "5GB", "500 MB", "1.5GiB" or "4096" are. ValueError if it is no size above zero."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*(?:([kmgt])(i?))?b?", text.strip().lower(), re.ASCII)
    size = 0
    if found is not None:
        base, power = (1024 if found[3] else 1000), " kmgt".index(found[2] or " ")
        size = int(float(found[1]) * base**power)
    if size < 1:
        raise ValueError(f"{shown(text)} is no size: write it as in 5GB, 500MB or 2GiB")
    return size
