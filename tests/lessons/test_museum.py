"""Every wrong answer of the museum is caught, called what it is, and sent to its task and its paragraph."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lessons import exercise, museum
from lessons.diagnose import SAID
from lessons.registry import IN_ORDER, ROOT, Lesson
from lessons.run_judge import QUICK
from lessons.verdict import paragraphs

each_lesson = pytest.mark.parametrize("lesson", IN_ORDER, ids=[lesson.folder for lesson in IN_ORDER])
SOON = {1: 8}  # of this lesson so many mistakes run every time; all of all lessons are slow


def exhibits(lesson: Lesson, file: Path, names: list[str]) -> dict[str, dict[str, object]]:
    """What `check` says about mistakes, from a process of their own."""
    command = [sys.executable, "-m", "lessons.museum", str(lesson.number), str(file), *names]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **QUICK}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {each["name"]: each for each in json.loads(file.read_text())}


def judge(lesson: Lesson, folder: Path, chosen: list[museum.Mistake]) -> None:
    """Claim that each of these is caught by its task's tests, has the right name, help and paragraph."""
    found = exhibits(lesson, folder / "museum.json", [each.name for each in chosen])
    wrong = []
    for mistake in chosen:
        seen = found[mistake.name]
        got = (seen["caught_by"], seen["found"], seen["tasks"], seen["heading"])
        if got != ("task tests", mistake.found, [mistake.task], mistake.heading):
            wrong.append(f"{mistake.name}: {got}, {seen['test']}, {seen['message']}")
        kept = museum.recorded()[str(lesson.number)].get(mistake.name)
        if kept is None or (kept.test, kept.words) != (seen["test"], seen["words"]):
            wrong.append(f"{mistake.name}: site/records/museum.json is stale: python -m lessons.museum")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("number", SOON)
def test_a_sample_is_caught_and_called_what_it_is(number: int, tmp_path: Path) -> None:
    lesson = exercise.find_lesson(str(number))
    every = museum.mistakes(lesson)
    judge(lesson, tmp_path, list(every[:: -(-len(every) // SOON[number])]))


@pytest.mark.slow
@each_lesson
def test_every_mistake_is_caught_and_called_what_it_is(lesson: Lesson, tmp_path: Path) -> None:
    judge(lesson, tmp_path, list(museum.mistakes(lesson)))


@each_lesson
def test_mistakes_have_names_of_their_own_and_can_be_seeded(lesson: Lesson) -> None:
    known = museum.mistakes(lesson)
    assert [each.name for each in known] == list(museum.recorded()[str(lesson.number)])
    assert len({each.name for each in known}) == len(known)
    assert {each.task for each in known} == set(exercise.tasks(lesson)), "each task has a mistake"
    for mistake in known:
        assert mistake.found in SAID and mistake.found != "other", "a mistake without a name of its own"
        texts = museum.seeded(lesson, mistake)
        changed = [path for path, text in texts.items() if text != exercise.unmarked(path.read_text())]
        assert len(changed) == 1
        compile(texts[changed[0]], str(changed[0]), "exec")


@each_lesson
def test_each_task_has_a_paragraph_and_nothing_else_has(lesson: Lesson) -> None:
    tasks, found = exercise.tasks(lesson), paragraphs(lesson)
    assert {name for name in found if "/" not in name} == set(tasks)
    for name in found:
        task, _, mistake = name.partition("/")
        assert task in tasks and mistake in ("", *SAID)
    lines = (lesson.path / "lesson.md").read_text(encoding="utf-8").splitlines()
    for paragraph in found.values():
        assert len(lines[paragraph.line - 1]) > 30, "its line is the first of the paragraph"


def test_the_museum_is_large_enough() -> None:
    assert sum(1 for _ in museum.each_mistake()) >= 60
    assert len(Counter(mistake.found for _, mistake in museum.each_mistake())) >= 15
