"""A failing test as a learner reads it: what it found, what that means, where, and what to read."""

import ast
import builtins
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from lessons.diagnose import Finding, of_error, of_facts
from lessons.evidence import Evidence, Facts, WrongError
from lessons.exercise import shown, tasks, tasks_at, tasks_named, written
from lessons.registry import Lesson

VAGUE = ("other", "ratio", "too many bytes", "too few bytes", "raises", "refused", "memory", "length")
IDLE = ast.Name | ast.Attribute | ast.Subscript | ast.Compare | ast.BinOp  # values that nobody keeps
EXPLAINS = re.compile(r"^<!-- explains: (.+) -->$", re.MULTILINE)


@dataclass(frozen=True)
class Failure:
    """What is known of a test that failed."""

    test: str
    error: str  # the exception's class
    message: str
    facts: Facts | None = None
    misspelt: tuple[str, str] | None = None  # a name that does not exist, and one like it that does
    places: tuple[tuple[Path, int], ...] = ()  # lines of a learner's file that were running, innermost last
    node: str = ""  # what pytest calls the test
    seconds: float = 0.0  # that it took


def failure_of(
    test: str, error: BaseException, works: Sequence[Path], node: str = "", seconds: float = 0.0
) -> Failure:
    """Look through an exception and its causes, down to the one that a rank raised."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    facts = next((each.facts for each in chain if isinstance(each, WrongError)), None)
    places = tuple(place for each in chain for place in _lines_of(each, works))
    root = chain[-1]
    message = str(facts) if facts else str(root) or type(root).__name__
    return Failure(test, type(root).__name__, message, facts, _misspelt(root, works), places, node, seconds)


def _misspelt(error: BaseException, works: Sequence[Path]) -> tuple[str, str] | None:
    """The name in a learner's line that Python does not know, and the nearest that it knows there."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if not isinstance(error, NameError | AttributeError) or not error.name:
        return None
    if at is None or Path(at.tb_frame.f_code.co_filename) not in works:
        return None
    if isinstance(error, AttributeError):
        known = dir(error.obj)
    else:
        known = [*at.tb_frame.f_locals, *at.tb_frame.f_globals, *dir(builtins)]
    alike = get_close_matches(error.name, [name for name in known if name != error.name], 1)
    return (error.name, alike[0]) if alike else None


def _lines_of(error: BaseException, works: Sequence[Path]) -> Iterator[tuple[Path, int]]:
    at = error.__traceback__
    while at is not None:
        path = Path(at.tb_frame.f_code.co_filename)
        if path in works:
            yield path, at.tb_lineno
        at = at.tb_next


@dataclass(frozen=True)
class Paragraph:
    """A place in a lesson's text: what it explains, its line, and the heading above it."""

    name: str  # a task, or TASK/MISTAKE
    path: Path  # of the text, or of the page that is built from it
    line: int
    heading: str

    @property
    def mark(self) -> str:
        """Its name on the page that is built."""
        return "explains-" + re.sub(r"\W+", "-", self.name.lower())

    def __str__(self) -> str:
        place = f"#{self.mark}" if self.path.suffix == ".html" else f":{self.line}"
        return f'{shown(self.path)}{place}, "{self.heading}"'


def paragraphs(lesson: Lesson) -> dict[str, Paragraph]:
    """What the lesson's text explains, as it says in comments, by name."""
    found, heading = {}, ""
    text = (lesson.path / "lesson.md").read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            heading = line.lstrip("#").strip()
        elif match := EXPLAINS.fullmatch(line):
            for name in match[1].split(", "):
                found[name] = Paragraph(name, lesson.page, number + 2, heading)
    return found


