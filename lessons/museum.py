"""A museum of mistakes: wrong answers with a name, what each looks like to `check`, and how to seed one.

`python -m lessons.museum` puts every wrong answer in the place of the right one, lets the tests of `check`
judge it, and keeps what they say in site/records/museum.json. Nothing about a failure is written by hand.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lessons import replace
from lessons.exercise import LessonError, find_lesson, regions, unmarked
from lessons.registry import IN_ORDER, ROOT, Lesson
from lessons.run_judge import QUICK

RECORD = ROOT / "site" / "records" / "museum.json"


@dataclass(frozen=True)
class Mistake:
    """A wrong answer: a part of the answer key, and what somebody wrote instead."""

    name: str
    task: str
    right: str  # stands in the task's lines once
    wrong: str
    says: str  # what is wrong, in one sentence
    found: str  # what `diagnose` must call it
    heading: str  # of the paragraph in the lesson that explains it


@dataclass(frozen=True)
class Exhibit:
    """What `check` says about a mistake."""

    name: str
    test: str
    message: str
    found: str
    words: str
    tasks: list[str]
    heading: str
    caught_by: str  # "task tests", or "contract"


def mistakes(lesson: Lesson) -> tuple[Mistake, ...]:
    """The lesson's wrong answers, in the order of its tasks."""
    found: tuple[Mistake, ...] = importlib.import_module(f"lessons.{lesson.folder}.mistakes").MISTAKES
    return found


def seeded(lesson: Lesson, mistake: Mistake) -> dict[Path, str]:
    """The answer key's files as a learner would have them, with the mistake in one of them."""
    sources = {answer: answer.read_text(encoding="utf-8") for answer, _ in lesson.files}
    for answer, source in sources.items():
        for region in regions(source):
            lines = source.splitlines(keepends=True)
            inside = "".join(lines[region.first : region.last])
            if region.name == f"ex_{mistake.task}" and inside.count(mistake.right) == 1:
                lines[region.first : region.last] = [inside.replace(mistake.right, mistake.wrong)]
                changed = {**sources, answer: "".join(lines)}
                return {path: unmarked(text) for path, text in changed.items()}
    raise LessonError(f"museum, {mistake.name}: {mistake.right!r} must stand in task {mistake.task} once")


def record(lesson: Lesson, names: Sequence[str] = ()) -> list[Exhibit]:
    """Let the tests judge each mistake (or those with these names). In a process that is for nothing else."""
    chosen = [each for each in mistakes(lesson) if not names or each.name in names]
    with tempfile.TemporaryDirectory() as folder:
        return [_judged(lesson, each, Path(folder) / each.name) for each in chosen]


def _judged(lesson: Lesson, mistake: Mistake, folder: Path) -> Exhibit:
    from lessons import judge
    from lessons.last_words import Watch
    from lessons.verdict import verdict

    folder.mkdir()
    places = {}
    for answer, text in seeded(lesson, mistake).items():
        (folder / answer.name).write_text(text, encoding="utf-8")
        places[f"zero_min.{answer.stem}"] = str(folder / answer.name)
    works = [Path(place) for place in places.values()]
    reporter = judge.Reporter(Watch(folder / "last_words.txt"), works)
    with replace.swapped(places):
        caught_by = "task tests"
        if judge.run_task_tests(reporter, lesson, "-x"):
            caught_by = "contract"
            judge.run_contract(reporter, lesson)
    if not reporter.failures:
        return Exhibit(mistake.name, "", "nobody noticed", "", "", [], "", "nobody")
    failure = reporter.failures[0]
    seen = verdict(lesson, failure)
    found, words = (seen.finding.mistake, seen.finding.words) if seen.finding else ("", "")
    heading = seen.paragraph.heading if seen.paragraph else ""
    message = re.sub(r" at \w+\.py:\d+", "", failure.message)  # lines move with every edit
    return Exhibit(mistake.name, failure.test, message, found, words, seen.tasks, heading, caught_by)


def each_mistake() -> Iterator[tuple[Lesson, Mistake]]:
    """The whole museum."""
    for lesson in IN_ORDER:
        for mistake in mistakes(lesson):
            yield lesson, mistake


def recorded() -> dict[str, dict[str, Exhibit]]:
    """The record that the site shows: of each lesson, by its number, each mistake by its name."""
    kept = json.loads(RECORD.read_text(encoding="utf-8"))
    return {number: {each["name"]: Exhibit(**each) for each in found} for number, found in kept.items()}


def record_all() -> None:
    """Judge every mistake, each lesson in a process of its own, and keep what was said."""
    found = {}
    for lesson in IN_ORDER:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "museum.json"
            command = [sys.executable, "-m", "lessons.museum", str(lesson.number), str(file)]
            subprocess.run(command, cwd=ROOT, env={**os.environ, **QUICK}, check=True)
            found[str(lesson.number)] = json.loads(file.read_text(encoding="utf-8"))
    RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Without arguments: make the record. Else N FILE and perhaps names: judge these of lesson N."""
    if not arguments:
        record_all()
        return
    number, file, *names = arguments
    exhibits = [asdict(each) for each in record(find_lesson(number), names)]
    Path(file).write_text(json.dumps(exhibits, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
