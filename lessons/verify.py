"""`verify FILE ...`: judges hand-ins again, each in a copy of a release, with limits of its own."""

import atexit
import compileall
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from lessons import outside, registry, replace
from lessons.exercise import LessonError, find_lesson, shown
from lessons.grade import TASK, most
from lessons.handin import KINDS, digest
from lessons.late import STUDENT, Policy, moment
from lessons.registry import RELEASED, Lesson
from lessons.sandbox import FOLDER

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, LessonError)
WORDS_OF_MEMORY = ("MemoryError", "allocate memory", "can't start new thread")


@dataclass(frozen=True)
class Limits:
    """What the tests of one lesson of one hand-in may use."""

    seconds: float = 600.0
    memory: float = 4.0  # GiB of data, each process
    disk: float = 1.0  # GiB

    def apply(self) -> None:
        """Limit this process and its children. Called between fork and exec."""
        import resource

        for what, size in ((resource.RLIMIT_DATA, self.memory), (resource.RLIMIT_FSIZE, self.disk)):
            with contextlib.suppress(ValueError, OSError):  # a system that has no such limit, or a lower one
                resource.setrlimit(what, (int(size * 2**30), int(size * 2**30)))


@dataclass(frozen=True)
class Found:
    """One lesson of a hand-in: what it claims, and what the tests say of its sources here."""

    file: str
    name: str = ""
    lesson: str = ""
    claimed: float | None = None  # points
    found: float | None = None
    of: int = 0
    note: str = ""
    made: str = ""  # by the student's clock
    received: str = ""
    clock: str = ""  # whose
    late_days: int = 0
    points: float | None = None  # of those found, after the policy for late work
    tasks: Mapping[str, float] = field(default_factory=dict)  # points of each, and of the contract
    report: Mapping[str, Any] | None = field(default=None, repr=False)  # what `check --json` prints

    def row(self, with_dates: bool) -> tuple[str, ...]:
        """As a line of the table."""
        of = "" if self.found is None else f" of {self.of}"
        dates = (self.received, str(self.late_days or ""), _number(self.points)) if with_dates else ()
        points = (f"{_number(self.claimed)}{of}", f"{_number(self.found)}{of}")
        return (self.file, self.name, self.lesson, *points, *dates, self.note)

    def facts(self) -> dict[str, Any]:
        """As a line of JSON: all but the report."""
        return {name: value for name, value in asdict(self).items() if name != "report"}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def check_files(files: Sequence[Path]) -> None:
    """Raise LessonError if none of these files exists, with the hand-ins that do."""
    if any(file.exists() for file in files):
        return
    there = ", ".join(shown(path) for path in sorted(registry.WORK.glob("handin_*.json")))
    known = f"there is {there}" if there else "python -m lessons handin N --name NAME writes one"
    raise LessonError(f"there is no hand-in {', '.join(map(str, files))}; {known}")


def verify(
    files: Sequence[Path],
    policy: Policy | None = None,
    received: Mapping[str, datetime] | None = None,
    limits: Limits | None = None,
    jobs: int = 1,
) -> list[Found]:
    """Look into hand-ins, `jobs` at a time: one that cannot be read or judged does not stop the others."""
    if RELEASED is not None:
        raise LessonError("verify judges beside the answers, which are not here: run it in the repository")
    policy, received, limits = policy or Policy(), received or {}, limits or Limits()
    stop = threading.Event()

    def one(file: Path) -> list[Found]:
        try:
            found = _verified(file, policy, received, limits, stop)
        except UNREADABLE as error:
            why = str(error) if isinstance(error, (OSError, LessonError)) else "not a hand-in of this version"
            found = [Found(file.name, note=f"unreadable: {why}")]
        print(f"judged {file}", file=sys.stderr, flush=True)
        return found

    for number in {number for file in files for number in _lessons_of(file)}:
        _released(number)  # before threads could make it twice
    with ThreadPoolExecutor(max(jobs, 1)) as pool:
        try:
            return [each for found in pool.map(one, files) for each in found]
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _lessons_of(file: Path) -> list[str]:
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))["lessons"]
        return [str(find_lesson(entry["report"]["lesson"]).number) for entry in entries]
    except UNREADABLE:
        return []


def _verified(
    file: Path, policy: Policy, received: Mapping[str, datetime], limits: Limits, stop: threading.Event
) -> list[Found]:
    content = json.loads(file.read_text(encoding="utf-8"))
    if content["kind"] not in KINDS:
        raise ValueError(content["kind"])
    name, made = str(content["name"]), str(content.get("made", ""))
    changed = "" if content["sha256"] == digest(content) else "edited after it was written"
    when, clock = received.get(file.name, received.get(name)), "the list"
    if when is None and made:
        when, clock = moment(made), STUDENT
    elif made and moment(made) > when:
        changed = ", ".join(filter(None, [changed, "made after it was received, by its own date"]))
    numbers = [entry["report"]["lesson"] for entry in content["lessons"]]
    if len(set(numbers)) != len(numbers):
        raise LessonError("it holds a lesson twice")
    found = []
    for entry in content["lessons"]:
        lesson, sources = find_lesson(entry["report"]["lesson"]), entry["sources"]
        claimed, (report, why) = float(entry["report"]["points"]), _judged(lesson, sources, limits, stop)
        here, days = float(report["points"]) if report else 0.0, policy.days(when)
        same = "same" if claimed == here else "NOT THE SAME"
        lines = outside.in_words(lesson, sources) if report else ""
        dated = "" if when or policy.due is None else "no date"
        found.append(
            Found(
                file.name,
                name,
                str(lesson.number),
                claimed,
                here,
                most(lesson),
                ", ".join(part for part in (same, changed, why, lines, dated) if part),
                made,
                when.isoformat() if when else "",
                clock if when else "",
                days,
                policy.left(here, days),
                _tasks(report),
                report,
            )
        )
    if not found:
        raise LessonError("it holds no lesson")
    return found


