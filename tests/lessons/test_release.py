"""A release for students: it holds no line of an answer, and its commands work without them."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lessons import __main__ as cli
from lessons import exercise, release
from lessons.exercise import LessonError, find_lesson
from lessons.registry import IN_ORDER, Lesson
from tests import rotation

ALL = [str(lesson.number) for lesson in IN_ORDER]


def run_there(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of the release, with nothing of this repository in reach."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "lessons", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def long_lines(lessons: list[Lesson]) -> set[str]:
    """What must not be found."""
    found = set()
    for lesson in lessons:
        for answer, _ in lesson.files:
            for region in exercise.task_regions(answer.read_text()):
                for line in exercise.region_lines(answer, region.name):
                    found |= {line.strip(), line.partition("  #")[0].strip()}
    return {line for line in found if len(line) >= release.LONG}


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ([], []),
        (["2"], ["0", "1/2", "1"]),
        (["3", "1"], ["0", "1/2", "2"]),
    ],
    ids=["all", "2", "1 and 3"],
)
def test_no_file_holds_a_line_of_an_answer(asked: list[str], kept: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "release"
    assert cli.main(["release", str(folder), *asked]) == 0
    given = [find_lesson(number) for number in kept]
    secret = long_lines([lesson for lesson in IN_ORDER if lesson not in given]) - long_lines(given)
    assert len(secret) > 50
    files = [path for path in folder.rglob("*") if path.is_file()]
    found = [
        (str(path.relative_to(folder)), line)
        for path in files
        for text in [path.read_bytes().decode()]
        for line in secret
        if line in text
    ]
    assert not found
    pages = {path.parent.name for path in folder.glob("lessons/*/lesson.md")}
    assert pages == {find_lesson(number).folder for number in asked or ALL}
    names = {str(path.relative_to(folder)) for path in files}
    assert not names & {"lessons/museum.py", "lessons/bug.py", "tests/lessons/test_exercises.py"}
    assert not [name for name in names if name.endswith("mistakes.py") or name.startswith("notebooks")]


def test_a_line_of_an_answer_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exercise, "emptied", lambda source, hole: source)
    with pytest.raises(LessonError, match=r"(?s)would hold lines of answers:\n.*zero_min/adam\.py, line \d+"):
        release.release(tmp_path / "release")
    assert not (tmp_path / "release").exists()


def test_a_folder_that_exists_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["release", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def answer_all(folder: Path, lesson: Lesson) -> None:
    """Write the answers of this repository into the release's work files."""
    assert run_there(folder, "start", str(lesson.number)).returncode == 0
    for answer, work in lesson.files:
        file = folder / "work" / work.name
        file.write_text(exercise.fill(answer, lesson.number, file.read_text()))


@pytest.mark.rotates
def test_in_a_release_the_right_file_passes_and_a_blank_one_does_not(tmp_path: Path) -> None:
    folder, lesson = tmp_path / "release", find_lesson("1")
    release.release(folder, ["1", "2"])
    assert run_there(folder, "start", "1").returncode == 0
    blank = run_there(folder, "check", "1", "--json")
    said = json.loads(blank.stdout)
    assert blank.returncode == 1 and said["points"] == 0 and said["of"] == 70
    assert {claim["diagnosis"]["mistake"] for claim in said["claims"]} == {"blank"}
    early = run_there(folder, "check", "2")
    assert early.returncode == 2 and "work/stage2.py does not exist yet" in early.stderr
    run_there(folder, "start", "2")
    early = run_there(folder, "check", "2")
    assert early.returncode == 2 and "lesson 2 builds on lesson 1 (work/stage1.py)" in early.stderr

    (folder / "work" / "stage1.py").unlink()
    answer_all(folder, lesson)
    passed = run_there(folder, "check", "1")
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert "not checked here: 9 that need lesson 2, which is blank" in passed.stdout
    assert "next: python -m lessons start 2" in passed.stdout
    listed = run_there(folder, "list").stdout
    assert "passed" in listed and "0 of 3 tasks written" in listed
    bill = run_there(folder, "bill")
    assert bill.returncode == 0 and "agree as integers" in bill.stdout
    assert "stage 1 " in bill.stdout and "stage 2: lesson 2 is blank here" in bill.stdout
    assert run_there(folder, "hint", "2", "arrived").stdout.startswith("task arrived, hint 1 of 3: ")
    for command in ("solution", "diff", "bug"):
        refused = run_there(folder, command, "1")
        assert refused.returncode == 2 and f"{command}: answers are not here" in refused.stderr


def check_all(folder: Path, lessons: list[Lesson]) -> None:
    """Answer and check each lesson of a release, as a learner would, in the order of the list."""
    for lesson in lessons:
        answer_all(folder, lesson)
        done = run_there(folder, "check", str(lesson.number))
        assert done.returncode == 0 and "passed: all" in done.stdout, done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.rotates
@pytest.mark.parametrize("lesson", IN_ORDER, ids=ALL)
def test_each_lesson_alone_can_be_passed(lesson: Lesson, tmp_path: Path) -> None:
    release.release(tmp_path / "release", [str(lesson.number)])
    check_all(tmp_path / "release", [lesson])


@pytest.mark.rotates
def test_two_lessons_that_no_one_has_chosen_can_be_passed(tmp_path: Path) -> None:
    """Two others for each commit: what lies between them keeps its answers, what comes after is blank."""
    pair = rotation.chosen([*itertools.combinations(IN_ORDER, 2)])
    release.release(tmp_path / "release", [str(lesson.number) for lesson in pair])
    check_all(tmp_path / "release", [*pair])


@pytest.mark.slow
def test_all_lessons_one_after_the_other_in_a_release(tmp_path: Path) -> None:
    folder = tmp_path / "release"
    release.release(folder)
    total = 0
    for lesson in IN_ORDER:
        answer_all(folder, lesson)
        done = run_there(folder, "check", str(lesson.number), "--json")
        said = json.loads(done.stdout)
        assert done.returncode == 0 and said["points"] == said["of"], done.stdout + done.stderr
        total += said["of"]
    done = run_there(folder, "run", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    done = run_there(folder, "handin", *ALL, "--name", "Ada")
    assert done.returncode == 0 and f"{total} of {total} points" in done.stdout, done.stdout + done.stderr
