"""Exercises are the answer key with holes: the suite fails on the holes and passes when they are filled."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lessons import __main__ as cli
from lessons import exercise, registry, replace, rows
from lessons.check import check
from lessons.progress import progress, remember
from lessons.registry import LESSONS, ROOT, Lesson
from lessons.run_judge import QUICK
from tests import rotation

Capture = pytest.CaptureFixture[str]
each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=[lesson.folder for lesson in LESSONS])


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work/ folder of our own, so that nobody's answers are touched."""
    monkeypatch.setattr(registry, "WORK", tmp_path / "work")
    return tmp_path / "work"


def answer_all(lesson: Lesson, leave: str = "") -> None:
    """Write the work files with every task filled in, except perhaps one."""
    exercise.start(lesson, force=True)
    for answer, file in lesson.files:
        file.write_text(exercise.fill(answer, lesson.number, file.read_text(), leave))


@pytest.mark.parametrize("lesson", rotation.one_of(LESSONS), ids=lambda lesson: lesson.folder)
def test_the_untouched_exercise_fails_and_names_a_task(lesson: Lesson, capfd: Capture) -> None:
    exercise.start(lesson)
    assert check(lesson) == 1
    said = capfd.readouterr()
    first = exercise.tasks(lesson)[0]
    assert f"lesson {lesson.number}, task {first}: python -m lessons hint {lesson.number}" in said.out
    assert f"tasks still to do: {', '.join(exercise.tasks(lesson))}" in said.out
    assert "Traceback" not in said.out + said.err
    assert progress(lesson) == f"0 of {len(exercise.tasks(lesson))} tasks written"


@each_lesson
def test_the_refilled_exercise_is_the_answer_byte_for_byte_without_its_markers(lesson: Lesson) -> None:
    for file in exercise.start(lesson):
        assert "NotImplementedError" in file.read_text() and "8<" not in file.read_text()
    answer_all(lesson)
    for answer, file in lesson.files:
        assert file.read_text() == "".join(
            line for line in answer.read_text().splitlines(keepends=True) if "# --8<--" not in line
        )
    assert exercise.unanswered(lesson) == []


slow_lesson = [pytest.param(x, marks=[] if x.number == 1 else pytest.mark.slow) for x in LESSONS]


@pytest.mark.parametrize("lesson", slow_lesson, ids=[lesson.folder for lesson in LESSONS])
def test_the_right_answer_passes_and_is_shown_its_bill(lesson: Lesson, capfd: Capture) -> None:
    answer_all(lesson)
    status = check(lesson)
    said = capfd.readouterr()
    assert status == 0, said.out + said.err
    assert "rank 3" in said.out
    measured = [line.split() for line in said.out.splitlines() if "formula" in line]
    assert len(measured) >= 4
    assert all(words[-1] == words[-3] for words in measured), said.out  # measured beside formula, equal


@pytest.mark.slow
@each_lesson
def test_each_task_alone_left_blank_fails_by_its_name(lesson: Lesson, capfd: Capture) -> None:
    for task in exercise.tasks(lesson):
        answer_all(lesson, leave=task)
        assert exercise.unanswered(lesson) == [task]
        assert check(lesson) == 1
        said = capfd.readouterr().out
        assert f"task {task}: python -m lessons hint" in said, said


@pytest.mark.parametrize("lesson", slow_lesson, ids=[lesson.folder for lesson in LESSONS])
def test_a_task_is_judged_without_the_one_that_comes_after_it(lesson: Lesson, tmp_path: Path) -> None:
    *_, last = exercise.tasks(lesson)
    answer_all(lesson, leave=last)
    places = {f"zero_min.{answer.stem}": str(work) for answer, work in lesson.files}
    command = [sys.executable, "-m", "lessons.judge", str(tmp_path / "words"), "--tasks", str(lesson.number)]
    env = {**os.environ, **replace.environment(places), **QUICK}
    said = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True).stdout
    failed = [line for line in said.splitlines() if line.startswith("test_")]
    assert failed and all(name.startswith(f"test_{last}_") for name in failed), failed


