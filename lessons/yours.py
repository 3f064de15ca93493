"""Run something of the lessons on the learner's files, or on the answer key's where theirs are not ready."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from lessons import interrupt, replace
from lessons.exercise import LessonError, shown, unanswered
from lessons.progress import places as work_places
from lessons.progress import stand_ins
from lessons.registry import RELEASED, ROOT, Lesson

LIMIT = 120  # seconds


def run_on_yours(lesson: Lesson, function: str, **options: Any) -> int:
    """Call `module:function` with these options in a process of its own, and print the text it returns."""
    return run_replaced({**stand_ins(lesson), **places_of(lesson)}, function, **options)


def run_replaced(
    places: Mapping[str, str], function: str, limit: float | None = LIMIT, **options: Any
) -> int:
    """The same with these files in the places of modules. Returns the exit status."""
    command = [sys.executable, "-m", "lessons.replaced", function, json.dumps(options)]
    env = {**os.environ, **replace.environment(places)}
    try:
        return interrupt.run(command, limit, cwd=ROOT, env=env).returncode
    except subprocess.TimeoutExpired:
        raise LessonError(f"stopped after {limit:g} s: is there a loop that never ends?") from None


def places_of(lesson: Lesson) -> dict[str, str]:
    """Which module the learner's file replaces; none if they have not filled all blanks. Says which."""
    there = [work for _, work in lesson.files if work.exists()]
    blank = unanswered(lesson) if len(there) == len(lesson.files) else []
    if len(there) == len(lesson.files) and not blank:
        print(f"your file: {', '.join(map(shown, there))}\n", flush=True)
        return work_places([lesson])
    if RELEASED is not None:
        what = f"blank: {', '.join(blank)}" if blank else f"python -m lessons start {lesson.number}"
        raise LessonError(f"this runs your file of lesson {lesson.number}, which is not ready ({what})")
    reason = (
        f"blank: {', '.join(blank)}" if blank else f"to write yours: python -m lessons start {lesson.number}"
    )
    print(f"the answer key's {', '.join(lesson.sources)} ({reason})\n", flush=True)
    return {}
