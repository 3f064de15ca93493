"""Tasks in the cells of a notebook that nbgrader grades: `%%task N TASK` is an answer, `points` judges it."""

import json
import subprocess
import sys
import textwrap
from functools import cache
from typing import Any

from lessons.exercise import LessonError, blank, find_lesson, task_regions, written
from lessons.grade import TASK
from lessons.registry import ROOT, WORK

LIMIT = 1200  # seconds for all tests of a lesson


def put(number: str, task: str, lines: str) -> None:
    """Write these lines into the task's place in the lesson's file; the file is begun if there is none."""
    lesson = find_lesson(number)
    for answer, work in lesson.files:
        names = [region.task for region in task_regions(answer.read_text(encoding="utf-8"))]
        given = blank(answer, lesson.number)
        if not work.exists():
            WORK.mkdir(exist_ok=True)
            work.write_text(given, encoding="utf-8")
        if task in names:
            now = work.read_text(encoding="utf-8").splitlines()
            place = written(lesson, answer, "\n".join(now))[task]
            (hole,) = [line for line in given.splitlines() if f"task {task}: python -m lessons hint" in line]
            margin = hole[: len(hole) - len(hole.lstrip())]
            body = textwrap.indent(textwrap.dedent(lines).strip("\n"), margin).splitlines()
            now[place.start : place.stop] = body
            work.write_text("\n".join(now) + "\n", encoding="utf-8")
            return
    raise LessonError(f"lesson {number} has no task {task!r}")


def points(number: str, task: str, of: int = TASK) -> float:
    """The points of a task, or of the `contract`. AssertionError with a diagnosis if there are none."""
    lesson = find_lesson(number)
    sources = tuple(work.read_text(encoding="utf-8") for _, work in lesson.files)
    report = _judged(number, sources)
    if "claims" not in report or report["error"]:
        raise AssertionError(report["error"])
    if report["reached"]:
        raise AssertionError(f"this reaches outside of the exercise: {'; '.join(report['reached'])}")
    if task == "contract":
        claims, earned = [report["contract"]], float(report["contract"]["points"])
    else:
        claims = [claim for claim in report["claims"] if claim["task"] == task and claim["of"]]
        earned = of * sum(claim["passed"] is True for claim in claims) / max(len(claims), 1)
    wrong = [claim for claim in claims if claim["passed"] is not True]
    for claim in wrong[:1]:
        print(claim.get("test", "the contract"))
        said = claim["diagnosis"] or {"said": "not run, because a claim does not hold"}
        print("\n".join(filter(None, [said["said"], said.get("means"), said.get("read")])))
    if not earned:
        raise AssertionError(f"lesson {number}, {task}: no points yet")
    return round(earned, 2)


@cache
def _judged(number: str, sources: tuple[str, ...]) -> dict[str, Any]:
    """What `check` says of these sources; once."""
    command = [sys.executable, "-m", "lessons", "check", number, "--json", "--sandbox"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
        found: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        return {"error": f"the tests ended without a verdict: {error}"}
    return found


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext lessons.graded_cells` gives a notebook the magic `%%task`."""

    def task(line: str, cell: str) -> None:
        number, name = line.split()
        put(number, name, cell)
        print(f"lesson {number}, task {name}: taken")

    shell.register_magic_function(task, "cell")
