"""`check N`: the shared tests on the learner's files, and then the bill of what they built."""

import json
from typing import Any

from lessons import last_words
from lessons.exercise import LessonError, read_work, shown, tasks, tasks_at, tasks_named, unanswered
from lessons.grade import grade
from lessons.progress import places as places_of
from lessons.progress import remember, stand_ins
from lessons.registry import ROOT, Lesson
from lessons.run_judge import run_judge
from lessons.verdict import paragraphs


def check(lesson: Lesson, as_json: bool = False, sandboxed: bool = False) -> int:
    """Judge the work files in a process of their own, where they take zero_min's place."""
    return _for_programs(lesson, sandboxed) if as_json else _for_people(lesson)


def _for_programs(lesson: Lesson, sandboxed: bool) -> int:
    """One JSON object on stdout, whatever happens."""
    try:
        report = graded(lesson, sandboxed)
    except LessonError as error:
        print(json.dumps({"lesson": str(lesson.number), "error": str(error)}))
        return 2
    print(json.dumps(report, indent=1))
    return 0 if report["passed"] else 1


def graded(lesson: Lesson, sandboxed: bool = False) -> dict[str, Any]:
    """What the tests say of the work files, claim by claim. It is remembered."""
    read_work(lesson)
    report = grade(lesson, [work for _, work in lesson.files], stand_ins(lesson), sandboxed)
    failed = {claim["task"] for claim in report["claims"] if claim["passed"] is False}
    held = [task for task in tasks(lesson) if report["claims"] and task not in failed]
    remember(lesson, passed=report["passed"], held=held)
    return report


def _for_people(lesson: Lesson) -> int:
    read_work(lesson)
    others = stand_ins(lesson)
    print(f"lesson {lesson.number}: {lesson.title}", flush=True)
    print(f"checking {', '.join(shown(work) for _, work in lesson.files)}", flush=True)
    if not (ROOT / "tests").is_dir():
        raise LessonError("the tests are not here: run this from a checkout of the repository")
    places, works = {**others, **places_of([lesson])}, [work for _, work in lesson.files]
    done, end = run_judge(places, works, str(lesson.number), *unanswered(lesson))
    status = done.returncode
    if end is not None:
        print(f"\n{explain(lesson, end)}")
        status = 1
    remember(lesson, passed=status == 0, held=tasks(lesson) if status == 0 else [])
    return status


def explain(lesson: Lesson, end: last_words.End) -> str:
    """A sentence about tests that could not finish: what, in which line, of which task."""
    lines = [f"the tests stopped in {end.during}", f"  {end.why}"]
    named = tasks_named(lesson, end.during)
    if end.place is None:
        lines.append("  no line of yours was running then: look at what your lines left behind")
    else:
        work, number = end.place
        named = tasks_at(lesson, work, number) or named
        task = f", task {' or '.join(named)}" if named else ""
        source = work.read_text(encoding="utf-8").splitlines()[number - 1].strip()
        lines.append(f"  {shown(work)}, line {number}{task}: {source}")
    paragraph = paragraphs(lesson).get(named[0]) if len(named) == 1 else None
    lines += [f"read: {paragraph}"] if paragraph else []
    return "\n".join([*lines, f"help: python -m lessons hint {lesson.number} {(named or ['TASK'])[0]}"])
