"""What the learner has done so far: `work/progress.json` remembers which files `check` has accepted."""

import hashlib
import json
from collections.abc import Sequence

from lessons import registry
from lessons.exercise import LessonError, built_on, shown, tasks, unanswered
from lessons.registry import IN_ORDER, RELEASED, Lesson

PASSED, FAILED = "passed", "does not pass yet"


def remember(lesson: Lesson, passed: bool) -> None:
    """Write down what `check` has said of the files as they are."""
    everything = _read()
    everything[str(lesson.number)] = {"files": _digest(lesson), "said": PASSED if passed else FAILED}
    (registry.WORK / "progress.json").write_text(json.dumps(everything, indent=1), encoding="utf-8")


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
    return said["said"]


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


def _read() -> dict[str, dict[str, str]]:
    place = registry.WORK / "progress.json"
    try:
        found: dict[str, dict[str, str]] = json.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise LessonError(f"{shown(place)} cannot be read: {error}. Remove it, and check again") from error
    return found