def _tasks(report: Mapping[str, Any] | None) -> dict[str, float]:
    """Points of each task, and of the contract."""
    if report is None or report["reached"]:
        return {}
    found: dict[str, float] = {}
    for task in dict.fromkeys(claim["task"] for claim in report["claims"] if claim["task"]):
        claims = [claim for claim in report["claims"] if claim["task"] == task and claim["of"]]
        held = sum(claim["passed"] is True for claim in claims)
        found[task] = round(TASK * held / max(len(claims), 1), 2)
    return {**found, "contract": report["contract"]["points"]}


def _judged(
    lesson: Lesson, sources: Mapping[str, str], limits: Limits, stop: threading.Event
) -> tuple[Mapping[str, Any] | None, str]:
    """What the tests say of these sources here, None if they were not run; and a note for the instructor."""
    wanted = [work.name for _, work in lesson.files]
    if sorted(sources) != sorted(wanted):
        raise LessonError(f"lesson {lesson.number} needs {', '.join(wanted)}, it holds {', '.join(sources)}")
    try:
        reaching = outside.reaching(sources)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return None, f"not Python: {error}"
    if reaching:
        return None, f"not run: it reaches outside of the exercise: {'; '.join(reaching[:3])}"
    report, why = judged_in_copy(lesson, sources, limits, stop)
    if report is None:
        return None, why
    if report["reached"]:
        return report, f"stopped: it reaches outside of the exercise: {'; '.join(report['reached'][:3])}"
    said = json.dumps(report)
    return report, f"needs more than {limits.memory:g} GiB" if any(x in said for x in WORDS_OF_MEMORY) else ""


def judged_in_copy(
    lesson: Lesson, sources: Mapping[str, str], limits: Limits, stop: threading.Event
) -> tuple[Mapping[str, Any] | None, str]:
    """Judge sources where this lesson's answers are not: processes in a copy of a release, with limits.

    The report is None if there is none, and then the text says why.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder, original = Path(place), _released(str(lesson.number))
        copy = Path(shutil.copytree(original, folder / "copy"))
        (copy / "work").mkdir()
        for name, text in sources.items():
            (copy / "work" / name).write_text(text, encoding="utf-8")
        said = folder / "said.json"
        why = _run(lesson, copy, said, limits, stop)
        if why:
            return None, why
        if _files(copy) != _files(original):
            return None, "it changed files of the judge"
        try:
            report: dict[str, Any] = json.loads(said.read_text(encoding="utf-8"))
            return (report, "") if "points" in report else (None, report["error"])
        except (ValueError, KeyError):
            return None, "the tests ended without a verdict"


def _run(lesson: Lesson, copy: Path, said: Path, limits: Limits, stop: threading.Event) -> str:
    """Run `check` there; why it was stopped, if it was."""
    unwanted = ("PYTHONPATH", replace.VARIABLE, FOLDER)
    env = {name: value for name, value in os.environ.items() if name not in unwanted}
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(copy.parent)}
    command = [sys.executable, "-m", "lessons", "check", str(lesson.number), "--json", "--sandbox"]
    how: dict[str, Any] = {"cwd": copy, "env": env, "stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if os.name == "posix":
        how |= {"start_new_session": True, "preexec_fn": limits.apply}
    with said.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, **how)
    end, looked = time.monotonic() + limits.seconds, 0.0
    try:
        while process.poll() is None:
            if stop.wait(0.05):
                return "interrupted"
            if time.monotonic() > end:
                return f"stopped after {limits.seconds:g} s"
            if time.monotonic() > looked + 1:
                looked = time.monotonic()
                if _size(copy.parent) > limits.disk * 2**30:
                    return f"stopped: it wrote more than {limits.disk:g} GiB"
        return ""
    finally:
        if os.name == "posix":  # all that it has started
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()


def _size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # gone meanwhile
                total += (Path(place) / name).lstat().st_blocks * 512
    return total


def _files(folder: Path) -> dict[str, str]:
    """The digest of each file of a release, without the student's."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and name.parts[0] != "work":
            found[str(name)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


@cache
def _released(number: str) -> Path:
    """A release of one lesson, which lasts as long as this process."""
    from lessons.release import release  # a release has none

    folder = Path(tempfile.mkdtemp(prefix="verify_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    release(folder / "release", [number])
    compileall.compile_dir(folder / "release", quiet=2)
    return folder / "release"
