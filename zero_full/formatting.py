"""Format lists, tables, values and sizes for messages, cut to a readable length."""

import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

SHOWN = 8  # names shown of a list
WIDE = 60  # characters shown of a value
NARROW, INDENT = 40, 4  # characters: minimum line width; indent of a value on its own line
SCALES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def listed(names: Sequence[str], limit: int = SHOWN) -> str:
    """Return the first names, comma-separated, and the number of the others."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def ranks_listed(ranks: Sequence[int]) -> str:
    """Return all ranks as text: "ranks 0, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def by_value(of_ranks: Mapping[int, str]) -> list[str]:
    """Return each different value with its ranks: "fp32 on rank 0" and "fp16 on ranks 1, 2"."""
    ranks: dict[str, list[int]] = {}
    for rank, value in of_ranks.items():
        ranks.setdefault(value, []).append(rank)
    return [f"{value} on {ranks_listed(those)}" for value, those in ranks.items()]


def shown(value: object, write: Callable[[object], str] = repr) -> str:
    """Return any value on one line, formatted by `write`."""
    try:
        text = " ".join(write(value).split())
    except (TypeError, ValueError, RecursionError):  # no JSON value, a huge integer, a self-referencing list
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= WIDE else f"{text[: WIDE - 3]}..."


def counted(number: int, what: str) -> str:
    """Return a count with its noun: "1 rank" or "2 ranks"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layers.2 before layers.10."""
    parts = re.split("([0-9]+)", name)
    return [(len(part.lstrip("0")) if place % 2 else 0, part) for place, part in enumerate(parts)]


def printable(text: str) -> str:
    """Escape control characters, since names from an untrusted file could control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def terminal_width() -> int:
    """Return the line width in characters: the terminal's, or COLUMNS, or else 80."""
    return max(NARROW, shutil.get_terminal_size().columns)


def flowed(items: Sequence[str], width: int) -> list[str]:
    """Return items in lines of at most `width` characters, two spaces apart. No item is broken."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 2 + len(item) <= width:
            lines[-1] += f"  {item}"
        else:
            lines.append(item)
    return lines


def table_row(name: str, value: str, column: int, width: int) -> list[str]:
    """Return the lines of a two-column table row, whose second column begins at `column`.

    Words are not broken.
    """
    lines = textwrap.wrap(value, max(width - column, 1), break_long_words=False, break_on_hyphens=False)
    if all(len(line) <= width - column for line in lines):
        return [f"{left:<{column}}{line}".rstrip() for left, line in zip_longest([name], lines, fillvalue="")]
    lines = textwrap.wrap(value, width - INDENT, break_long_words=False, break_on_hyphens=False)
    return [name, *(" " * INDENT + line for line in lines)]  # long words, such as paths, need their own line


def human(size: int | None) -> str:
    """Return a size with three digits and a decimal unit."""
    if size is None:
        return "unknown"
    for scale, unit in SCALES:
        if size >= scale * 0.9995:
            number = size / scale
            return f"{number:.{max(0, 3 - len(str(round(number))))}f} {unit}"
    return f"{size} B"


def duration(seconds: float) -> str:
    """Return a time with three digits and a unit."""
    return f"{three_digits(seconds)} s" if seconds >= 0.9995 else f"{three_digits(seconds * 1000)} ms"


def three_digits(number: float) -> str:
    """Return a number with three digits, or with all digits before the point."""
    return f"{number:,.{next((d for d, least in enumerate((99.95, 9.995)) if number >= least), 2)}f}"


def parse_size(text: str) -> int:
    """Parse a size such as "5GB", "500 MB", "1.5GiB" or "4096". Raises ValueError unless it is above zero."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*(?:([kmgt])(i?))?b?", text.strip().lower(), re.ASCII)
    size = 0
    if found is not None:
        base, power = (1024 if found[3] else 1000), " kmgt".index(found[2] or " ")
        size = int(float(found[1]) * base**power)
    if size < 1:
        raise ValueError(f"{shown(text)} is not a size: write it as in 5GB, 500MB or 2GiB")
    return size
