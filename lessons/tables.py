"""Tables in the terminal. A table that is wider than the terminal is printed row by row."""

import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TypeVar

from rich.console import Console
from rich.measure import Measurement
from rich.progress import track
from rich.table import Table

Item = TypeVar("Item")
WIDTH = 110  # of output that goes into a file or a pipe


def console() -> Console:
    """The terminal, with its width, or that of the variable COLUMNS."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else WIDTH, highlight=False)


def waiting(items: Sequence[Item], what: str) -> Iterable[Item]:
    """The items, with a progress bar on stderr if that is a terminal."""
    out = Console(stderr=True)
    return track(items, what, console=out, transient=True, disable=not out.is_terminal)


def print_table(rows: Sequence[Sequence[str]], title: str = "", right: bool = False) -> None:
    """Print a table whose first row is the header. `right`: all columns but the first are right-justified."""
    header, *body = rows
    drawn = Table(title=title or None, show_lines=any("\n" in cell for row in rows for cell in row))
    for place, name in enumerate(header):
        drawn.add_column(name, justify="right" if right and place else "left")
    for row in body:
        drawn.add_row(*row)
    out = console()
    if Measurement.get(out, out.options.update(max_width=1000), drawn).maximum <= out.width:
        out.print(drawn)
        return
    if title:
        out.print(title, markup=False)
    fitted = partial(textwrap.fill, width=out.width, subsequent_indent="  ")
    for line in "\n".join(stacked(header, row) for row in body).splitlines():
        print(fitted(line, break_long_words=False, break_on_hyphens=False))  # paths stay whole


def stacked(header: Sequence[str], row: Sequence[str]) -> str:
    """One row as lines: its first cells without a name, then a name and a cell a line."""
    named = [(name, cell) for name, cell in zip(header, row, strict=True) if name and cell]
    wide = max((len(name) for name, _ in named), default=0)
    first = " ".join(cell for name, cell in zip(header, row, strict=True) if cell and not name)
    if not first and named:
        (_, first), *named = named
    if any("\n" in cell or len(name) > 14 for name, cell in named):  # texts, each below the one before
        lines = [line for _, cell in named for line in cell.splitlines()]
        return "\n  ".join([f"{first}  {lines[0]}" if first else lines[0], *lines[1:]])
    return "\n".join([first, *(f"  {name:<{wide}}  {cell}" for name, cell in named)])
