"""Exercises are derived from the answer key: marked regions become blanks, nothing is kept twice."""

import ast
import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

from lessons.registry import IN_ORDER, ROOT, Lesson

MARK = re.compile(r"^\s*# --8<-- \[(start|end):(\w+)\]$")
TASK = "ex_"


BLANK = re.compile(r"lesson (\S+), task (\w+): python -m lessons hint")


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


def region_lines(path: Path, name: str, dotted: bool = False) -> list[str]:
    """The lines of one region, moved to the left margin. `dotted`: with dots where the exercises are."""
    source = path.read_text(encoding="utf-8")
    if dotted:
        source = emptied(source, "...  # your task: {}".format)
    for region in regions(source):
        if region.name == name:
            lines = [line for line in source.splitlines()[region.first : region.last] if not MARK.match(line)]
            while not lines[-1].strip():
                lines.pop()
            margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
            return [line[margin:] for line in lines]
    raise LessonError(f"{path} has no region {name!r}")


def tasks(lesson: Lesson) -> list[str]:
    """The names of the exercises, in order."""
    return [
        region.task
        for answer, _ in lesson.files
        for region in task_regions(answer.read_text(encoding="utf-8"))
    ]


def tasks_named(lesson: Lesson, test: str) -> list[str]:
    """The exercise that a test is about, as its name begins; none if it is about several."""
    return [task for task in tasks(lesson) if test.startswith(f"test_{task}_")]


def tasks_at(lesson: Lesson, work: Path, line: int) -> list[str]:
    """The exercises in which this line of a learner's file lies, or at least in whose function."""
    (answer,) = [answer for answer, _ in lesson.files if answer.name == work.name]
    here = function_at(work.read_text(encoding="utf-8"), line)
    source = answer.read_text(encoding="utf-8")
    found = [(x.task, function_at(source, x.first + 1)) for x in task_regions(source)]
    near = [task for task, name in found if f"{here}.".startswith(f"{name}.")]  # a hook stands inside of it
    text = work.read_text(encoding="utf-8")
    inside = [task for task, lines in written(lesson, answer, text).items() if line - 1 in lines]
    return [task for task in near if task in inside] or near


def written(lesson: Lesson, answer: Path, work: str) -> dict[str, range]:
    """What the learner has put in the place of each blank, as line numbers that begin at 0."""
    asked, mine = blank(answer, lesson.number).splitlines(), work.splitlines()
    blocks = difflib.SequenceMatcher(None, asked, mine, autojunk=False).get_matching_blocks()
    pairs = [(block.a + i, block.b + i) for block in blocks for i in range(block.size)]
    found = {}
    for task in (region.task for region in task_regions(answer.read_text(encoding="utf-8"))):
        hole = next(i for i, line in enumerate(asked) if line.strip() == blank_line(lesson.number, task))
        before = max((b for a, b in pairs if a < hole), default=-1)
        after = min((b for a, b in pairs if a > hole), default=len(mine))
        found[task] = range(before + 1, after)
    for one, two in pairwise(list(found)):  # with no line between their blanks both have all of it
        lines = found[one]
        if lines == found[two] and (count := _of_first(answer, one, two, [mine[i].strip() for i in lines])):
            end = lines.start + count
            found |= {one: range(lines.start, end), two: range(end, lines.stop)}
    return found


def _of_first(answer: Path, one: str, two: str, lines: Sequence[str]) -> int:
    """How many of these lines are the first task's: the split most like the answer's, or 0."""
    keys = [[line.strip() for line in region_lines(answer, TASK + task)] for task in (one, two)]

    def alike(end: int) -> float:
        parts = zip((lines[:end], lines[end:]), keys, strict=True)
        return sum(difflib.SequenceMatcher(None, part, key, autojunk=False).ratio() for part, key in parts)

    return max(range(len(lines) + 1), key=alike)


def function_at(source: str, line: int) -> str:
    """The innermost function around a line, by its name and those of what it stands in."""
    around = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return ".".join(node.name for node in sorted(around, key=lambda node: node.lineno))


def task_regions(source: str) -> list[Region]:
    """The regions of one file that are exercises."""
    return [region for region in regions(source) if region.name.startswith(TASK)]


def unmarked(source: str) -> str:
    """A file without the markers of its regions: what a learner sees."""
    return "".join(line for line in source.splitlines(keepends=True) if not MARK.match(line.rstrip("\n")))


def blank(answer: Path, number: int | Fraction) -> str:
    """The answer key with every task's lines replaced by an error that says where help is."""
    return unmarked(emptied(answer.read_text(encoding="utf-8"), lambda task: blank_line(number, task)))


def emptied(source: str, hole: Callable[[str], str]) -> str:
    """A file with every task's lines replaced by `hole` of its name; the markers stay."""
    lines = source.splitlines()
    for region in reversed(task_regions(source)):
        body = [line for line in lines[region.first : region.last] if line.strip()]
        margin = body[0][: len(body[0]) - len(body[0].lstrip())]
        lines[region.first : region.last] = [f"{margin}{hole(region.task)}"]
    return "\n".join(lines) + "\n"


def blank_line(number: int | Fraction, task: str) -> str:
    """What stands in the place of a task's lines; `blank_in` reads it back."""
    message = f"lesson {number}, task {task}: python -m lessons hint {number} {task}"
    return f'raise NotImplementedError("{message}")'


def blank_in(error: BaseException) -> tuple[str, str] | None:
    """The lesson and the task whose blank has raised this, if that is what happened."""
    while error.__cause__ is not None:
        error = error.__cause__
    found = BLANK.match(str(error)) if isinstance(error, NotImplementedError) else None
    return (found[1], found[2]) if found else None


