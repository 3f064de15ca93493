"""`check --json`, `handin` and `verify`: points follow one rule, and nothing in a hand-in is believed."""

import ast
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from lessons import __main__ as cli
from lessons import exercise, grade, handin, outside, registry
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


@pytest.mark.rotates
def test_a_forged_hand_in_is_judged_again(capfd: Capture, work: Path) -> None:
    wrong_file("f.master.grad = None  # used up", "pass")
    assert cli.main(["handin", "1", "--name", "Ada Lovelace"]) == 0
    assert "Hand in " in capfd.readouterr().out
    place = work / "handin_1.json"
    content = json.loads(place.read_text())
    assert content["name"] == "Ada Lovelace" and content["points"] == 48.33  # one of six claims
    content["lessons"][0]["report"]["points"] = 70
    content["sha256"] = handin.digest(content)
    place.write_text(json.dumps(content))
    assert cli.main(["verify", str(place)]) == 1
    table = capfd.readouterr().out
    assert (
        "Ada Lovelace" in table and "70 of 70" in table and "48.33 of 70" in table and "NOT THE SAME" in table
    )


def hand_in_of(points: float) -> dict[str, Any]:
    """A hand-in of lesson 1, as `handin` would write it."""
    entry = {"report": {"lesson": "1", "points": points}, "sources": {"stage1.py": "x = 1\n"}}
    content: dict[str, Any] = {"kind": handin.KIND, "name": "Ada", "lessons": [entry]}
    return {**content, "sha256": handin.digest(content)}


def test_each_file_of_a_class_has_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handin, "points_in_copy", lambda lesson, sources: 12.5)
    elsewhere = hand_in_of(12.5)
    elsewhere["lessons"][0]["sources"] = {"../../stage1.py": "x = 1\n"}
    elsewhere["sha256"] = handin.digest(elsewhere)
    broken = hand_in_of(12.5)
    broken["lessons"][0]["sources"]["stage1.py"] = "def (\n"
    texts = {
        "same": json.dumps(hand_in_of(12.5)),
        "edited": json.dumps({**hand_in_of(12.5), "name": "Bob"}),
        "elsewhere": json.dumps(elsewhere),
        "broken": json.dumps({**broken, "sha256": handin.digest(broken)}),
        "list": "[]",
        "empty": json.dumps({**hand_in_of(0), "lessons": []}),
        "text": "no JSON",
    }
    files = [tmp_path / f"{name}.json" for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text)
    found = {Path(each.file).stem: each for each in handin.verify([*files, tmp_path / "missing.json"])}
    assert {name: each.note for name, each in found.items() if each.lesson} == {
        "same": "same",
        "edited": "same, edited after it was written",
        "broken": "NOT THE SAME",
    }
    assert found["broken"].found == "0 of 70"
    assert "needs stage1.py, it holds ../../stage1.py" in found["elsewhere"].note
    for name in ("list", "text"):
        assert found[name].note == "unreadable: not a hand-in of this version"
    assert "it holds no lesson" in found["empty"].note and "No such file" in found["missing"].note


CHEATS = {  # what is put at the end of a wrong file, or in a task's place
    "the key by __path__": "import zero_min\nKEY = zero_min.__path__\n",
    "the key by getattr": "import zero_min\nKEY = getattr(zero_min, '__path__')\n",
    "a patched pytest": "import pytest\npytest.main = lambda *a, **k: 0\n",
    "a patched judge": "from lessons import evidence\nevidence.same = lambda *a, **k: None\n",
    "a written claims file": "import sys\nopen(sys.argv[4], 'a').write('{}')\n",
    "through torch": "torch.sys.modules['_pytest'] = None\n",
    "by name": "__import__('os')._exit(0)\n",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_file_that_reaches_for_the_judge_is_not_run(cheat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handin, "points_in_copy", lambda lesson, sources: 70.0)
    ((answer, _),) = STAGE1.files
    right = exercise.unmarked(answer.read_text())
    points, why = handin._points(STAGE1, {"stage1.py": right + CHEATS[cheat]})
    assert points == 0 and why.startswith("not run: it reaches outside of the exercise: stage1.py, line ")


@each_lesson
def test_an_answer_reaches_nowhere_and_changes_nothing_else(lesson: Lesson) -> None:
    for answer, _ in lesson.files:
        source = exercise.unmarked(answer.read_text())
        assert outside.reaching(lesson, answer.name, source) == []
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


@pytest.mark.rotates
@pytest.mark.parametrize("number", ["0", "1", "6"])
def test_a_right_answer_has_all_points_in_a_copy_without_the_key(number: str) -> None:
    lesson = exercise.find_lesson(number)
    sources = {answer.name: exercise.unmarked(answer.read_text()) for answer, _ in lesson.files}
    assert handin._points(lesson, sources) == (grade.most(lesson), "")