@pytest.mark.rotates
def test_what_check_has_said_is_remembered_of_the_files_as_they_were(capfd: Capture, work: Path) -> None:
    lesson = LESSONS[1]
    assert progress(lesson) == "not started"
    answer_all(lesson)
    assert progress(lesson) == "written, not checked"
    remember(lesson, passed=False)
    assert progress(lesson) == "does not pass yet"
    remember(lesson, passed=True)
    assert progress(lesson) == "passed"
    assert run_cli("bill", "--mine") == 0
    said = capfd.readouterr().out
    assert "stage1.py; all else is the answer key's" in said and "agree as integers" in said
    ((_, file),) = lesson.files
    file.write_text(file.read_text() + "# a thought\n")
    assert progress(lesson) == "changed since it passed"
    assert run_cli("bill", "--mine") == 2
    assert "no file of yours has passed as it is now" in capfd.readouterr().err
    (work / "progress.json").write_text("{")
    assert run_cli("list") == 2
    assert "progress.json cannot be read" in capfd.readouterr().err


@pytest.mark.rotates
def test_the_table_of_mine_is_made_by_my_file(capfd: Capture) -> None:
    lesson = LESSONS[1]
    answer_all(lesson)
    ((_, file),) = lesson.files
    file.write_text(file.read_text().replace("self.comm.all_gather(f.flat, f.mine)", "pass"))
    remember(lesson, passed=True)
    assert run_cli("bill", "--mine") == 1
    assert "DISAGREE" in capfd.readouterr().out


@each_lesson
def test_every_task_has_three_hints_and_none_gives_the_answer_away(lesson: Lesson) -> None:
    hints = exercise.hints(lesson)
    assert list(hints) == exercise.tasks(lesson)
    for answer, _ in lesson.files:
        for region in exercise.task_regions(answer.read_text()):
            assert len(hints[region.task]) == 3
            lines = [line.partition("  #")[0].strip() for line in exercise.region_lines(answer, region.name)]
            told = [line for line in lines if len(line) > 25 and line in "\n".join(hints[region.task])]
            assert not told, f"the hints of {region.task} hold lines of the answer: {told}"


def run_cli(*arguments: str) -> int:
    return cli.main(list(arguments))


def test_start_keeps_an_existing_answer(capsys: Capture, work: Path) -> None:
    assert run_cli("start", "1") == 0
    assert "fill in" in capsys.readouterr().out
    (work / "stage1.py").write_text("# mine\n")
    assert run_cli("start", "1") == 2
    assert "may hold your answer" in capsys.readouterr().err
    assert (work / "stage1.py").read_text() == "# mine\n"
    assert run_cli("start", "1", "--force") == 0
    assert "NotImplementedError" in (work / "stage1.py").read_text()


def test_hints_follow_the_next_blank_task(capsys: Capture) -> None:
    lesson = LESSONS[1]
    answer_all(lesson, leave="reorder")
    run_cli("hint", "1")
    assert capsys.readouterr().out.startswith("task reorder, hint 1 of 3: ")
    answer_all(lesson, leave="flatten")
    run_cli("hint", "1", "3")
    assert capsys.readouterr().out.startswith("task flatten, hint 3 of 3: ")
    assert run_cli("hint", "1", "4") == 2


def test_a_hint_for_a_task_that_is_filled_in_is_had_by_its_name(capsys: Capture) -> None:
    answer_all(LESSONS[1])
    run_cli("hint", "1", "gather")
    said = capsys.readouterr().out
    assert said.startswith("task gather, hint 1 of 3: ") and "python -m lessons hint 1 gather 2" in said
    run_cli("hint", "1", "gather", "2")
    assert capsys.readouterr().out.startswith("task gather, hint 2 of 3: ")
    assert run_cli("hint", "1") == 2
    assert "name one of reorder, flatten, partition, reduce, gather" in capsys.readouterr().err


def test_without_a_command_the_commands_are_listed(capsys: Capture) -> None:
    assert run_cli() == 0
    assert "python -m lessons check 1" in capsys.readouterr().out


def test_outside_of_the_environment_it_says_how_to_get_in() -> None:
    code = "import sys, runpy; sys.modules['rich'] = None; runpy.run_module('lessons', run_name='__main__')"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1 and "source .venv/bin/activate" in run.stderr


def test_a_reader_who_wants_no_more_is_no_error() -> None:
    command = f"{sys.executable} -m lessons list | true"
    run = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert run.stderr == ""


