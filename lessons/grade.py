"""`check N --json`: every claim about a lesson's tasks with its points, for a program to read.

The rule: each task is worth 10 points, divided over its claims, and the contract 20. The contract is run if
all claims hold. A claim is a test; its name begins with its task's. If it names none, it is about several at
once, and worth nothing but the contract.
"""

import hashlib
import json
import platform
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import metadata
from pathlib import Path
from typing import Any

from lessons import last_words
from lessons.exercise import tasks, tasks_at, tasks_named
from lessons.registry import Lesson
from lessons.run_judge import run_judge

TASK, CONTRACT = 10, 20  # points
CRASHES = 5  # after so many claims that crash or never end, the rest is not judged
Record = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """What a judge has written down, and what it printed."""

    records: list[Record]
    printed: str

    @property
    def claims(self) -> list[str]:
        """The names of all task tests; none if the learner's file cannot be imported."""
        return next((record["collected"] for record in self.records if "collected" in record), [])

    def of(self, claim: str) -> Record | None:
        """What was said of a claim, if it was judged; later evidence says it better."""
        found = next((record for record in self.records if record.get("test") == claim), None)
        better = next((record for record in self.records if record.get("evidence") == claim), None)
        return {**found, "diagnosis": better["diagnosis"]} if found and better else found

    @property
    def reached(self) -> list[str]:
        """The lines that reached outside of the exercise."""
        found = [line for record in self.records for line in record.get("reached", [])]
        return list(dict.fromkeys(found))

    @property
    def contract(self) -> Record | None:
        """What was said of the contract, if it was run."""
        return next((record for record in self.records if "contract" in record), None)


def most(lesson: Lesson) -> int:
    """The points that a lesson is worth."""
    return TASK * len(tasks(lesson)) + CONTRACT


def task_of(lesson: Lesson, claim: str) -> str | None:
    """Whose claim it is, by its name; None if it is about several tasks."""
    return next(iter(tasks_named(lesson, claim)), None)


def grade(
    lesson: Lesson, works: Sequence[Path], others: Mapping[str, str], sandboxed: bool = False
) -> Record:
    """Judge these files; `others` are files that stand for modules of earlier lessons.

    In a sandbox, a file that reaches outside of the exercise has 0 points.
    """
    said = _judged(lesson, works, others, sandboxed)
    claims = _claims(lesson, said)
    earned = sum((points for points, _ in claims), Fraction())
    contract = said.contract or {"contract": None}
    earned += CONTRACT if contract["contract"] else 0
    error = None if said.claims else said.printed.strip() or "the tests ended before they began"
    return {
        "lesson": str(lesson.number),
        "title": lesson.title,
        "passed": bool(contract["contract"]) and not said.reached,
        "points": 0.0 if said.reached else round(float(earned), 2),
        "of": most(lesson),
        "reached": said.reached,  # lines that reached outside of the exercise, in a sandbox
        "error": error,
        "claims": [claim for _, claim in claims],
        "contract": {
            "passed": contract["contract"],  # null: it was not run, because a claim does not hold
            "points": CONTRACT if contract["contract"] else 0,
            "of": CONTRACT,
            "checks": contract.get("checks", 0),
            "left_out": contract.get("left_out", []),
            "diagnosis": contract.get("diagnosis"),
        },
        "sha256": {work.name: hashlib.sha256(work.read_bytes()).hexdigest() for work in works},
        "versions": {"python": platform.python_version(), "torch": metadata.version("torch")},
    }


def _claims(lesson: Lesson, said: Said) -> list[tuple[Fraction, Record]]:
    """Each claim with its points, exactly and as they are written."""
    found = []
    for name in said.claims:
        task, record = task_of(lesson, name), said.of(name)
        beside = [other for other in said.claims if task_of(lesson, other) == task]
        judged = [other for other in beside if not (said.of(other) or {}).get("needs")]
        each = Fraction(TASK, len(judged)) if task and name in judged else Fraction()
        record = record or {"passed": False, "diagnosis": {"said": "not judged: the tests ended before"}}
        earned = each if record["passed"] else Fraction()
        line = {"test": name, "task": task, "passed": record["passed"], "points": round(float(earned), 2)}
        line["of"] = round(float(each), 2)
        found.append((earned, line | {key: record[key] for key in ("diagnosis", "needs") if key in record}))
    return found


def _judged(lesson: Lesson, works: Sequence[Path], others: Mapping[str, str], sandboxed: bool) -> Said:
    """Let the tests judge the files, each claim by itself: one that crashes costs only itself."""
    places = {**others, **dict(zip(lesson.modules, map(str, works), strict=True))}
    with tempfile.TemporaryDirectory() as folder:
        file, printed = Path(folder) / "claims.jsonl", ""
        for _ in range(CRASHES):
            asked = ["--claims", str(lesson.number), str(file)]
            sandbox = Path(folder) / "sandbox" if sandboxed else None
            done, end = run_judge(places, works, *asked, sandbox=sandbox, stdout=subprocess.PIPE)
            printed = done.stdout
            said = Said(_read(file), printed)
            if end is None or said.contract is not None:
                break
            diagnosis = _of_end(lesson, end)
            is_claim = end.during in said.claims
            what = {"test": end.during, "passed": False} if is_claim else {"contract": False}
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({**what, "diagnosis": diagnosis}) + "\n")
            if not is_claim:
                break
        return Said(_read(file), printed)


def _read(file: Path) -> list[Record]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def _of_end(lesson: Lesson, end: last_words.End) -> Record:
    """What is known of a claim that crashed or never ended."""
    named = tasks_named(lesson, end.during)
    file, line = None, None
    if end.place is not None:
        file, line = end.place[0].name, end.place[1]
        named = tasks_at(lesson, *end.place) or named
    return {"said": end.why, "mistake": "crash", "means": end.why, "tasks": named, "file": file, "line": line}
