"""What the learner has done so far: `work/progress.json` remembers which files `check` has accepted."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from lessons import late, registry
from lessons.exercise import LessonError, built_on, shown, tasks, unanswered, written
from lessons.registry import IN_ORDER, RELEASED, Lesson

PASSED, FAILED = "passed", "does not pass yet"


def remember(lesson: Lesson, passed: bool, held: Sequence[str] = ()) -> None:
    """Write down what `check` has said of the files as they are, and since when tasks hold that do."""
    everything, lines = _read(), _lines(lesson)
    before, now = everything.get(str(lesson.number), {}).get("tasks", {}), late.now()
    kept = {task: each for task, each in before.items() if each["lines"] == lines.get(task)}
    new = {task: {"lines": lines[task], "accepted": now} for task in held if task in lines}
    everything[str(lesson.number)] = {
        "files": _digest(lesson),
        "said": PASSED if passed else FAILED,
        "tasks": new | kept,
    }
    (registry.WORK / "progress.json").write_text(json.dumps(everything, indent=1), encoding="utf-8")


def accepted_tasks(lesson: Lesson) -> dict[str, str]:
    """When `check` first accepted each task's lines as they are now, by this computer's clock."""
    lines, said = _lines(lesson), _read().get(str(lesson.number), {})
    return {
        task: each["accepted"]
        for task, each in said.get("tasks", {}).items()
        if each["lines"] == lines.get(task)
    }


def _lines(lesson: Lesson) -> dict[str, str]:
    """A digest of what stands in each task's place."""
    found = {}
    for answer, work in lesson.files:
        text = work.read_text(encoding="utf-8")
        for task, numbers in written(lesson, answer, text).items():
            body = "\n".join(text.splitlines()[numbers.start : numbers.stop])
            found[task] = hashlib.sha256(body.encode()).hexdigest()
    return found


def progress(lesson: Lesson) -> str:
    """In a few words how far the learner is."""
    try:
        left, all_tasks = unanswered(lesson), tasks(lesson)
    except LessonError as error:
        return "not started" if "does not exist" in str(error) else "has a syntax error"
    if left:
        return f"{len(all_tasks) - len(left)} of {len(all_tasks)} tasks written"
    said = _read().get(str(lesson.number))
    if said is None:
        return "written, not checked"
    if said["files"] != _digest(lesson):
        return f"changed since it {said['said']}" if said["said"] == PASSED else "changed, not checked"
    return str(said["said"])


def accepted() -> list[Lesson]:
    """The lessons whose files have passed as they are."""
    return [lesson for lesson in IN_ORDER if progress(lesson) == PASSED]


def places(lessons: Sequence[Lesson]) -> dict[str, str]:
    """Which modules the learner's files of these lessons replace."""
    return {
        module: str(work)
        for lesson in lessons
        for module, (_, work) in zip(lesson.modules, lesson.files, strict=True)
    }


def stand_ins(lesson: Lesson) -> dict[str, str]:
    """In a release: the learner's accepted files, which stand for the answers that are not there.

    LessonError if one is missing that this lesson builds on. In the repository: nothing, answers are there.
    """
    if RELEASED is None:
        return {}
    done = [other for other in accepted() if other != lesson]
    missing = [other for other in built_on(lesson) if other not in done]
    if missing:
        first = missing[0]
        files = ", ".join(shown(work) for _, work in first.files)
        raise LessonError(
            f"lesson {lesson.number} builds on lesson {first.number} ({files}), which has not passed here "
            f"as it is now: python -m lessons check {first.number}"
        )
    return places(done)


def places_of_passed() -> dict[str, str]:
    """Which modules files that have passed replace; says which they are. LessonError if there are none."""
    mine = accepted()
    if not mine:
        raise LessonError("no file of yours has passed as it is now: python -m lessons check N")
    works = [work for lesson in mine for _, work in lesson.files]
    print(f"yours: {', '.join(map(shown, works))}; all else is the answer key's", flush=True)
    return places(mine)


def _digest(lesson: Lesson) -> str:
    return hashlib.sha256(b"\0".join(work.read_bytes() for _, work in lesson.files)).hexdigest()


def _read() -> dict[str, dict[str, Any]]:
    place = registry.WORK / "progress.json"
    try:
        found: dict[str, dict[str, Any]] = json.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise LessonError(f"{shown(place)} cannot be read: {error}. Remove it, and check again") from error
    return found
