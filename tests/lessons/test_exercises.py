"""Exercises are the answer key with holes: the suite fails on the holes and passes when they are filled."""

import subprocess
import sys
from pathlib import Path

import pytest

from lessons import __main__ as cli
from lessons import exercise, registry
from lessons.check import progress
from lessons.registry import LESSONS, ROOT, Lesson

ids = [lesson.folder for lesson in LESSONS]
each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=ids)


@pytest.fixture(autouse=True)
def empty_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work/ folder of our own, so that nobody's answers are touched."""
    monkeypatch.setattr(Lesson, "work", property(lambda lesson: tmp_path / "work" / lesson.answer.name))
    return tmp_path / "work"


def suite_on(lesson: Lesson) -> subprocess.CompletedProcess[str]:
    """The tests that `check` runs, in a process of their own."""
    code = f"""
import sys
from pathlib import Path
from lessons import check, exercise, registry
registry.Lesson.work = property(lambda lesson: Path({str(lesson.work.parent)!r}) / lesson.answer.name)
sys.exit(check.check(exercise.find_lesson("{lesson.number}")))
"""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)


@each_lesson
def test_the_untouched_exercise_fails_and_names_its_first_task(lesson: Lesson) -> None:
    exercise.start(lesson)
    run = suite_on(lesson)
    first = exercise.tasks(lesson)[0].task
    assert run.returncode == 1, run.stdout + run.stderr
    assert f"lesson {lesson.number}, task {first}: python -m lessons hint {lesson.number}" in run.stdout
    assert "Traceback" not in run.stdout + run.stderr
    assert progress(lesson) == f"0 of {len(exercise.tasks(lesson))} tasks filled in"


@each_lesson
def test_the_refilled_exercise_is_the_answer_byte_for_byte_and_passes(lesson: Lesson) -> None:
    work = exercise.start(lesson)
    assert "NotImplementedError" in work.read_text()
    assert "NotImplementedError" not in lesson.answer.read_text()
    work.write_text(exercise.fill(lesson, work.read_text()))
    assert work.read_bytes() == lesson.answer.read_bytes()
    assert exercise.unanswered(lesson) == []
    run = suite_on(lesson)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "formula" in run.stdout and "rank 3" in run.stdout
    for line in run.stdout.splitlines():  # measured and formula stand side by side, equal
        if "formula" in line:
            words = line.split()
            assert words[-1] == words[-3], line


@each_lesson
def test_every_task_alone_fails_by_name(lesson: Lesson) -> None:
    """Filling in all tasks but one must leave exactly that one."""
    for task in exercise.tasks(lesson):
        blanks, answer = exercise.blank(lesson), lesson.answer.read_text()
        source = exercise.fill(lesson, blanks)
        line = next(x for x in blanks.splitlines() if f"task {task.task}:" in x)
        lines = source.splitlines()
        region = next(r for r in exercise.regions(answer) if r.name == task.name)
        lines[region.first : region.last] = [line]
        lesson.work.parent.mkdir(exist_ok=True)
        lesson.work.write_text("\n".join(lines) + "\n")
        assert exercise.unanswered(lesson) == [task.task]


@each_lesson
def test_every_task_has_three_hints_and_none_gives_the_answer_away(lesson: Lesson) -> None:
    hints = exercise.hints(lesson)
    assert list(hints) == [region.task for region in exercise.tasks(lesson)]
    for region in exercise.tasks(lesson):
        assert len(hints[region.task]) == 3
        answer = {line.strip() for line in exercise.region_lines(lesson.answer, region.name)}
        assert not answer & set(hints[region.task])


def run_cli(*arguments: str) -> int:
    return cli.main(list(arguments))