def test_list_and_hint_answer_at_once_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import lessons.__main__ as cli; "
    code += "sys.exit(cli.main(['list']) or cli.main(['hint', '3', 'after']))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "99"], "there is no lesson '99'; the lessons are 0, 1"),
        (["check", "1"], "does not exist yet: python -m lessons start 1"),
        (["diff", "1"], "does not exist yet: python -m lessons start 1"),
        (["check"], "which lesson? python -m lessons check N"),
        (["run", "1", "--world", "0"], "--world needs at least one, not 0"),
        (["hint", "1", "adam"], "lesson 1 has no task 'adam'; its tasks are reorder, flatten"),
    ],
)
def test_mistakes_are_answered_with_the_remedy(arguments: list[str], message: str, capsys: Capture) -> None:
    assert run_cli(*arguments) == 2
    assert message in capsys.readouterr().err


def test_a_syntax_error_is_shown_with_its_place(capsys: Capture, work: Path) -> None:
    work.mkdir()
    (work / "stage2.py").write_text("x = 1\ndef broken(:\n")
    assert run_cli("check", "2") == 2
    error = capsys.readouterr().err
    assert "stage2.py, line 2: invalid syntax" in error
    assert "def broken(:" in error


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("task", "right", "wrong", "message"),
    [
        ("partition", "rank < remaining", "rank >= num_partitions - remaining", "expected [3, 3, 2, 2]"),
        (
            "reduce",
            "my_grad.to(f.master.dtype)",
            "my_grad",
            "that is: Python stopped in your line\nin ",
        ),
        ("gather", "f.master.grad = None  # used up", "pass", "something is kept that should be"),
    ],
)
def test_a_wrong_answer_is_told_what_was_expected_and_where_help_is(
    task: str, right: str, wrong: str, message: str, capfd: Capture
) -> None:
    lesson = LESSONS[1]
    answer_all(lesson)
    ((answer, file),) = lesson.files
    file.write_text(answer.read_text().replace(right, wrong))
    assert file.read_text() != answer.read_text()
    assert check(lesson) == 1
    said = capfd.readouterr().out
    assert message in said and f"help: python -m lessons hint 1 {task}\n" in said


def test_a_file_that_cannot_be_imported_is_told_why(work: Path, capfd: Capture) -> None:
    work.mkdir()
    (work / "stage1.py").write_text("import no_such_module\n")
    assert check(LESSONS[1]) == 1
    said = capfd.readouterr().out
    assert "cannot be imported" in said and "no_such_module" in said


def test_diff_and_solution(capsys: Capture) -> None:
    exercise.start(LESSONS[2])
    run_cli("diff", "2")
    assert "-        raise NotImplementedError" in capsys.readouterr().out
    run_cli("solution", "2")
    assert "task overlap" in capsys.readouterr().out
    answer_all(LESSONS[2])
    run_cli("diff", "2")
    assert "letter for letter" in capsys.readouterr().out


def test_a_lesson_s_page_is_the_built_one_if_there_is_a_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "ROOT", tmp_path)
    lesson = LESSONS[2]
    assert lesson.page == tmp_path / "lessons" / lesson.folder / "lesson.md"
    built = tmp_path / "build" / "site" / "lessons" / lesson.folder / "lesson.html"
    built.parent.mkdir(parents=True)
    built.touch()
    assert lesson.page == built


def test_list_and_start_say_where_to_read(capsys: Capture) -> None:
    run_cli("list")
    listed = capsys.readouterr().out
    for lesson in LESSONS:
        assert lesson.page.exists() and exercise.shown(lesson.page) in listed
        if lesson.number < 7:  # a bonus has none
            assert lesson.notebook.exists() and exercise.shown(lesson.notebook) in listed
    run_cli("start", "2")
    assert f"read    {exercise.shown(LESSONS[2].page)}" in capsys.readouterr().out


def test_list_and_bill(capsys: Capture) -> None:
    assert run_cli("list") == 0
    listed = capsys.readouterr().out
    assert all(lesson.folder[:20] in listed for lesson in LESSONS)
    assert run_cli("bill") == 0
    shown = capsys.readouterr().out
    assert "agree as integers" in shown and max(map(len, shown.splitlines()[:5])) <= 80
    assert all(row.name in shown for row in rows.ROWS)


def test_the_bill_says_so_when_measurement_and_formula_differ(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = dataclasses.replace(rows.ROWS[1], sent=lambda sizes, world, steps: 1)
    monkeypatch.setattr(rows, "ROWS", [wrong])
    assert run_cli("bill") == 1
    shown = capsys.readouterr().out
    assert "DISAGREE" in shown and "(formula 0.00)" in shown
