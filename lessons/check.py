"""`check N`: the shared tests on the learner's files, and then the bill of what they built."""

import os
import subprocess
import sys

from lessons import replace
from lessons.exercise import LessonError, read_work, shown, tasks, unanswered
from lessons.registry import ROOT, Lesson

LIMIT = 600  # seconds


def check(lesson: Lesson) -> int:
    """Judge the work files in a process of their own, where they take zero_min's place."""
    read_work(lesson)
    print(f"lesson {lesson.number}: {lesson.title}", flush=True)
    print(f"checking {', '.join(shown(work) for _, work in lesson.files)}", flush=True)
    if not (ROOT / "tests").is_dir():
        raise LessonError("the tests are not here: run this from a checkout of the repository")
    places = {f"zero_min.{answer.stem}": str(work) for answer, work in lesson.files}
    command = [sys.executable, "-m", "lessons.judge", str(lesson.number), *unanswered(lesson)]
    env = {**os.environ, **replace.environment(places)}
    try:
        return subprocess.run(command, cwd=ROOT, env=env, timeout=LIMIT).returncode
    except subprocess.TimeoutExpired:
        print(f"stopped after {LIMIT} s: is there a loop that never ends?")
        return 1


def progress(lesson: Lesson) -> str:
    """In a few words how far the learner is."""
    try:
        left = unanswered(lesson)
    except LessonError as error:
        return "not started" if "does not exist" in str(error) else "has a syntax error"
    return f"{len(tasks(lesson)) - len(left)} of {len(tasks(lesson))} tasks filled in"
