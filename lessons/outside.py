"""What a hand-in changes outside of its tasks, and lines of it that reach outside of the exercise.

A task needs torch, the standard library's tools for computing, and zero_min. A file that imports pytest,
opens files or asks Python about itself may be after the judge and not after the answer: it is not run.
What shows only when it runs, `lessons/sandbox.py` refuses then.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path

from lessons import sandbox
from lessons.exercise import blank, written
from lessons.registry import Lesson


def reaching(sources: Mapping[str, str]) -> list[str]:
    """Each line of a hand-in that shows, before it runs, that it reaches outside of the exercise."""
    return [
        f"{name}, line {line}: {what}"
        for name, text in sources.items()
        for line, what in sorted(sandbox.refusals(text))
    ]


def changed(lesson: Lesson, name: str, source: str) -> list[int]:
    """The lines of a hand-in that are neither as they were given nor in the place of a task's blank."""
    (answer,) = [answer for answer, _ in lesson.files if answer.name == name]
    asked, mine = blank(answer, lesson.number).splitlines(), source.splitlines()
    inside = {line for lines in written(lesson, answer, source).values() for line in lines}
    matcher = difflib.SequenceMatcher(None, asked, mine, autojunk=False)
    new = {
        line for tag, _, _, low, high in matcher.get_opcodes() if tag != "equal" for line in range(low, high)
    }
    return sorted(line + 1 for line in new - inside if mine[line].strip())


def in_words(lesson: Lesson, sources: dict[str, str]) -> str:
    """Where a hand-in differs outside of the tasks; nothing if it does not."""
    places = [(Path(name).name, changed(lesson, name, text)) for name, text in sources.items()]
    return "; ".join(
        f"{name} is changed outside of the tasks: line {', '.join(map(str, lines[:8]))}"
        for name, lines in places
        if lines
    )
