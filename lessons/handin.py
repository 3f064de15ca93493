"""`handin N`: one file to give to an instructor. `verify FILE`: what the instructor finds in it.

The hash over a hand-in notices a file that was damaged, or edited by accident. It does not stop a forger, who
can compute it as well. So `verify` believes no number in the file: it runs the tests on the sources again, in
a copy of a release of that lesson, which does not hold the lesson's answers. A file that reaches outside of
the exercise (`lessons/outside.py`) is not run and has 0 points. Sources are programs all the same: run
`verify` where you would run your students' code.
"""

import atexit
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from lessons import outside, registry, replace
from lessons.check import graded
from lessons.exercise import LessonError, find_lesson, shown
from lessons.grade import most
from lessons.registry import RELEASED, Lesson

LIMIT = 600  # seconds for all tests of a lesson
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
        lesson, sources = find_lesson(entry["report"]["lesson"]), entry["sources"]
        claimed, (here, why) = float(entry["report"]["points"]), _points(lesson, sources)
        same = "same" if claimed == here else "NOT THE SAME"
        note = ", ".join(part for part in (same, changed, why) if part)
        of = most(lesson)
        columns = (f"{claimed:g} of {of}", f"{here:g} of {of}", note)
        found.append(Found(file.name, str(content["name"]), str(lesson.number), *columns))
    if not found:
        raise LessonError("it holds no lesson")
    return found


def _points(lesson: Lesson, sources: dict[str, str]) -> tuple[float, str]:
    """What these sources are worth here, and what an instructor should look at."""
    wanted = [work.name for _, work in lesson.files]
    if sorted(sources) != sorted(wanted):
        raise LessonError(f"lesson {lesson.number} needs {', '.join(wanted)}, it holds {', '.join(sources)}")
    try:
        reaching = [line for name, text in sources.items() for line in outside.reaching(lesson, name, text)]
    except (SyntaxError, ValueError):
        return 0.0, ""
    if reaching:
        return 0.0, f"not run: it reaches outside of the exercise: {'; '.join(reaching[:3])}"
    return points_in_copy(lesson, sources), outside.in_words(lesson, sources)


def points_in_copy(lesson: Lesson, sources: dict[str, str]) -> float:
    """Judge sources where this lesson's answers are not: a process in a copy of a release of the lesson."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(_released(str(lesson.number)), Path(folder) / "copy"))
        (copy / "work").mkdir()
        for name, text in sources.items():
            (copy / "work" / name).write_text(text, encoding="utf-8")
        env = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", replace.VARIABLE)
        }
        command = [sys.executable, "-m", "lessons", "check", str(lesson.number), "--json"]
        try:
            done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=LIMIT)
            return float(json.loads(done.stdout)["points"])
        except (subprocess.TimeoutExpired, ValueError, KeyError):
            return 0.0


@cache
def _released(number: str) -> Path:
    """A release of one lesson, which lasts as long as this process."""
    from lessons.release import release  # a release has none

    folder = Path(tempfile.mkdtemp(prefix="verify_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    release(folder / "release", [number])
    return folder / "release"
