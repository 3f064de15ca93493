"""`release DIR N ... --for WHAT`: a release for a GitHub repository, for Classroom 50 or for nbgrader."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lessons.exercise import (
    LessonError,
    blank,
    find_lesson,
    function_at,
    region_lines,
    task_regions,
    tasks,
)
from lessons.grade import CONTRACT, TASK
from lessons.registry import IN_ORDER, Lesson
from lessons.release import release

KINDS = ("github", "classroom50", "nbgrader")
ASSIGNMENT = "zero_lessons"  # the name of nbgrader's assignment
CPU = "https://download.pytorch.org/whl/cpu"  # torch without gigabytes of CUDA
WORKFLOW = """\
# Checks all lessons at each push. The result is for the student: `verify` gives the marks.
name: lessons
on: [push, workflow_dispatch]
permissions:
  contents: read
jobs:
  check:
    runs-on: ubuntu-latest
    timeout-minutes: 30
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - name: install
        run: python -m pip install -e .
        env:
          PIP_EXTRA_INDEX_URL: {cpu}
{steps}"""
STEP = """\
      - name: lesson {number}
        if: ${{{{ !cancelled() }}}}
        run: python -m lessons check {number}
"""
AUTOGRADER = '''\
"""Judges a push for Classroom 50: the student's files in a clean copy of the release. Writes result.json."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

FILES = {files}
MOST = {most}  # points of each task of each lesson
HERE, STUDENT = Path(__file__).resolve().parent, Path.cwd()


def judged(copy, number):
    """What `check` says of one lesson; nothing if it says nothing."""
    command = [sys.executable, "-m", "lessons", "check", number, "--json", "--sandbox"]
    try:
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=900)
        return json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return {{}}


def committed():
    """The date of the commit, so that a later regrade does not make it late; now, without git."""
    command = ["git", "log", "-1", "--format=%ct"]
    done = subprocess.run(command, cwd=STUDENT, capture_output=True, text=True)
    now = datetime.now(timezone.utc)
    when = datetime.fromtimestamp(int(done.stdout), timezone.utc) if done.stdout.strip() else now
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def tests_of(number, report):
    """A line for each task and for the contract, in whole points."""
    for task, most in MOST[number].items():
        if report.get("reached") or "claims" not in report:
            score = 0
        elif task == "contract":
            score = report["contract"]["points"]
        else:
            claims = [claim for claim in report["claims"] if claim["task"] == task and claim["of"]]
            score = round(most * sum(claim["passed"] is True for claim in claims) / max(len(claims), 1))
        name = f"lesson {{number}}: {{task}}"
        yield {{"test-name": name, "passed": score == most, "score": score, "max-score": most}}


def main():
    if importlib.util.find_spec("torch") is None:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--extra-index-url", "{cpu}"]
        subprocess.run([*install, str(HERE / "release")], check=True)
    tests = []
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(HERE / "release", Path(folder) / "copy")
        for number, names in FILES.items():
            for name in names:
                if (STUDENT / "work" / name).is_file():
                    shutil.copy(STUDENT / "work" / name, copy / "work" / name)
            tests += tests_of(number, judged(copy, number))
    named = {{"classroom": "CLASSROOM", "assignment": "ASSIGNMENT", "submission": "SUBMISSION_TAG"}}
    named |= {{"commit": "COMMIT_URL", "release": "RELEASE_URL"}}
    result = {{name: os.environ.get(variable, "") for name, variable in named.items()}}
    result |= {{
        "schema": "classroom50/result/v1",
        "review": os.environ.get("REVIEW_URL") or result["commit"],
        "datetime": committed(),
        "score": sum(test["score"] for test in tests),
        "max-score": sum(test["max-score"] for test in tests),
        "tests": tests,
    }}
    (STUDENT / "result.json").write_text(json.dumps(result, indent=1) + "\\n", encoding="utf-8")


