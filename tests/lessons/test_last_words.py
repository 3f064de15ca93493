"""A crash or a loop in a learner's file becomes a sentence with its task and its line."""

import subprocess
import sys
from pathlib import Path

import pytest

from lessons import exercise, last_words, registry
from lessons.check import check, explain
from lessons.registry import LESSONS, ROOT, Lesson

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work/ folder of our own, so that nobody's answers are touched."""
    monkeypatch.setattr(registry, "WORK", tmp_path / "work")
    return tmp_path / "work"


def answer_with(lesson: Lesson, *changes: tuple[str, str]) -> Path:
    """Write the right answers, but for these lines of the first file. Returns that file."""
    exercise.start(lesson)
    for answer, file in lesson.files:
        file.write_text(exercise.fill(answer, lesson.number, file.read_text()))
    first = lesson.files[0][1]
    text = first.read_text()
    for right, wrong in changes:
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    first.write_text(text)
    return first


def last_words_of(code: str, folder: Path) -> str:
    """What a process that runs this under a watch leaves behind."""
    words = folder / "words.txt"
    script = (
        "import pathlib, sys; from lessons import last_words; last_words.LIMIT = 0.5\n"
        f"watch = last_words.Watch(pathlib.Path({str(words)!r}))\n"
        f"sys.path.insert(0, {str(folder)!r})\n{code}\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True)
    return words.read_text()


def test_a_loop_that_never_ends_is_found_in_the_thread_that_does_not_wait(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.py"
    theirs.write_text(
        "import threading\n\n\ndef loop():\n    while True:\n        pass\n\n\n"
        "def wait():\n    threading.Event().wait()\n"
    )
    code = (
        "import threading, theirs; watch.start('test_overlap_is_empty')\n"
        "threading.Thread(target=theirs.loop).start(); theirs.wait()"
    )
    end = last_words.read(last_words_of(code, tmp_path), [theirs])
    assert end is not None and end.during == "test_overlap_is_empty"
    assert "a loop that never ends" in end.why
    assert end.place in [(theirs, 5), (theirs, 6)]


def test_what_only_waits_may_take_longer(tmp_path: Path) -> None:
    code = "import time; watch.start('test_a'); time.sleep(0.8); watch.stop(); time.sleep(0.6)"
    assert last_words.read(last_words_of(code, tmp_path), []) is None
    end = last_words.read(last_words_of("import time; watch.start('test_b'); time.sleep(5)", tmp_path), [])
    assert end is not None and end.during == "test_b"


def test_what_ends_by_itself_leaves_no_last_words(tmp_path: Path) -> None:
    code = "import time; watch.start('test_a'); watch.stop(); time.sleep(0.8)"
    assert last_words.read(last_words_of(code, tmp_path), []) is None


def test_a_crash_names_the_line_and_its_task(tmp_path: Path) -> None:
    lesson = LESSONS[3]
    file = answer_with(lesson)
    lines = file.read_text().splitlines()
    number = 1 + next(i for i, line in enumerate(lines) if "flat_grad = " in line)
    crash = "import faulthandler; faulthandler._sigsegv()"
    file.write_text("\n".join([*lines[: number - 1], " " * 8 + crash, *lines[number:]]))
    theirs = f"import runpy; m = runpy.run_path({str(file)!r})\nwatch.start('test_x')\n"
    end = last_words.read(last_words_of(theirs + "m['Sliced'].reduce_gradient(None)", tmp_path), [file])
    assert end is not None and end.place == (file, number)
    said = explain(lesson, end)
    assert "Segmentation fault: the process used memory that it does not have" in said
    assert f"line {number}, task reduce: import faulthandler" in said
    assert said.endswith("help: python -m lessons hint 3 reduce")


def test_a_crash_outside_the_file_names_the_test_s_task() -> None:
    end = last_words.End("test_slice_is_a_copy", "Segmentation fault: memory", None)
    said = explain(LESSONS[3], end)
    assert "no line of yours was running" in said and said.endswith("hint 3 slice")


def test_a_hook_inside_of_a_task_s_function_belongs_to_the_task() -> None:
    lesson = LESSONS[3]
    file = answer_with(lesson)
    lines = file.read_text().splitlines()
    number = 2 + next(i for i, line in enumerate(lines) if "def before_backward" in line)
    assert exercise.tasks_at(lesson, file, number) == ["after"]


def test_forgotten_memory_is_a_sentence_and_no_crash(capfd: Capture) -> None:
    answer_with(LESSONS[3], ("self.flat.untyped_storage().resize_(self.bytes)", "pass"))
    assert check(LESSONS[3]) == 1
    said = capfd.readouterr().out
    assert "a storage has 0 bytes, 24 are needed: resize_ it first" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "why"),
    [("import os; os.abort()", "Aborted: "), ("while True: pass", "a loop that never ends")],
)
def test_check_says_where_tests_could_not_go_on(wrong: str, why: str, capfd: Capture) -> None:
    answer_with(LESSONS[2], ("return low, max(low, high)", wrong))
    assert check(LESSONS[2]) == 1
    said = capfd.readouterr().out
    assert "the tests stopped in test_overlap_" in said and why in said
    assert f"task overlap: {wrong}\nread: lessons/step2_gradients/lesson.md:" in said
    assert said.endswith("help: python -m lessons hint 2 overlap\n")
