"""Exercises are derived from the answer key: marked regions become blanks, nothing is kept twice."""

import ast
import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from lessons.registry import LESSONS, ROOT, Lesson

MARK = re.compile(r"^\s*# --8<-- \[(start|end):(\w+)\]$")
TASK = "ex_"


class LessonError(Exception):
    """Something the learner can put right; the message says how."""


@dataclass(frozen=True)
class Region:
    """The lines between a start and an end marker, without the markers."""

    name: str
    first: int  # index of the first line inside
    last: int  # one past the last

    @property
    def task(self) -> str:
        """The exercise's name."""
        return self.name.removeprefix(TASK)


def regions(source: str) -> list[Region]:
    """All marked regions of a file, in order."""
    found, open_at = [], {}
    for number, line in enumerate(source.splitlines()):
        mark = MARK.match(line)
        if mark is None:
            continue
        kind, name = mark.groups()
        if kind == "start":
            open_at[name] = number + 1
        else:
            found.append(Region(name, open_at.pop(name), number))
    if open_at:
        raise LessonError(f"region {', '.join(open_at)} has a start marker and no end marker")
    return found


def region_lines(path: Path, name: str) -> list[str]:
    """The lines of one region, moved to the left margin."""
    source = path.read_text()
    for region in regions(source):
        if region.name == name:
            lines = [line for line in source.splitlines()[region.first : region.last] if not MARK.match(line)]
            margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
            return [line[margin:] for line in lines]
    raise LessonError(f"{path} has no region {name!r}")


def tasks(lesson: Lesson) -> list[Region]:
    """The regions that are exercises."""
    return [region for region in regions(lesson.answer.read_text()) if region.name.startswith(TASK)]


def blank(lesson: Lesson) -> str:
    """The answer key with every task's lines replaced by an error that says where help is."""
    lines = lesson.answer.read_text().splitlines()
    for region in reversed(tasks(lesson)):
        body = [line for line in lines[region.first : region.last] if line.strip()]
        margin = body[0][: len(body[0]) - len(body[0].lstrip())]
        message = f"lesson {lesson.number}, task {region.task}: python -m lessons hint {lesson.number}"
        lines[region.first : region.last] = [f'{margin}raise NotImplementedError("{message}")']
    return "\n".join(lines) + "\n"


def fill(lesson: Lesson, work: str) -> str:
    """A work file with every task's lines taken from the answer key."""
    answer, lines = lesson.answer.read_text().splitlines(), work.splitlines()
    wanted = {region.name: region for region in tasks(lesson)}
    for region in reversed(regions(work)):
        if region.name in wanted:
            answered = wanted[region.name]
            lines[region.first : region.last] = answer[answered.first : answered.last]
    return "\n".join(lines) + "\n"


def find_lesson(number: str) -> Lesson:
    """The lesson with this number."""
    for lesson in LESSONS:
        if str(lesson.number) == number:
            return lesson
    known = ", ".join(str(lesson.number) for lesson in LESSONS)
    raise LessonError(f"there is no lesson {number!r}; the lessons are {known} (python -m lessons list)")


def start(lesson: Lesson, force: bool = False) -> Path:
    """Write the exercise into work/; an existing answer is kept unless `force`."""
    if lesson.work.exists() and not force:
        raise LessonError(
            f"{shown(lesson.work)} exists already and may hold your answer. To begin again and lose it: "
            f"python -m lessons start {lesson.number} --force"
        )
    lesson.work.parent.mkdir(exist_ok=True)
    lesson.work.write_text(blank(lesson))
    return lesson.work


def read_work(lesson: Lesson) -> str:
    """The learner's file, checked to be readable Python."""
    if not lesson.work.exists():
        raise LessonError(f"{shown(lesson.work)} does not exist yet: python -m lessons start {lesson.number}")
    source = lesson.work.read_text()
    try:
        ast.parse(source, filename=str(lesson.work))
    except SyntaxError as error:
        place = f"{shown(lesson.work)}, line {error.lineno}"
        raise LessonError(f"{place}: {error.msg}\n    {(error.text or '').rstrip()}") from error
    return source


def unanswered(lesson: Lesson) -> list[str]:
    """Tasks whose blank still stands in the work file."""
    work = read_work(lesson)
    return [region.task for region in tasks(lesson) if f"task {region.task}: python -m lessons hint" in work]


def diff(lesson: Lesson) -> str:
    """The learner's file against the answer key."""
    mine, answer = read_work(lesson).splitlines(), lesson.answer.read_text().splitlines()
    lines = difflib.unified_diff(mine, answer, shown(lesson.work), lesson.source, lineterm="")
    return "\n".join(lines) or "your file is the answer key, letter for letter"


def solution(lesson: Lesson) -> str:
    """The answer key's lines for every task."""
    blocks = []
    for region in tasks(lesson):
        lines = "\n".join(f"    {line}" for line in region_lines(lesson.answer, region.name))
        blocks.append(f"task {region.task}\n{lines}")
    return "\n\n".join(blocks)


def hints(lesson: Lesson) -> dict[str, list[str]]:
    """The graded hints of every task, read from hints.md."""
    found: dict[str, list[str]] = {}
    for line in (lesson.path / "hints.md").read_text().splitlines():
        if line.startswith("## "):
            found[line[3:].strip()] = []
        elif match := re.match(r"\d+\. (.*)", line):
            found[list(found)[-1]].append(match[1])
    return found


def hint(lesson: Lesson, level: int) -> str:
    """Hint `level` of every task that is still blank, or of all tasks when none is."""
    graded = hints(lesson)
    if not 1 <= level <= 3:
        raise LessonError(f"hints have levels 1, 2 and 3, not {level}")
    try:
        wanted = unanswered(lesson) or list(graded)
    except LessonError:
        wanted = list(graded)
    lines = [f"task {task}, hint {level} of 3: {graded[task][level - 1]}" for task in wanted[:1]]
    if len(wanted) > 1:
        lines.append(f"(after that: {', '.join(wanted[1:])})")
    if level < 3:
        lines.append(f"more: python -m lessons hint {lesson.number} {level + 1}")
    return "\n".join(lines)


def shown(path: Path) -> str:
    """A path as the learner types it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
