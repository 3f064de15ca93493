"""The public board of ZeRO golf: a table for each course, and every entry's code, folded."""

import html
import re
from collections.abc import Iterator

from places import SiteError

from lessons import golf_board
from lessons.golf_board import Entry
from lessons.registry import COURSES


def render(_: str, page: str) -> str:
    """All courses. An entry that breaks a rule stops the build."""
    found = golf_board.entries()
    for entry in found:
        if why := golf_board.refused(entry, entry.path, found):
            raise SiteError(f"{entry.path.name}: {why}")
    return "\n".join(line for course in COURSES for line in _course(course, found))


def _course(course: str, found: list[Entry]) -> Iterator[str]:
    mine = [entry for entry in found if entry.course == course]
    yield f"\n### Course {course}: {COURSES[course]} {{ #board-{course} }}\n"
    yield "| place | name | score | live bytes at the most | bytes sent | collectives | date |"
    yield "|---:|---|---:|---:|---:|---:|---|"
    for place, entry in enumerate(mine, 1):
        numbers = " | ".join(f"{entry.cost[what]:,}" for what in golf_board.COSTS)
        at = "-" if entry.is_start else place
        yield f"| {at} | {escaped(entry.name)} | {entry.score:.1f} | {numbers} | {entry.date} |"
    yield ""
    for entry in mine:
        fence = "`" * (2 + max(map(len, re.findall("`+", entry.source)), default=1))
        yield '<details markdown="1">'
        yield f"<summary>The code of {escaped(entry.name)}</summary>\n"
        yield f"{fence}python\n{entry.source.rstrip()}\n{fence}\n"
        yield "</details>\n"


def escaped(name: str) -> str:
    """A name as it was given, whatever Markdown or HTML would make of it."""
    safe = (c if c.isalnum() or c == " " else f"&#{ord(c)};" for c in html.unescape(name))
    return "".join(safe)
