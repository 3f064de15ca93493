"""Fill the marked blocks of the lessons' texts with code, measured numbers and output.

A block is `<!-- weave: KIND ARGUMENTS -->` ... `<!-- /weave -->` in a lesson.md. `make weave` refreshes
all of them and the drawings; a test asks that nothing would change.
"""

import difflib
import importlib
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import zero_min
from lessons import bill, draw
from lessons.exercise import LessonError, region_lines
from lessons.registry import LESSONS, ROOT, Lesson
from lessons.rows import ROWS

BLOCK = re.compile(r"(<!-- weave: (\w+) (.+?) -->\n).*?(<!-- /weave -->)", re.DOTALL)


def _region(reference: str, dotted: bool = False) -> list[str]:
    path, _, name = reference.partition(":")
    return region_lines(ROOT / path, name, dotted)


def code(reference: str) -> str:
    """`code FILE:REGION`: the lines of a region."""
    return "\n".join(["```python", *_region(reference), "```"])


def frame(reference: str) -> str:
    """`frame FILE:REGION`: the lines of a region, with dots in the place of every answer."""
    return "\n".join(["```python", *_region(reference, dotted=True), "```"])


def diff(references: str) -> str:
    """`diff FILE:REGION FILE:REGION`: how the second region differs from the first."""
    before, after = references.split()
    lines = list(difflib.unified_diff(_region(before), _region(after), n=99, lineterm=""))[3:]
    return "\n".join(["```diff", *lines, "```"])


@cache
def _measured(name: str) -> bill.Bill:
    for row in ROWS:
        if row.name == name:
            return bill.measure(row)
    raise LessonError(f"no row {name!r} in lessons/rows.py")


def bills(names: str) -> str:
    """`bill ROW; ROW`: the measured table of bytes a parameter, four ranks."""
    lines = bill.table([_measured(name.strip()) for name in names.split(";")])
    rule = ["---", *["---:"] * (len(lines[0]) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def timeline(name: str) -> str:
    """`timeline ROW`: what rank 0 did in one step."""
    first = bill.timeline(_measured(name)).split("rank 1")[0]
    return "\n".join(["```text", first.rstrip(), "```"])


def output(reference: str) -> str:
    """`output FOLDER:FUNCTION`: the text a function of the lesson's experiment returns."""
    folder, _, name = reference.partition(":")
    text = getattr(importlib.import_module(f"lessons.{folder}.experiment"), name)()
    return "\n".join(["```text", text.rstrip(), "```"])


KINDS: dict[str, Callable[[str], str]] = {
    "code": code,
    "frame": frame,
    "diff": diff,
    "bill": bills,
    "timeline": timeline,
    "output": output,
}


def weave(text: str) -> str:
    """The text with every block filled anew."""
    return BLOCK.sub(lambda m: f"{m[1]}\n{KINDS[m[2]](m[3].strip())}\n\n{m[4]}", text)


def picture_of(lesson: Lesson) -> str:
    """The drawing that stands in a lesson: who holds what, or how the ring adds up."""
    return draw.ring() if lesson.stage is None else draw.stage(lesson.stage)


def woven(lesson: Lesson) -> dict[Path, str]:
    """The files of one lesson that are made, with what they should contain."""
    text = lesson.path / "lesson.md"
    return {text: weave(text.read_text()), lesson.path / "ranks.svg": picture_of(lesson)}


def picture() -> dict[Path, str]:
    """The README's drawing: every stage there is."""
    return {ROOT / "lessons" / "staircase.svg": draw.staircase(list(zero_min.STAGES))}


def main() -> int:
    """Refresh all lessons and drawings; say what changed."""
    for made in [picture(), *(woven(lesson) for lesson in LESSONS)]:
        for path, content in made.items():
            if not path.exists() or path.read_text() != content:
                path.write_text(content)
                print(f"refreshed {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