main()
'''


def release_for(what: str, folder: Path, numbers: Sequence[str] = ()) -> str:
    """Write the folder in this form; returns what to tell the instructor."""
    if folder.exists():
        raise LessonError(f"{folder} exists already: remove it, or name another folder")
    given = [find_lesson(number) for number in numbers] or IN_ORDER
    lessons = [lesson for lesson in IN_ORDER if lesson in given]
    named = [str(lesson.number) for lesson in lessons]
    if what == "nbgrader":
        place = folder / "source" / ASSIGNMENT
        release(place, named)
        for lesson in lessons:
            notebook = place / f"lesson_{float(lesson.number):04.1f}.ipynb".replace(".0.", ".").replace(
                "0.5", "0b"
            )
            notebook.write_text(json.dumps(_notebook(lesson), indent=1) + "\n", encoding="utf-8")
        config = f'c = get_config()\nc.CourseDirectory.course_id = "{ASSIGNMENT}"\n'
        (folder / "nbgrader_config.py").write_text(config, encoding="utf-8")
        return (
            f"{folder} is a course of nbgrader, with answers in {place}. Keep it, and in it run: "
            f"nbgrader generate_assignment {ASSIGNMENT}. Students get release/{ASSIGNMENT}"
        )
    template = folder if what == "github" else folder / "template"
    said = release(template, named)
    _start(template, lessons)
    if what == "github":
        steps = "".join(STEP.format(number=number) for number in named)
        place = template / ".github" / "workflows" / "lessons.yml"
        place.parent.mkdir(parents=True)
        place.write_text(WORKFLOW.format(cpu=CPU, steps=steps), encoding="utf-8")
        return f"{said}\nPush it as a template repository; {place} checks each push"
    grader = folder / "autograder"
    shutil.copytree(template, grader / "release")
    files = {str(lesson.number): [work.name for _, work in lesson.files] for lesson in lessons}
    most = {str(x.number): {**dict.fromkeys(tasks(x), TASK), "contract": CONTRACT} for x in lessons}
    program = AUTOGRADER.format(files=json.dumps(files), most=json.dumps(most), cpu=CPU)
    (grader / "autograder.py").write_text(program, encoding="utf-8")
    return (
        f"{said}\nPush {template} as the template repository. Copy what is in {grader} to "
        "CLASSROOM/autograders/ASSIGNMENT of your organization's repository `classroom50`"
    )


def _start(folder: Path, lessons: Sequence[Lesson]) -> None:
    """Begin all exercises there: a repository for students holds the files that they fill in."""
    (folder / "work").mkdir()
    for lesson in lessons:
        for answer, work in lesson.files:
            text = blank(answer, lesson.number)
            (folder / "work" / work.name).write_text(text, encoding="utf-8")
    (folder / ".gitignore").write_text(
        "__pycache__/\n*.egg-info/\nbuild/\nwork/progress.json\n", encoding="utf-8"
    )


def _notebook(lesson: Lesson) -> dict[str, Any]:
    """A notebook of nbgrader: a cell for each task, and cells that judge them."""
    number, label = lesson.number, lesson.label
    cells = [
        _cell(
            "markdown",
            f"title-{label}",
            f"# Lesson {number}: {lesson.title}\n\nRead `{_page(lesson)}` first.",
        ),
        _cell(
            "code",
            f"setup-{label}",
            "%load_ext lessons.graded_cells\nfrom lessons.graded_cells import points",
        ),
    ]
    for answer, _ in lesson.files:
        source = answer.read_text(encoding="utf-8")
        for region in task_regions(source):
            where = function_at(source, region.first + 1)
            place = f"`{where}` in `zero_min/{answer.name}`"
            text = f"## Task `{region.task}`\n\nThe lines of {place}, without their margin. "
            text += f"Help: `python -m lessons hint {number} {region.task}`"
            cells.append(_cell("markdown", f"about-{label}-{region.task}", text))
            lines = "\n".join(region_lines(answer, region.name))
            body = f"%%task {number} {region.task}\n### BEGIN SOLUTION\n{lines}\n### END SOLUTION"
            cells.append(_cell("code", f"task-{label}-{region.task}", body, solution=True))
    cells.append(_cell("markdown", f"points-{label}", "## Points"))
    for task, most in [*dict.fromkeys(tasks(lesson), TASK).items(), ("contract", CONTRACT)]:
        cells.append(_cell("code", f"points-{label}-{task}", f'points("{number}", "{task}")', points=most))
    language = {"name": "python"}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": language}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _page(lesson: Lesson) -> str:
    return f"lessons/{lesson.folder}/lesson.md"


def _cell(
    kind: str, name: str, source: str, solution: bool = False, points: int | None = None
) -> dict[str, Any]:
    """A cell as nbgrader's schema 3 describes it: an answer, a judge, or locked text."""
    about: dict[str, Any] = {"schema_version": 3, "grade": points is not None, "locked": not solution}
    about |= {"solution": solution, "task": False, "grade_id": name}
    about |= {} if points is None else {"points": points}
    cell = {"cell_type": kind, "id": name[:64], "metadata": {"nbgrader": about}, "source": source}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})