def fill(answer: Path, number: int | Fraction, work: str, leave: str = "") -> str:
    """A work file with every blank's lines taken from the answer key, except the task to `leave`."""
    right, lines = answer.read_text(encoding="utf-8").splitlines(), work.splitlines()
    for region in task_regions(answer.read_text(encoding="utf-8")):
        if region.task != leave:
            (place,) = [i for i, line in enumerate(lines) if line.strip() == blank_line(number, region.task)]
            lines[place : place + 1] = right[region.first : region.last]
    return "\n".join(lines) + "\n"


def find_lesson(number: str) -> Lesson:
    """The lesson with this number."""
    for lesson in IN_ORDER:
        if str(lesson.number) == number:
            return lesson
    known = ", ".join(str(lesson.number) for lesson in IN_ORDER)
    raise LessonError(f"there is no lesson {number!r}; the lessons are {known} (python -m lessons list)")


def built_on(lesson: Lesson) -> list[Lesson]:
    """The lessons whose code this one's needs: what its files import, and what it says it presumes."""
    numbers = re.findall(r"\b\d+(?:/\d+)?", lesson.presumes) if "lesson" in lesson.presumes else []
    wanted = [module for answer, _ in lesson.files for module in _imports(answer)]
    near = [x for x in IN_ORDER if str(x.number) in numbers or set(x.modules) & set(wanted)]
    near = [x for x in near if x != lesson]
    found = {x.number: x for other in near for x in [*built_on(other), other]}
    return sorted(found.values(), key=lambda x: x.number)


def _imports(path: Path) -> list[str]:
    """The modules that a file imports."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]


def start(lesson: Lesson, force: bool = False) -> list[Path]:
    """Write the exercise into work/; an existing answer is kept unless `force`."""
    works = [work for _, work in lesson.files]
    for work in works:
        if work.exists() and not force:
            raise LessonError(
                f"{shown(work)} exists already and may hold your answer. To begin again and lose it: "
                f"python -m lessons start {lesson.number} --force"
            )
    for answer, work in lesson.files:
        work.parent.mkdir(exist_ok=True)
        work.write_text(blank(answer, lesson.number), encoding="utf-8")
    return works


def read_work(lesson: Lesson) -> list[str]:
    """The learner's files, checked to be readable Python."""
    sources = []
    for _, work in lesson.files:
        if not work.exists():
            raise LessonError(f"{shown(work)} does not exist yet: python -m lessons start {lesson.number}")
        sources.append(work.read_text(encoding="utf-8"))
        try:
            ast.parse(sources[-1], filename=str(work))
        except SyntaxError as error:
            place = f"{shown(work)}, line {error.lineno}"
            raise LessonError(f"{place}: {error.msg}\n    {(error.text or '').rstrip()}") from error
    return sources


def unanswered(lesson: Lesson) -> list[str]:
    """Tasks whose blank still stands in a work file."""
    work = "\n".join(read_work(lesson))
    return [task for task in tasks(lesson) if f"task {task}: python -m lessons hint" in work]


def diff(lesson: Lesson) -> str:
    """The learner's files against the answer key."""
    lines: list[str] = []
    for (answer, work), mine in zip(lesson.files, read_work(lesson), strict=True):
        right = unmarked(answer.read_text(encoding="utf-8")).splitlines()
        lines += difflib.unified_diff(mine.splitlines(), right, shown(work), shown(answer), lineterm="")
    return "\n".join(lines) or "your answer is the answer key, letter for letter"


def solution(lesson: Lesson) -> str:
    """The answer key's lines for every task."""
    blocks = []
    for answer, _ in lesson.files:
        for region in task_regions(answer.read_text(encoding="utf-8")):
            lines = "\n".join(f"    {line}" for line in region_lines(answer, region.name))
            blocks.append(f"task {region.task}\n{lines}")
    return "\n\n".join(blocks)


def hints(lesson: Lesson) -> dict[str, list[str]]:
    """The graded hints of every task, read from hints.md."""
    found: dict[str, list[str]] = {}
    for line in (lesson.path / "hints.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            found[line[3:].strip()] = []
        elif match := re.match(r"\d+\. (.*)", line):
            found[list(found)[-1]].append(match[1])
    return found


def hint(lesson: Lesson, task: str, level: int) -> str:
    """Hint `level` of a task; without a name, of the next that is still blank."""
    graded = hints(lesson)
    if not 1 <= level <= 3:
        raise LessonError(f"hints have levels 1, 2 and 3, not {level}")
    task = task or _next_task(lesson)
    if task not in graded:
        raise LessonError(f"lesson {lesson.number} has no task {task!r}; its tasks are {', '.join(graded)}")
    lines = [f"task {task}, hint {level} of 3: {graded[task][level - 1]}"]
    if level < 3:
        lines.append(f"more: python -m lessons hint {lesson.number} {task} {level + 1}")
    return "\n".join(lines)


def _next_task(lesson: Lesson) -> str:
    try:
        blanks = unanswered(lesson)
    except LessonError:  # nothing is started, or no Python yet
        blanks = tasks(lesson)
    if not blanks:
        example = f"python -m lessons hint {lesson.number} {tasks(lesson)[0]}"
        raise LessonError(f"no task is blank; name one of {', '.join(tasks(lesson))}, as in: {example}")
    return blanks[0]


def shown(path: Path) -> str:
    """A path as the learner types it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
