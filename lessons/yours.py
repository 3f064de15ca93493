"""Run something of the lessons on the learner's files, or on the answer key's where theirs are not ready."""

import json
import os
import subprocess
import sys
from typing import Any

from lessons import replace
from lessons.exercise import LessonError, shown, unanswered
from lessons.registry import ROOT, Lesson

LIMIT = 120  # seconds


def run_on_yours(lesson: Lesson, function: str, **options: Any) -> int:
    """Call `module:function` with these options in a process of its own, and print what it returns."""
    places = places_of(lesson)
    command = [sys.executable, "-m", "lessons.replaced", function, json.dumps(options)]
    env = {**os.environ, **replace.environment(places)}
    try:
        return subprocess.run(command, cwd=ROOT, env=env, timeout=LIMIT).returncode
    except subprocess.TimeoutExpired:
        raise LessonError(f"stopped after {LIMIT} s: is there a loop that never ends?") from None


def places_of(lesson: Lesson) -> dict[str, str]:
    """Which module the learner's file replaces; none if they have not filled all blanks. Says which."""
    there = [work for _, work in lesson.files if work.exists()]
    blank = unanswered(lesson) if len(there) == len(lesson.files) else []
    if len(there) == len(lesson.files) and not blank:
        print(f"your file: {', '.join(map(shown, there))}\n", flush=True)
        return {f"zero_min.{answer.stem}": str(work) for answer, work in lesson.files}
    reason = (
        f"blank: {', '.join(blank)}" if blank else f"to write yours: python -m lessons start {lesson.number}"
    )
    print(f"the answer key's {', '.join(lesson.sources)} ({reason})\n", flush=True)
    return {}