def test_start_keeps_an_existing_answer(capsys: pytest.CaptureFixture[str], empty_work: Path) -> None:
    assert run_cli("start", "1") == 0
    assert "fill in" in capsys.readouterr().out
    (empty_work / "stage1.py").write_text("# mine\n")
    assert run_cli("start", "1") == 2
    assert "may hold your answer" in capsys.readouterr().err
    assert (empty_work / "stage1.py").read_text() == "# mine\n"
    assert run_cli("start", "1", "--force") == 0
    assert "NotImplementedError" in (empty_work / "stage1.py").read_text()


def test_hints_follow_the_next_blank_task(capsys: pytest.CaptureFixture[str]) -> None:
    lesson = LESSONS[1]
    work = exercise.start(lesson)
    run_cli("hint", "1")
    assert capsys.readouterr().out.startswith("task reorder, hint 1 of 3: ")
    answer = "\n".join(exercise.region_lines(lesson.answer, "ex_reorder"))
    blank = next(x for x in work.read_text().splitlines() if "task reorder" in x)
    work.write_text(work.read_text().replace(blank, "\n".join(f"    {x}" for x in answer.splitlines())))
    run_cli("hint", "1", "3")
    assert capsys.readouterr().out.startswith("task flatten, hint 3 of 3: ")
    assert run_cli("hint", "1", "4") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "99"], "there is no lesson '99'; the lessons are 0, 1"),
        (["check", "1"], "does not exist yet: python -m lessons start 1"),
        (["diff", "1"], "does not exist yet: python -m lessons start 1"),
        (["check"], "which lesson? python -m lessons check N"),
        (["run", "1", "--world", "0"], "--world needs at least one rank, not 0"),
    ],
)
def test_mistakes_are_answered_with_the_remedy(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(*arguments) == 2
    assert message in capsys.readouterr().err


def test_a_syntax_error_is_shown_with_its_place(capsys: pytest.CaptureFixture[str], empty_work: Path) -> None:
    empty_work.mkdir()
    (empty_work / "stage2.py").write_text("x = 1\ndef broken(:\n")
    assert run_cli("check", "2") == 2
    error = capsys.readouterr().err
    assert "stage2.py, line 2: invalid syntax" in error
    assert "def broken(:" in error


def test_a_wrong_answer_is_told_what_was_expected(empty_work: Path) -> None:
    lesson = LESSONS[1]
    source = lesson.answer.read_text().replace("(rank < remaining)", "(rank > remaining)")
    assert source != lesson.answer.read_text()
    empty_work.mkdir()
    lesson.work.write_text(source)
    run = suite_on(lesson)
    assert run.returncode == 1
    assert "expected" in run.stdout and "got" in run.stdout


def test_a_file_that_cannot_be_imported_is_told_why(empty_work: Path) -> None:
    empty_work.mkdir()
    LESSONS[1].work.write_text("import no_such_module\n")
    run = suite_on(LESSONS[1])
    assert run.returncode == 1
    assert "no_such_module" in run.stdout


def test_diff_and_solution(capsys: pytest.CaptureFixture[str]) -> None:
    exercise.start(LESSONS[2])
    run_cli("diff", "2")
    assert "-        raise NotImplementedError" in capsys.readouterr().out
    run_cli("solution", "2")
    assert "task overlap" in capsys.readouterr().out
    LESSONS[2].work.write_bytes(LESSONS[2].answer.read_bytes())
    run_cli("diff", "2")
    assert "letter for letter" in capsys.readouterr().out


def test_list_and_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("list") == 0
    listed = capsys.readouterr().out
    assert all(f"{lesson.number}" in listed for lesson in LESSONS)
    assert run_cli("demo") == 0
    shown = capsys.readouterr().out
    assert "agree as integers" in shown
    assert all(row.name in shown for row in registry.ROWS)


def test_the_demo_says_so_when_measurement_and_formula_differ(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    wrong = dataclasses.replace(registry.ROWS[1], sent=lambda sizes, world: 1)
    monkeypatch.setattr(cli, "ROWS", [wrong])
    assert run_cli("demo") == 1
    assert "DISAGREE" in capsys.readouterr().out