@dataclass(frozen=True)
class Verdict:
    """A failure, what it means (None for claims about more than one task), whose task it is, what to read."""

    failure: Failure
    finding: Finding | None
    tasks: list[str]
    place: tuple[Path, int] | None
    paragraph: Paragraph | None
    evidence: Evidence | None = None  # from a run beside the answer
    held: str = ""  # the last claim that holds
    idle: str = ""  # a line of the task that does nothing

    @property
    def means(self) -> str | None:
        """What it means: a pattern that has a name, unless the evidence says it better."""
        if self.finding is None or (self.evidence is not None and self.finding.mistake in VAGUE):
            return None
        return self.finding.words

    def text(self, lesson: Lesson) -> str:
        """All of it, for the terminal."""
        lines = [f"failed: {self.failure.test}", "", *(f"  {line}" for line in self._said()), ""]
        if self.evidence is not None:
            lines.append(f"first difference: {self.evidence.words}")
        if self.idle:
            lines.append(self.idle)
        if self.means is not None:
            lines.append(f"{'that is' if self.evidence is None else 'perhaps'}: {self.means}")
        if self.place is not None:
            work, number = self.place
            line = work.read_text(encoding="utf-8").splitlines()[number - 1].strip()
            lines.append(f"in {shown(work)}, line {number}: {line}")
        if self.held:
            lines.append(f"the last claim that holds: {self.held}")
        if self.paragraph is not None:
            lines.append(f"read: {self.paragraph}")
        one = self.tasks[0] if len(self.tasks) == 1 else f"TASK, where TASK is one of {', '.join(self.tasks)}"
        return "\n".join([*lines, f"help: python -m lessons hint {lesson.number} {one}"])

    def facts(self) -> dict[str, object]:
        """The same for a program to read."""
        work, line = self.place or (None, None)
        return {
            "said": "\n".join(self._said()),
            "mistake": self.finding.mistake if self.finding else None,
            "means": self.means,
            "first_difference": self.evidence.words if self.evidence else None,
            "tasks": self.tasks,
            "file": work.name if work else None,
            "line": line,
            "read": str(self.paragraph) if self.paragraph else None,
        }

    def _said(self) -> list[str]:
        named = "" if self.failure.facts else f"{self.failure.error}: "
        return f"{named}{self.failure.message}".splitlines()[:14]


def verdict(
    lesson: Lesson,
    failure: Failure,
    blanks: Sequence[str] = (),
    evidence: Evidence | None = None,
    held: str = "",
) -> Verdict:
    """Name the mistake and its task: by the evidence, else by the line that was running, else by the test."""
    by_name = tasks_named(lesson, failure.test)
    place, about = None, by_name
    if failure.facts is not None:
        meant: Finding | None = of_facts(failure.facts)
    elif failure.error in ("AssertionError", "Failed"):
        meant = None
    else:
        meant = of_error(failure.error, failure.message, failure.misspelt)
        # What a hook has returned is seen later, by autograd: no line that runs then has done it.
        places = () if meant.mistake == "hook returns" else failure.places
        for place in reversed(places):  # the innermost, but rather one of the task that is tested
            at = tasks_at(lesson, *place)
            about = [task for task in at if task in by_name]
            if about:
                break
        else:
            place = places[-1] if places else None
            about = (tasks_at(lesson, *place) if place else []) or by_name
    if evidence is not None:
        about, place = [evidence.task], evidence.place or (place if evidence.task in about else None)
    about = about or list(blanks[:1]) or tasks(lesson)
    paragraph = explains(lesson, about[0], meant.mistake if meant else "") if len(about) == 1 else None
    idle = idle_line(lesson, about[0]) if len(about) == 1 else ""
    return Verdict(failure, meant, about, place, paragraph, evidence, held, idle)


def idle_line(lesson: Lesson, task: str) -> str:
    """What a line among the task's does not do that looks as if it did: call, or assign; nothing if none."""
    for answer, work in lesson.files:
        if not work.exists():
            continue
        source = work.read_text(encoding="utf-8")
        lines = written(lesson, answer, source).get(task, range(0))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Expr) and node.lineno - 1 in lines and isinstance(node.value, IDLE):
                text = ast.unparse(node.value)
                named = isinstance(node.value, ast.Name | ast.Attribute)
                why = f"`{text}()` would call it" if named else "its value is not kept"
                return f"line {node.lineno} of {shown(work)} does nothing: `{text}` stands alone, and {why}"
    return ""


def explains(lesson: Lesson, task: str, mistake: str) -> Paragraph | None:
    """The paragraph about this mistake, or else about the task."""
    known = paragraphs(lesson)
    return known.get(f"{task}/{mistake}", known.get(task))
