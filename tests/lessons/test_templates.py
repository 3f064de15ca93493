"""Releases for GitHub, Classroom 50 and nbgrader: their commands run, and their files are what those read."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lessons import __main__ as cli
from lessons import exercise, templates
from lessons.exercise import find_lesson
from lessons.registry import IN_ORDER

ADAM = find_lesson("0")
OF_A_CELL = {"schema_version", "grade", "locked", "solution", "task", "grade_id", "points"}  # schema 3


def bare() -> dict[str, str]:
    """An environment in which nothing of this repository is in reach."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def answer(folder: Path, leave: str = "") -> None:
    """Fill lesson 0's files with answers, as a student would, except the task to `leave`."""
    for right, work in ADAM.files:
        file = folder / "work" / work.name
        file.write_text(exercise.fill(right, ADAM.number, file.read_text(), leave))


def run_steps(folder: Path) -> list[tuple[str, int]]:
    """Run the workflow's commands, all but the installation, and return how each ended."""
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((folder / ".github" / "workflows" / "lessons.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert [each["uses"] for each in job["steps"][:2]] == ["actions/checkout@v4", "actions/setup-python@v5"]
    assert job["steps"][2]["run"] == "python -m pip install -e ."
    ended = []
    for step in job["steps"][3:]:
        command = shlex.split(step["run"])
        assert command[0] == "python" and step["if"] == "${{ !cancelled() }}"
        done = subprocess.run([sys.executable, *command[1:]], cwd=folder, env=bare(), capture_output=True)
        ended.append((step["name"], done.returncode))
    return ended


@pytest.mark.rotates
def test_the_workflow_of_a_template_repository_checks_each_lesson(tmp_path: Path) -> None:
    folder = tmp_path / "template"
    assert cli.main(["release", str(folder), "0", "--for", "github"]) == 0
    assert "work/progress.json" in (folder / ".gitignore").read_text()
    assert run_steps(folder) == [("lesson 0", 1)]
    answer(folder)
    assert run_steps(folder) == [("lesson 0", 0)]


@pytest.mark.rotates
def test_classroom_50_gets_a_result_that_a_student_s_tests_cannot_change(
    tmp_path: Path,
) -> None:
    assert cli.main(["release", str(tmp_path / "made"), "0", "--for", "classroom50"]) == 0
    student, grader = tmp_path / "made" / "template", tmp_path / "made" / "autograder" / "autograder.py"
    answer(student, leave="average")
    (student / "tests" / "lessons" / "test_task_step0.py").write_text("")
    named = {"CLASSROOM": "zero", "ASSIGNMENT": "adam", "SUBMISSION_TAG": "submit/1", "COMMIT_URL": "c"}
    env = {**bare(), **named, "RELEASE_URL": "r"}
    done = subprocess.run([sys.executable, str(grader)], cwd=student, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((student / "result.json").read_text())
    required = {"schema", "classroom", "assignment", "submission", "commit", "release", "review", "datetime"}
    assert {*result} == required | {"score", "max-score", "tests"}
    assert result["schema"] == "classroom50/result/v1" and result["classroom"] == "zero"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", result["datetime"])
    tests = {test["test-name"]: test for test in result["tests"]}
    assert [*tests] == ["lesson 0: adam", "lesson 0: average", "lesson 0: contract"]
    assert tests["lesson 0: adam"] == {
        "test-name": "lesson 0: adam",
        "passed": True,
        "score": 10,
        "max-score": 10,
    }
    assert not tests["lesson 0: average"]["passed"] and not tests["lesson 0: contract"]["passed"]
    assert result["max-score"] == 40 and result["score"] == sum(test["score"] for test in result["tests"])
    assert all(type(test["score"]) is int for test in result["tests"])


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course of nbgrader with all lessons."""
    folder = tmp_path_factory.mktemp("nbgrader") / "course"
    templates.release_for("nbgrader", folder)
    return folder


def notebooks(course: Path) -> dict[str, Any]:
    """The notebooks of its assignment, by name."""
    files = sorted((course / "source" / templates.ASSIGNMENT).glob("*.ipynb"))
    return {file.name: json.loads(file.read_text()) for file in files}


def test_notebooks_of_nbgrader_have_its_metadata(course: Path) -> None:
    books = notebooks(course)
    assert len(books) == len(IN_ORDER) and [*books][:3] == [
        "lesson_00.ipynb",
        "lesson_00b.ipynb",
        "lesson_01.ipynb",
    ]
    names = []
    for lesson, book in zip(IN_ORDER, books.values(), strict=True):
        assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
        total = 0
        for cell in book["cells"]:
            about = cell["metadata"]["nbgrader"]
            assert {*about} == OF_A_CELL - (set() if about["grade"] else {"points"})
            assert about["schema_version"] == 3 and not about["task"]
            assert re.fullmatch(r"[a-zA-Z0-9_\-]+", about["grade_id"]) and re.fullmatch(
                r"[\w-]{1,64}", cell["id"]
            )
            assert about["locked"] != about["solution"]
            if cell["cell_type"] == "markdown":  # nbgrader wants such a cell to be both or neither
                assert not about["grade"] and not about["solution"]
            lines = cell["source"].splitlines()
            assert (
                about["solution"]
                == (lines[1:2] == ["### BEGIN SOLUTION"])
                == (lines[-1] == "### END SOLUTION")
            )
            names.append(about["grade_id"])
            total += about.get("points", 0)
        solutions = [cell["source"] for cell in book["cells"] if cell["metadata"]["nbgrader"]["solution"]]
        assert [text.split()[2] for text in solutions] == exercise.tasks(lesson)
        assert total == 10 * len(solutions) + 20
    assert len(names) == len({*names})


def cell_by_cell(folder: Path, answers: list[str], asked: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run a notebook's cells without Jupyter: what `%%task` stores, then what is judged."""
    program = "import json, sys\nfrom lessons.graded_cells import points, put\n"
    program += (
        f"for line, text in json.loads({json.dumps(json.dumps(answers))}): put(*line.split()[1:], text)\n"
    )
    program += "\n".join(f"print({each})" for each in asked)
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, env=bare(), capture_output=True, text=True)


@pytest.mark.rotates
def test_cells_of_nbgrader_write_the_file_and_give_points(course: Path) -> None:
    folder, book = course / "source" / templates.ASSIGNMENT, notebooks(course)["lesson_00.ipynb"]
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    answers = [c["source"].split("\n", 1) for c in cells if c["metadata"]["nbgrader"]["solution"]]
    asked = [cell["source"] for cell in cells if cell["metadata"]["nbgrader"]["grade"]]
    done = cell_by_cell(folder, answers, asked)
    assert done.stdout.split() == ["10.0", "10.0", "20.0"] and done.stderr == "", done.stdout + done.stderr
    for right, work in ADAM.files:
        mine = [line for line in (folder / "work" / work.name).read_text().splitlines() if "### " not in line]
        assert mine == exercise.unmarked(right.read_text()).splitlines()
    answers[1][1] = "    raise NotImplementedError()"
    done = cell_by_cell(folder, answers, asked)
    assert done.returncode == 1 and done.stdout.startswith("10.0\n")
    assert "AssertionError: lesson 0, average: no points yet" in done.stderr


def test_a_release_for_nobody_is_no_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["release", str(tmp_path), "0", "--for", "github"]) == 2
    assert "exists already" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["release", str(tmp_path / "new"), "--for", "moodle"])
