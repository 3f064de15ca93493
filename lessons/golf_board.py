"""The public board of ZeRO golf: one file for each entry, so that pull requests do not conflict.

`golf N --submit NAME` judges work/golfN.py and writes the entry. `golf --replay` judges entries again: one
counts if its code keeps the rules (`lessons/golf_rules.py`) and costs what it claims. It runs in a process
of its own, which writes what it has found where the code does not know. What a forger prints or exits with
is not read.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from lessons import golf_rules, interrupt, registry, replace
from lessons.exercise import LessonError, shown
from lessons.registry import COURSES, ROOT

BOARD = ROOT / "lessons" / "golf_board"
START = ROOT / "lessons" / "golf_start.py"
OURS = "The start of the course"  # golf_start.py, by the project: over the limit, so it has no place
RULES = 1  # of the game: a change that changes scores makes it 2, and old entries are played again
KIND = "an entry of ZeRO golf"
LIMIT = 120  # seconds
LONGEST = 40  # characters of a name
COSTS = ("peak", "sent", "calls")


@dataclass(frozen=True)
class Entry:
    """One schedule of the board, and what it claims."""

    rules: int
    course: str
    name: str
    date: str
    score: float
    cost: Mapping[str, int]
    code: Sequence[str]  # its lines, so that a reviewer can read them

    @property
    def source(self) -> str:
        """The file that is played."""
        return "\n".join(self.code) + "\n"

    @property
    def is_start(self) -> bool:
        """Whether it is the file with which the course begins."""
        return self.source == START.read_text(encoding="utf-8")

    @property
    def path(self) -> Path:
        """Its place on the board."""
        return BOARD / f"{self.course}_{slug(self.name)}.json"


def slug(name: str) -> str:
    """A name as a part of a file's name: two names that look alike have the same."""
    plain = unicodedata.normalize("NFKD", name).casefold()
    return re.sub(r"[^\w]+", "-", "".join(c for c in plain if not unicodedata.combining(c))).strip("-")


def check_name(name: str) -> None:
    """Raise LessonError unless it is a name that a page can show."""
    printable = name.isprintable() and not any(unicodedata.category(c) == "Cf" for c in name)
    if not (name == name.strip() and 0 < len(name) <= LONGEST and printable and slug(name)):
        raise LessonError(
            f"{name!r} is no name for the board: give 1 to {LONGEST} characters that can be printed"
        )


def entries() -> list[Entry]:
    """All there are, the best of each course first, and the course's start last."""
    found = [read(path) for path in sorted(BOARD.glob("*.json"))]
    return sorted(found, key=lambda x: (x.course, x.is_start, x.score, x.date, x.name))


def read(path: Path) -> Entry:
    """One file of the board. LessonError if it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kind = content.pop("kind")
        entry = Entry(**content)
        right = (
            kind == KIND
            and entry.course in COURSES
            and isinstance(entry.name, str)
            and isinstance(entry.score, float)
            and isinstance(date.fromisoformat(entry.date), date)
            and list(entry.cost) == list(COSTS)
            and all(isinstance(number, int) for number in entry.cost.values())
            and all(isinstance(line, str) and "\n" not in line for line in entry.code)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LessonError(f"{path.name} is not an entry of the board: {error}") from error
    if not right:
        raise LessonError(f"{path.name} is not an entry of the board: python -m lessons golf N --submit NAME")
    return entry


def refused(entry: Entry, path: Path, others: Sequence[Entry]) -> str:
    """Why an entry cannot be on the board, whatever it costs; nothing if it can. Nothing is run."""
    try:
        check_name(entry.name)
    except LessonError as error:
        return str(error)
    if entry.rules != RULES:
        return f"it was played by rules {entry.rules}; these are {RULES}: play it again with --submit"
    if path.name != entry.path.name:
        return f"its file must be called {entry.path.name}"
    alike = [x for x in others if (x.course, slug(x.name)) == (entry.course, slug(entry.name))]
    if len(alike) > 1:
        return f"course {entry.course} has an entry of {alike[0].name!r} already: one for each name"
    if entry.is_start:
        return "" if entry.name == OURS else "it is the file with which the course begins"
    if entry.name == OURS:
        return f"{OURS!r} is the name of the file with which the course begins"
    told = golf_rules.broken(entry.source)
    return f"it breaks the rules: {'; '.join(told[:3])}" if told else ""


def judged(course: str, source: str) -> dict[str, Any]:
    """Play a schedule in a process of its own: its cost, its score, and why it does not count, if so."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", replace.VARIABLE)}
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as elsewhere:
        file, said = Path(place) / "schedule.py", Path(elsewhere) / "round.json"
        file.write_text(source, encoding="utf-8")
        command = [sys.executable, "-m", "lessons.golf", course, str(file), str(said)]
        try:
            done = interrupt.run(command, LIMIT, cwd=ROOT, env=env, capture_output=True)
        except subprocess.TimeoutExpired:
            return {"told": f"stopped after {LIMIT} s"}
        if not said.exists():
            lines = str(done.stdout).strip().splitlines()
            return {"told": lines[-1].removeprefix("not counted: ") if lines else "it ended without a result"}
        found: dict[str, Any] = json.loads(said.read_text(encoding="utf-8"))
        return found


