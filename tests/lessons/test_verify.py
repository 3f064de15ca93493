"""`verify`: nothing in a hand-in is believed, each has limits of its own, and a teacher gets marks."""

import csv
import json
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lessons import __main__ as cli
from lessons import exercise, handin, late, marks, progress, registry, verify
from lessons.exercise import LessonError
from lessons.grade import most
from lessons.registry import LESSONS
from lessons.verify import Found, Limits
from tests import rotation
from tests.lessons.test_sandbox import CHEATS, right

Capture = pytest.CaptureFixture[str]
STAGE1 = LESSONS[1]
RIGHT = right(STAGE1)["stage1.py"]
HERE = "    base, remaining"  # the first line of the task `partition`
SMALL = Limits(seconds=300, memory=3, disk=0.1)


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work/ folder of our own."""
    monkeypatch.setattr(registry, "WORK", tmp_path / "work")
    return tmp_path / "work"


def judged(text: str, limits: Limits = SMALL) -> tuple[float, str]:
    """Points and reason for a file of lesson 1."""
    report, why = verify._judged(STAGE1, {"stage1.py": text}, limits, threading.Event())
    return (report["points"] if report else 0.0), why


def hand_in_of(points: float, text: str = "x = 1\n", **other: Any) -> dict[str, Any]:
    """A hand-in of lesson 1, as `handin` would write it."""
    entry = {"report": {"lesson": "1", "points": points}, "sources": {"stage1.py": text}}
    content: dict[str, Any] = {"kind": handin.KIND, "name": "Ada", "lessons": [entry], **other}
    return {**content, "sha256": handin.digest(content)}


def report_of(points: float) -> dict[str, Any]:
    """What `check --json` would print of lesson 1."""
    said = {
        "said": "expected 1, got 2",
        "means": "off by one",
        "file": "stage1.py",
        "line": 7,
        "read": "here",
    }
    claims = [
        {"test": "test_partition_a", "task": "partition", "passed": True, "points": 5, "of": 5},
        {
            "test": "test_partition_b",
            "task": "partition",
            "passed": False,
            "points": 0,
            "of": 5,
            "diagnosis": said,
        },
    ]
    contract = {"passed": None, "points": 0, "of": 20, "diagnosis": None}
    return {"points": points, "reached": [], "error": None, "claims": claims, "contract": contract}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file that is judged has 12.5 points, without running it."""
    monkeypatch.setattr(verify, "judged_in_copy", lambda *given: (report_of(12.5), ""))
    monkeypatch.setattr(verify, "_released", lambda number: Path())


def test_each_file_of_a_class_has_its_line(tmp_path: Path, quick: None) -> None:
    elsewhere = hand_in_of(12.5)
    elsewhere["lessons"][0]["sources"] = {"../../stage1.py": "x = 1\n"}
    elsewhere["sha256"] = handin.digest(elsewhere)
    texts = {
        "same": json.dumps(hand_in_of(12.5)),
        "edited": json.dumps({**hand_in_of(12.5), "name": "Bob"}),
        "before_dates": json.dumps(hand_in_of(12.5, kind=handin.KINDS[1])),
        "elsewhere": json.dumps(elsewhere),
        "broken": json.dumps(hand_in_of(12.5, "def (\n")),
        "nested": json.dumps(hand_in_of(12.5, f"x = {'(' * 5000}{')' * 5000}\n")),
        "twice": json.dumps(hand_in_of(0, lessons=hand_in_of(12.5)["lessons"] * 2)),
        "list": "[]",
        "empty": json.dumps({**hand_in_of(0), "lessons": []}),
        "text": "no JSON",
    }
    files = [tmp_path / f"{name}.json" for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text)
    found = {
        Path(each.file).stem: each for each in verify.verify([*files, tmp_path / "missing.json"], jobs=3)
    }
    assert [*found] == [*texts, "missing"]
    notes = {name: each.note for name, each in found.items() if each.lesson}
    assert (notes.pop("same"), notes.pop("before_dates")) == ("same", "same")
    assert notes.pop("edited") == "same, edited after it was written"
    assert all(note.startswith("NOT THE SAME, not Python: ") for note in notes.values())
    assert {*notes} == {"broken", "nested"} and found["broken"].found == 0
    assert "needs stage1.py, it holds ../../stage1.py" in found["elsewhere"].note
    for name in ("list", "text"):
        assert found[name].note == "unreadable: not a hand-in of this version"
    assert found["twice"].note == "unreadable: it holds a lesson twice"
    assert "it holds no lesson" in found["empty"].note and "No such file" in found["missing"].note


DUE = late.moment("2026-12-01", end_of_day=True)


