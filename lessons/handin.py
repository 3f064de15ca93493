"""`handin N`: one file to give to an instructor. `verify FILE`: what the instructor finds in it.

The hash over a hand-in notices a file that was damaged, or edited by accident. It does not stop a forger, who
can compute it as well. So `verify` believes no number in the file: it puts the sources into a temporary
folder and runs the tests on them again. Sources are programs: run `verify` where you would run your students'
code.
"""

import ast
import hashlib
import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from lessons import registry
from lessons.check import graded
from lessons.exercise import LessonError, find_lesson, shown
from lessons.grade import grade, most
from lessons.registry import RELEASED, Lesson

KIND = "a hand-in of python -m lessons, version 1"


def digest(content: dict[str, Any]) -> str:
    """The hash over everything in a hand-in but itself."""
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def handin(numbers: Sequence[str], name: str) -> int:
    """Check these lessons now, and write the file: sources, what was said of them, points, versions, hash."""
    lessons = [find_lesson(number) for number in dict.fromkeys(numbers)]
    entries = []
    for lesson in lessons:
        print(f"checking lesson {lesson.number} ...", flush=True)
        report = graded(lesson)
        print(f"  {report['points']:g} of {report['of']} points", flush=True)
        sources = {work.name: work.read_text(encoding="utf-8") for _, work in lesson.files}
        entries.append({"report": report, "sources": sources})
    content: dict[str, Any] = {
        "kind": KIND,
        "name": name,
        "points": round(sum(entry["report"]["points"] for entry in entries), 2),
        "of": sum(most(lesson) for lesson in lessons),
        "versions": {"python": platform.python_version(), "torch": metadata.version("torch")},
        "lessons": entries,
    }
    content["sha256"] = digest(content)
    labels = "_".join(lesson.label.replace("_", "-") for lesson in lessons)
    place = registry.WORK / f"handin_{labels}.json"
    place.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{content['points']:g} of {content['of']} points. Hand in {shown(place)}")
    return 0


@dataclass(frozen=True)
class Found:
    """One lesson of a hand-in: what it claims, and what the tests say of its sources here."""

    file: str
    name: str
    lesson: str
    claimed: str
    found: str
    note: str

    @property
    def row(self) -> tuple[str, ...]:
        """As a line of the table."""
        return (self.file, self.name, self.lesson, self.claimed, self.found, self.note)


def check_files(files: Sequence[Path]) -> None:
    """Raise LessonError if none of these files exists, with the hand-ins that do."""
    if any(file.exists() for file in files):
        return
    there = ", ".join(shown(path) for path in sorted(registry.WORK.glob("handin_*.json")))
    known = f"there is {there}" if there else "python -m lessons handin N --name NAME writes one"
    raise LessonError(f"there is no hand-in {', '.join(map(str, files))}; {known}")


def verify(files: Sequence[Path]) -> list[Found]:
    """Look into hand-ins, one after the other: a file that cannot be read does not stop the others."""
    if RELEASED is not None:
        raise LessonError("verify judges beside the answers, which are not here: run it in the repository")
    found = []
    for file in files:
        print(f"running the tests on the sources in {file} ...", file=sys.stderr, flush=True)
        try:
            found += _verified(file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, LessonError) as error:
            why = str(error) if isinstance(error, (OSError, LessonError)) else "not a hand-in of this version"
            found.append(Found(file.name, "", "", "", "", f"unreadable: {why}"))
    return found


def _verified(file: Path) -> list[Found]:
    content = json.loads(file.read_text(encoding="utf-8"))
    if content["kind"] != KIND:
        raise ValueError(content["kind"])
    changed = "" if content["sha256"] == digest(content) else "edited after it was written"
    found = []
    for entry in content["lessons"]:
        lesson = find_lesson(entry["report"]["lesson"])
        claimed, here = float(entry["report"]["points"]), _points(lesson, entry["sources"])
        same = "same" if claimed == here else "NOT THE SAME"
        note = ", ".join(part for part in (same, changed) if part)
        of = most(lesson)
        columns = (f"{claimed:g} of {of}", f"{here:g} of {of}", note)
        found.append(Found(file.name, str(content["name"]), str(lesson.number), *columns))
    if not found:
        raise LessonError("it holds no lesson")
    return found


def _points(lesson: Lesson, sources: dict[str, str]) -> float:
    """Judge these sources beside the answers of all other lessons."""
    wanted = [work.name for _, work in lesson.files]
    if sorted(sources) != sorted(wanted):
        raise LessonError(f"lesson {lesson.number} needs {', '.join(wanted)}, it holds {', '.join(sources)}")
    with tempfile.TemporaryDirectory() as folder:
        works = [Path(folder) / name for name in wanted]
        for work in works:
            work.write_text(sources[work.name], encoding="utf-8")
            try:
                ast.parse(sources[work.name])
            except (SyntaxError, ValueError):
                return 0.0
        return float(grade(lesson, works, {})["points"])