def difference(entry: Entry, found: Mapping[str, Any]) -> str:
    """Why a played entry does not count; nothing if it does."""
    if "cost" not in found:
        return str(found["told"])
    for what in COSTS:
        if entry.cost[what] != found["cost"][what]:
            return f"it claims {what} {entry.cost[what]:,}, and has {found['cost'][what]:,}"
    if entry.score != found["score"]:
        return f"it claims a score of {entry.score:.1f}, and has {found['score']:.1f}"
    return "" if entry.is_start else str(found["told"])


def replay(paths: Sequence[Path]) -> tuple[list[tuple[str, ...]], bool]:
    """For each of these files, or all: course, name, claimed score, result. And whether none is refused."""
    rows, fine, others = [], True, entries()
    for path in paths or sorted(BOARD.glob("*.json")):
        try:
            entry = read(path)
        except LessonError as error:
            rows.append(("", path.name, "", str(error)))
            fine = False
            continue
        beside = others if entry in others else [*others, entry]
        why = refused(entry, path, beside) or difference(entry, judged(entry.course, entry.source))
        result = "as it claims; the start has no place" if entry.is_start else "counts"
        rows.append(
            (entry.course, entry.name, f"{entry.score:.1f}", f"does not count: {why}" if why else result)
        )
        fine = fine and not why
    return rows, fine


def submit(course: str, name: str) -> str:
    """Judge work/golfN.py and write its entry; returns what to do with it. LessonError if it is refused."""
    work = registry.WORK / f"golf{course}.py"
    if not work.exists():
        raise LessonError(f"{shown(work)} does not exist yet: python -m lessons golf {course}")
    code = work.read_text(encoding="utf-8").splitlines()
    entry = Entry(RULES, course, name, date.today().isoformat(), 0.0, dict.fromkeys(COSTS, 0), code)
    why = refused(entry, entry.path, [*entries(), entry])
    found = {} if why else judged(course, entry.source)
    why = why or found["told"]
    if why:
        raise LessonError(f"not written: {why}")
    entry = Entry(RULES, course, name, entry.date, found["score"], found["cost"], code)
    write(entry)
    return (
        f"{shown(entry.path)}: course {course}, {entry.score:.1f}. Open a pull request that adds this file\n"
        "and nothing else. The project plays it again, and a person reads the code, before it is merged."
    )


def write(entry: Entry) -> None:
    """Put an entry on the board."""
    BOARD.mkdir(exist_ok=True)
    content = {"kind": KIND, **asdict(entry)}
    entry.path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def table() -> list[tuple[str, ...]]:
    """The board as rows, with a header: the best of each course first."""
    rows = [("course", "place", "name", "score", "live bytes", "bytes sent", "collectives", "date")]
    place: dict[str, int] = {}
    for entry in entries():
        place[entry.course] = place.get(entry.course, 0) + (not entry.is_start)
        numbers = [f"{entry.cost[what]:,}" for what in COSTS]
        at = "-" if entry.is_start else str(place[entry.course])
        rows.append((entry.course, at, entry.name, f"{entry.score:.1f}", *numbers, entry.date))
    return rows
