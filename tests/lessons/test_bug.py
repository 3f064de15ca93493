"""`bug N`: a mistake to be found, in files of its own."""

from pathlib import Path

import pytest

from lessons import __main__ as cli
from lessons import bug, exercise, museum, registry
from lessons.exercise import find_lesson

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work/ folder of our own, so that nobody's answers are touched."""
    monkeypatch.setattr(registry, "WORK", tmp_path / "work")
    return tmp_path / "work"


def seed(lesson: registry.Lesson, name: str) -> tuple[museum.Mistake, Path]:
    """Put a mistake where `bug` puts it, without running the tests."""
    mistake = next(each for each in museum.mistakes(lesson) if each.name == name)
    for answer, place in bug.places(lesson):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(museum.seeded(lesson, mistake)[answer])
    return mistake, bug.places(lesson)[0][1]


def test_a_bug_is_shown_by_what_tests_see_and_found_by_its_line(capsys: Capture, work: Path) -> None:
    lesson = find_lesson("1")
    exercise.start(lesson)
    mine = (work / "stage1.py").read_text()
    number = 1 + [each.name for each in museum.mistakes(lesson)].index("sum-for-mean")
    assert cli.main(["bug", "1", "--number", str(number)]) == 0
    said = capsys.readouterr().out
    assert "own gradients of 2 ranks: expected [[1.5, 1.5], [1.5, 0]], got [[3, 3], [3, 0]]" in said
    assert "python -m lessons bug 1 --answer LINE" in said
    assert "where the mean was asked" not in said and "sum-for-mean" not in said
    assert (work / "stage1.py").read_text() == mine

    lines = (work / "bug1" / "stage1.py").read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if "my_grad = self.comm.reduce_scatter(parts)" in text)
    assert cli.main(["bug", "1", "--answer", str(line + 1)]) == 0
    assert f"line {line + 1} of " in (said := capsys.readouterr().out) and "as it should be" in said
    assert cli.main(["bug", "1", "--answer", str(line)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("right: ") and f"line {line}, task reduce. A reduce-scatter sums" in said
    assert ": sum-for-mean" in said and ". Does ZeRO change the maths?" in said


def test_where_lines_are_missing_the_lines_around_the_gap_are_right() -> None:
    lesson = find_lesson("2")
    _, place = seed(lesson, "nobody-says-it-has-left")
    gap = (
        next(i for i, text in enumerate(place.read_text().splitlines()) if "nobody but the owner" in text) + 1
    )
    assert bug.answer(lesson, str(gap)).startswith("right: ")
    assert bug.answer(lesson, str(gap + 1)).startswith("right: ")
    assert "as it should be" in bug.answer(lesson, str(gap - 1))
    assert "    (nothing)" in bug.answer(lesson, str(gap))


def test_a_lesson_of_two_files_has_its_bug_in_one_of_them() -> None:
    lesson = find_lesson("6")
    _, place = seed(lesson, "anchor-stays")
    (right, other) = bug.places(lesson)[1]
    changed = bug.changed_lines(exercise.unmarked(right.read_text()), other.read_text())
    assert other.name == "zero_one_adam.py" and place.name == "compression.py"
    assert "zero_one_adam.py, line" in bug.answer(lesson, f"zero_one_adam.py:{changed[0]}")
    assert "compression.py is as it should be" in bug.answer(lesson, f"{place}:{changed[0]}")
    for guess in (str(changed[0]), "adam.py:3", "zero_one_adam.py:x"):
        with pytest.raises(exercise.LessonError, match=r"--answer compression.py:12 or zero_one_adam.py:12"):
            bug.answer(lesson, guess)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bug", "1", "--number", "0"], "lesson 1 has mistakes 1 to "),
        (["bug", "1", "--answer", "3"], "there is no bug to find yet: python -m lessons bug 1"),
        (["bug"], "which lesson? python -m lessons bug N"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: list[str], message: str, capsys: Capture) -> None:
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("line", ["0", "99999"])
def test_a_line_that_is_not_there_is_no_guess(line: str, capsys: Capture) -> None:
    _, place = seed(find_lesson("1"), "sum-for-mean")
    assert cli.main(["bug", "1", "--answer", line]) == 2
    last = len(place.read_text().splitlines())
    assert f"stage1.py has lines 1 to {last}" in capsys.readouterr().err


def test_a_file_that_was_changed_is_not_judged(capsys: Capture) -> None:
    lesson = find_lesson("1")
    _, place = seed(lesson, "sum-for-mean")
    place.write_text(place.read_text() + "# mine\n")
    assert cli.main(["bug", "1", "--answer", "3"]) == 2
    assert "has been changed since" in capsys.readouterr().err