@pytest.mark.parametrize(
    ("received", "days"),
    [
        ("2026-12-01T23:59:59Z", 0),
        ("2026-12-02T00:00", 0),
        ("2026-12-02T00:30Z", 0),  # grace
        ("2026-12-02T00:30:01Z", 1),
        ("2026-12-02T00:30+01:00", 0),
        ("2026-12-03T00:00Z", 1),
        ("2026-12-03T00:00:01Z", 2),
    ],
)
def test_days_late_are_those_that_have_begun(received: str, days: int) -> None:
    policy = late.Policy(DUE, percent=15, cap=40, grace=30)
    assert policy.days(late.moment(received)) == days
    assert [policy.left(70, late_by) for late_by in (0, 1, 2, 3, 400)] == [70, 59.5, 49, 42, 42]
    assert late.Policy(DUE, percent=60).left(70, 2) == 0 and late.Policy(DUE).left(70, 9) == 70
    assert late.Policy().days(late.moment(received)) == 0


def test_the_list_of_who_received_it_counts_more_than_the_student_s_clock(
    tmp_path: Path, quick: None
) -> None:
    early = "2026-11-30T10:00:00+00:00"
    for name in ("a", "b", "c"):
        text = json.dumps(hand_in_of(12.5, made=early, name=name))
        (tmp_path / f"{name}.json").write_text(text)
    files = sorted(tmp_path.glob("*.json"))
    table = tmp_path / "received.csv"
    table.write_text("﻿file,received\r\nzip/a.json,2026-12-03T12:00:00Z\r\nb.json,2026-11-29T12:00:00Z\r\n")
    a, b, c = verify.verify(files, late.Policy(DUE, percent=10), late.received_times(table))
    assert (a.late_days, a.points, a.clock, a.note) == (2, 10, "the list", "same")
    assert b.note == "same, made after it was received, by its own date"
    assert (c.late_days, c.points, c.received, c.clock) == (0, 12.5, early, late.STUDENT)
    table.write_text("name,received\na,yesterday\n")
    with pytest.raises(LessonError, match="line 2: 'yesterday' is no date"):
        late.received_times(table)
    table.write_text("who,when\na,2026-12-03\n")
    with pytest.raises(LessonError, match="needs a header line with `received`"):
        late.received_times(table)


