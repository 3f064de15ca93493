"""Fill the marked blocks of the lessons' texts with code, measured numbers and output.

A block is `<!-- weave: KIND ARGUMENTS -->` ... `<!-- /weave -->` in a lesson.md. `make weave` refreshes
all of them and the drawings; a test asks that nothing would change. README and the notebooks get what follows
from the project's public address. `python -m lessons.weave plots` also runs the experiments, for their plots.
"""

import difflib
import importlib
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import zero_min
from lessons import bill, contents, draw, repository
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
    """`bill ROW; ROW`: the measured table of bytes per parameter, four ranks."""
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


def address(what: str) -> str:
    """`address clone`: how to fetch the project. `address notebooks`: links that open them elsewhere."""
    if what == "clone":
        return repository.clone()
    return repository.elsewhere([path.stem for path in notebooks()])


def listed(what: str) -> str:
    """`contents lessons`: a table of them. `contents questions`: all of them."""
    return {"lessons": contents.lessons, "questions": contents.questions}[what]()


def notebooks() -> list[Path]:
    """All there are."""
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


KINDS: dict[str, Callable[[str], str]] = {
    "address": address,
    "before": contents.before,
    "contents": listed,
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
    """The drawing that stands in a lesson: who holds what at its stage, or a drawing of its own."""
    return draw.OF_NO_STAGE[lesson.number]() if lesson.stage is None else draw.stage(lesson.stage)


def woven(lesson: Lesson) -> dict[Path, str]:
    """The files of one lesson that are made, with what they should contain."""
    text = lesson.path / "lesson.md"
    drawings = {"ranks.svg": picture_of(lesson)}
    drawings |= {name: drawn() for name, drawn in draw.OF_ONE_LESSON.get(lesson.number, {}).items()}
    made = {lesson.path / name: drawing for name, drawing in drawings.items()}
    return {text: weave(text.read_text(encoding="utf-8")), **made}


def front() -> dict[Path, str]:
    """The README with its drawing of every stage there is, and the notebooks with their list."""
    made = {ROOT / "lessons" / "staircase.svg": draw.staircase(list(zero_min.STAGES))}
    for text in (ROOT / "README.md", ROOT / "lessons" / "README.md", ROOT / "notebooks" / "README.md"):
        made[text] = weave(text.read_text(encoding="utf-8"))
    return made | {path: repository.with_install_cell(path) for path in notebooks()}


def draw_plots() -> None:
    """Run every experiment as its lesson says, and put its plot beside the text. That takes minutes."""
    for lesson in LESSONS:
        importlib.import_module(f"lessons.{lesson.folder}.experiment").main()
        drawn = ROOT / "build" / "lessons" / f"step{lesson.label}.svg"
        (lesson.path / "plot.svg").write_text(drawn.read_text(encoding="utf-8"), encoding="utf-8")


def main() -> int:
    """Refresh all lessons and drawings; say what changed. With `plots`, run the experiments before."""
    if sys.argv[1:] == ["plots"]:
        draw_plots()
    for made in [front(), *(woven(lesson) for lesson in LESSONS)]:
        for path, content in made.items():
            if not path.exists() or path.read_text(encoding="utf-8") != content:
                path.write_text(content, encoding="utf-8")
                print(f"refreshed {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
