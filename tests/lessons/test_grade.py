"""`check --json` and `handin`: points follow one rule, and say what they are for."""

import ast
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from lessons import __main__ as cli
from lessons import exercise, grade, outside, registry
from lessons.registry import LESSONS, ROOT, Lesson

Capture = pytest.CaptureFixture[str]
each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=[lesson.folder for lesson in LESSONS])
STAGE1 = LESSONS[1]


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work/ folder of our own."""
    monkeypatch.setattr(registry, "WORK", tmp_path / "work")
    return tmp_path / "work"


def wrong_file(right: str, wrong: str) -> Path:
    """Lesson 1's file: the answer with one change."""
    exercise.start(STAGE1)
    ((answer, file),) = STAGE1.files
    text = exercise.unmarked(answer.read_text())
    assert text.count(right) == 1
    file.write_text(text.replace(right, wrong))
    return file


def run_json(capfd: Capture, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and all of stdout as one object."""
    status = cli.main([*arguments, "--json"])
    return status, json.loads(capfd.readouterr().out)


@each_lesson
def test_every_task_has_a_claim_so_its_points_can_be_had(lesson: Lesson) -> None:
    source = (ROOT / f"tests/lessons/test_task_step{lesson.label}.py").read_text()
    claims = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    tasks = [grade.task_of(lesson, name) for name in claims if name.startswith("test_")]
    assert set(tasks) - {None} == set(exercise.tasks(lesson))
    for name in claims:  # whose claim it is has one answer
        assert sum(name.startswith(f"test_{task}_") for task in exercise.tasks(lesson)) <= 1
    assert tasks.count(None) == (3 if lesson.number == 6 else 0)


@pytest.mark.rotates
def test_a_claim_that_crashes_costs_its_own_points_and_no_others(capfd: Capture) -> None:
    file = wrong_file(
        "    base, remaining", "    import os\n    flat.numel() == 10 and os.abort()\n    base, remaining"
    )
    status, said = run_json(capfd, "check", "1")
    assert status == 1 and not said["passed"] and said["error"] is None
    failed = [claim for claim in said["claims"] if not claim["passed"]]
    assert [claim["test"] for claim in failed] == ["test_partition_cuts_near_equally[10-4-expected1]"]
    (claim,) = failed
    assert (claim["task"], claim["points"], claim["of"]) == ("partition", 0, 3.33)
    assert claim["diagnosis"]["said"].startswith("Aborted") and claim["diagnosis"]["file"] == "stage1.py"
    assert (said["points"], said["of"]) == (46.67, 70)  # four tasks, two thirds of one, no contract
    assert said["contract"]["passed"] is None and said["contract"]["points"] == 0
    assert said["sha256"] == {"stage1.py": hashlib.sha256(file.read_bytes()).hexdigest()}


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("text", "status", "error"),
    [
        ("import no_such_module\n", 1, "no_such_module"),
        ("import os; os._exit(0)\n", 1, "ended before they began"),
        ("def (\n", 2, "line 1: invalid syntax"),
        (None, 2, "does not exist yet: python -m lessons start 1"),
    ],
)
def test_what_cannot_be_judged_is_an_object_with_an_error(
    text: str | None, status: int, error: str, capfd: Capture, work: Path
) -> None:
    work.mkdir()
    if text is not None:
        (work / "stage1.py").write_text(text)
    got, said = run_json(capfd, "check", "1")
    assert got == status and error in said["error"]
    assert said.get("points", 0) == 0


@each_lesson
def test_an_answer_reaches_nowhere_and_changes_nothing_else(lesson: Lesson) -> None:
    for answer, _ in lesson.files:
        source = exercise.unmarked(answer.read_text())
        assert outside.reaching({answer.name: source}) == []
        assert outside.changed(lesson, answer.name, source) == []


def test_lines_outside_of_the_tasks_are_named() -> None:
    ((answer, _),) = STAGE1.files
    source = exercise.unmarked(answer.read_text()).replace(
        "        loss.backward()\n", "        loss.mul(2).backward()\n"
    )
    line = source.splitlines().index("        loss.mul(2).backward()") + 1
    assert outside.in_words(STAGE1, {"stage1.py": source}) == (
        f"stage1.py is changed outside of the tasks: line {line}"
    )
