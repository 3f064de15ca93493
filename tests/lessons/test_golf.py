"""ZeRO golf: equal bits are asked for, costs are exact, and par is a stage's."""

from pathlib import Path
from typing import Any

import pytest

import zero_min
from lessons import golf, registry
from lessons.__main__ import main
from lessons.golf import COURSES, Course, StageSchedule, card, play, wrong
from lessons.golf_start import Schedule

Capture = pytest.CaptureFixture[str]
each_course = pytest.mark.parametrize("course", COURSES, ids=lambda course: f"course {course.number}")


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work/ folder of our own, so that nobody's answers are touched."""
    monkeypatch.setattr(registry, "WORK", tmp_path / "work")
    return tmp_path / "work"


@pytest.mark.rotates
@each_course
def test_the_start_is_right_and_far_over_par(course: Course) -> None:
    cost, params = play(course, Schedule)
    assert wrong(course, params) == ""
    assert cost.exceeds(play(course, course.par)[0])


@pytest.mark.rotates
@each_course
def test_par_is_par_and_the_same_every_time(course: Course, tmp_path: Path, capsys: Capture) -> None:
    board = tmp_path / "golf.json"
    assert card(course, course.par, board) == card(course, course.par, board) == 0
    said = capsys.readouterr().out
    assert said.count("your best: 100.0\n") == 2 and "over par" not in said


@pytest.mark.rotates
def test_more_buckets_are_less_memory_and_more_calls() -> None:
    """What course 2 is about: neither all at once nor each alone is best."""

    def schedule(bucket_size: int) -> Any:
        return lambda model, comm, lr: StageSchedule(
            zero_min.Stage2(model, comm, lr=lr, bucket_size=bucket_size)
        )

    one, several, many = (play(COURSES[1], schedule(size))[0] for size in (2**16, 2**13, 2**11))
    assert several.peak < one.peak and one.calls < several.calls < many.calls
    assert one.sent == several.sent == many.sent
    par = play(COURSES[1], COURSES[1].par)[0]
    assert several.score(par) == 100 and min(one.score(par), many.score(par)) != 100


def test_scores_are_kept_in_order(tmp_path: Path) -> None:
    board = tmp_path / "golf.json"
    cost = golf.Cost(100, 100, 100)
    for score in (90.0, 110.0, 80.0):
        best = golf.remember(board, COURSES[0], score, cost)
    assert best == [80, 90, 110]
    assert golf.remember(board, COURSES[0], 80.0, cost) == [80, 90, 110], "the same round is no second one"
    assert golf.remember(board, COURSES[1], 99.0, cost) == [99]
    for score in (1.0, 2.0, 3.0):
        golf.remember(board, COURSES[0], score, cost)
    assert golf.remember(board, COURSES[0], 200.0, cost) == [1, 2, 3, 80, 90]


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("right", "mistake", "told"),
    [
        ("/ self.comm.world_size", "", "parameters differ from plain training's by up to"),
        ("self.comm.all_reduce(p.grad)", "p.grad", "differ"),
        ("return [*self.params]", "return self.params[1:]", "other shapes than the model's"),
        ("all_reduce", "all_reduc", "object has no attribute 'all_reduc'"),
        ("class Schedule", "class Other", "has no attribute 'Schedule'"),
        ("import torch\n", "import torch(\n", "SyntaxError"),
    ],
)
def test_what_is_not_right_is_not_counted(
    right: str, mistake: str, told: str, work: Path, capfd: Capture
) -> None:
    work.mkdir()
    source = golf.START.read_text(encoding="utf-8")
    assert right in source
    (work / "golf2.py").write_text(source.replace(right, mistake), encoding="utf-8")
    assert golf.golf("2") == 1
    said = capfd.readouterr().out
    assert "not counted" in said and told in said, said
    assert not (work / "golf.json").exists()


class Forgetful(Schedule):
    """Sends what the start sends, and empties every ledger that it can reach."""

    def step(self, losses: Any) -> None:
        super().step(losses)
        self.comm.ledger.clear_traffic()
        self.comm.ledger.peak = 0
        self.comm.ledger = zero_min.Ledger()


def test_an_emptied_ledger_changes_no_score() -> None:
    assert play(COURSES[0], Forgetful)[0] == play(COURSES[0], Schedule)[0]


@pytest.mark.rotates
def test_a_course_begins_with_a_file_that_is_kept(work: Path, capfd: Capture) -> None:
    assert golf.golf("1") == 1
    said = capfd.readouterr().out
    assert "is written" in said and "too much" in said and "not counted: no number may exceed" in said
    (work / "golf1.py").write_text("Schedule = 3\n", encoding="utf-8")
    golf.golf("1")
    assert "is written" not in capfd.readouterr().out
    assert (work / "golf1.py").read_text(encoding="utf-8") == "Schedule = 3\n"
    assert main(["golf", "4"]) == 2
    assert "no course '4'; the courses are 1: nobody" in capfd.readouterr().err