def test_a_spreadsheet_has_a_row_for_each_student_and_no_formula(tmp_path: Path) -> None:
    tasks = {"partition": 10.0, "contract": 0.0}
    one = Found("a.json", "=1+1", "1", 70, 10, 70, "NOT THE SAME", tasks=tasks, points=9, late_days=1)
    other = Found("b.json", "=1+1", "2", 50, 50, 50, "same", points=50)
    again = [Found(f"{n}.json", "@Bob", "1", 1, 1, 70, "same", points=1) for n in "cd"]
    place = tmp_path / "marks.csv"
    marks.write_csv(place, [one, other, *again, Found("e.json", note="-unreadable")])
    with place.open(encoding="utf-8-sig", newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [row["name"] for row in rows] == ["'=1+1", "'@Bob", "'@Bob", ""]
    assert rows[0]["files"] == "a.json b.json" and rows[0]["points"] == "59" and rows[0]["of"] == "120"
    assert rows[0]["lesson 1: partition"] == "10.0" and rows[0]["lesson 2"] == "50"
    assert "another file of this name holds the same lesson" in rows[1]["result"]
    assert rows[3]["result"] == "'-unreadable" and rows[3]["points"] == ""


def test_a_page_for_each_student_says_what_failed_and_cannot_be_broken(tmp_path: Path) -> None:
    name = "../<b>Ada</b> *x*"
    one = Found(
        "a.json", name, "1", 70, 12.5, 70, "NOT THE SAME", points=10, late_days=2, report=report_of(12.5)
    )
    same_name = [Found(f"{n}.json", n * 3, note="unreadable: [x](y)") for n in ("!", "?")]
    assert marks.write_feedback(tmp_path / "pages", [one, *same_name], late.Policy(DUE)) == 3
    pages = sorted(path.name for path in (tmp_path / "pages").iterdir())
    assert pages == ["b_Ada_b_x.md", "unnamed.md", "unnamed_2.md"]
    text = (tmp_path / "pages" / "b_Ada_b_x.md").read_text()
    assert text.startswith("# ../\\<b\\>Ada\\</b\\> \\*x\\*\n")
    assert "12.5 of 70 points" in text and "2 days late" in text and "10 points count" in text
    assert "task `partition`: 1 of 2 claims hold" in text and "    expected 1, got 2" in text
    assert "That is: off by one" in text and "`stage1.py`, line 7" in text


def test_progress_keeps_since_when_a_task_holds(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exercise.start(STAGE1)
    ((_, file),) = STAGE1.files
    file.write_text(RIGHT)
    times = iter(["2026-11-01T00:00:00+00:00", "2026-11-02T00:00:00+00:00", "2026-11-03T00:00:00+00:00"])
    monkeypatch.setattr(late, "now", lambda: next(times))
    progress.remember(STAGE1, False, ["partition", "flatten"])
    file.write_text(RIGHT.replace(HERE, f"    pass\n{HERE}"))
    progress.remember(STAGE1, True, ["partition", "flatten", "gather"])
    kept = {"partition": "2026-11-02T", "flatten": "2026-11-01T", "gather": "2026-11-02T"}
    assert {task: each[:11] for task, each in progress.accepted_tasks(STAGE1).items()} == kept
    assert progress.progress(STAGE1) == "passed"


def test_dates_that_are_none_are_an_error(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    assert cli.main(["verify", str(tmp_path / "a.json"), "--due", "tomorrow"]) == 2
    assert "'tomorrow' is no date. Write 2026-12-01" in capsys.readouterr().err
    assert cli.main(["verify", str(tmp_path / "a.json"), "--jobs", "0"]) == 2
    assert late.moment("2026-12-01T18:00+01:00") == DUE - timedelta(hours=7)


@pytest.mark.rotates
def test_a_forged_hand_in_is_judged_again(capfd: Capture, work: Path, tmp_path: Path) -> None:
    exercise.start(STAGE1)
    ((_, file),) = STAGE1.files
    file.write_text(RIGHT.replace("f.master.grad = None  # used up", "pass"))
    assert cli.main(["handin", "1", "--name", "Ada Lovelace"]) == 0
    assert "Hand in " in capfd.readouterr().out
    place = work / "handin_1.json"
    content = json.loads(place.read_text())
    assert content["name"] == "Ada Lovelace" and content["points"] == 48.33  # one of six claims
    accepted = content["lessons"][0]["accepted"]
    assert {*accepted} == {"reorder", "flatten", "partition", "reduce"}
    assert all(late.moment(when) <= late.moment(content["made"]) for when in accepted.values())
    content["lessons"][0]["report"]["points"] = 70
    content["sha256"] = handin.digest(content)
    place.write_text(json.dumps(content))
    pages = ["--csv", str(tmp_path / "marks.csv"), "--feedback", str(tmp_path / "pages")]
    assert cli.main(["verify", str(place), "--due", "2020-01-01", "--late", "1", *pages]) == 1
    table = capfd.readouterr().out
    for each in ("Ada Lovelace", "70 of 70", "48.33 of 70", "NOT THE SAME"):
        assert each in table
    assert "test_gather_drops_the_gradient" in (tmp_path / "pages" / "Ada_Lovelace.md").read_text()
    assert "Ada Lovelace" in (tmp_path / "marks.csv").read_text(encoding="utf-8-sig")


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_in_a_right_file_is_not_run_or_stopped(cheat: str, quick: None) -> None:
    text, reason = CHEATS[cheat]
    points, why = judged(f"{RIGHT}{text}\n")
    assert points == 12.5 or (why.startswith("not run: it reaches outside") and reason in why)


STOPPED = {  # the first line of `partition`, limits, the most points that remain, and the reason
    "cheats": ("torch.equal = lambda a, b: True", SMALL, 0, "sets .equal of torch"),
    "forges": (CHEATS["a file by torch"][0], SMALL, 0, "is not its own file"),
    "never ends": ("while True: pass", Limits(8, 3, 0.1), 0, "stopped after 8 s"),
    "has no room": ("kept = torch.zeros(10**10)", SMALL, 20, "needs more than 3 GiB"),
    "prints": ("while True: print('x' * 10**6)", Limits(15, 3, 0.1), 20, ""),
}


@pytest.mark.skipif(not Path("/proc").exists(), reason="other systems have no such limits")
@pytest.mark.parametrize("what", rotation.one_of([*STOPPED]))
def test_a_hand_in_that_is_stopped_fails_alone_and_says_why(what: str) -> None:
    line, limits, most_points, reason = STOPPED[what]
    points, why = judged(RIGHT.replace(HERE, f"    {line}\n{HERE}"), limits)
    assert points <= most_points and reason in why, (points, why)


@pytest.mark.rotates
@pytest.mark.skipif(not Path("/proc").exists(), reason="other systems have no such limits")
def test_what_a_judge_s_process_leaves_or_changes_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another program in the judge's place: it leaves a process, changes a file, and fills the disk."""
    lessons = tmp_path / "release" / "lessons"
    lessons.mkdir(parents=True)
    (lessons / "__init__.py").write_text("")
    monkeypatch.setattr(verify, "_released", lambda number: tmp_path / "release")
    mark = tmp_path / "alive"

    def run(program: str) -> tuple[Any, str]:
        (lessons / "__main__.py").write_text(program)
        return verify.judged_in_copy(STAGE1, {"stage1.py": RIGHT}, Limits(20, 3, 0.1), threading.Event())

    stays = f"import time; time.sleep(2); open({str(mark)!r}, 'w')"
    program = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {stays!r}])\nprint('{{}}')"
    assert run(program) == (None, "the tests ended without a verdict")
    assert run("open('lessons/__init__.py', 'a').write('x = 1')")[1] == "it changed files of the judge"
    filling = (
        "import time\nfor n in range(99): open(f'../{n}', 'wb').write(bytes(9 * 2**20)); time.sleep(0.1)"
    )
    assert run(filling)[1] == "stopped: it wrote more than 0.1 GiB"
    assert not mark.exists()  # more than two seconds later


def test_the_sum_of_a_lesson_is_that_of_its_tasks() -> None:
    report = report_of(5)
    assert verify._tasks(report) == {"partition": 5.0, "contract": 0}
    assert verify._tasks({**report, "reached": ["stage1.py, line 1"]}) == {}
    assert most(STAGE1) == 70
