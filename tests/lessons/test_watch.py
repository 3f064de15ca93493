"""The run that is watched: every line and call of every rank is there, also where it does not end well."""

import re
from pathlib import Path
from typing import Any

import pytest

import zero_min
from lessons import __main__ as cli
from lessons import exercise, registry, watch
from lessons.exercise import LessonError
from lessons.registry import LESSONS, ROOT, Lesson
from zero_min import Stage2
from zero_min.gpt import GPTConfig

Capture = pytest.CaptureFixture[str]
Run = dict[str, Any]


(PIPELINE,) = [lesson for lesson in LESSONS if lesson.number == 9]


def test_a_lesson_that_shows_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(watch.experiment_of(PIPELINE), "watched")
    with pytest.raises(LessonError, match=r"lesson 9 cannot be watched.*python -m lessons run 9"):
        watch.watched(PIPELINE)


@pytest.mark.parametrize("lesson", LESSONS, ids=[lesson.folder for lesson in LESSONS])
def test_every_line_and_every_call_is_shown_once_and_in_order(lesson: Lesson) -> None:
    run = watch.watched(lesson)
    assert not run["end"] and not run["cut"]
    moments = [moment[0] for moment in run["moments"]]
    for rank, each in enumerate(run["ranks"]):
        seen = [at[rank] for at in moments]
        assert seen == sorted(seen) and set(seen) == set(range(len(each["lines"])))
        lengths = [text["text"].count("\n") for text in run["files"]]
        assert all(1 <= line <= lengths[file] for file, line, *_ in each["lines"])
    opened = {
        run["phases"][each["lines"][at][2]]
        for each, at in zip(run["ranks"], moments[run["start"]], strict=True)
    }
    assert opened != {watch.CONSTRUCTOR}
    met = [moment[2] for moment in run["moments"] if moment[2] >= 0]
    assert met == [] if lesson is PIPELINE else met == list(range(len(run["ranks"][0]["meetings"])))
    assert [Path(file["name"]).name for file in run["files"]] == [f.name for f, _ in lesson.files]
    assert len(watch.page(run)) < 200_000


def test_arrows_carry_the_bytes_of_the_ledger_and_the_line_that_called() -> None:
    run = watch.watched(LESSONS[1])
    whole = sum(a * b for a, b in zip(watch.WIDTHS, watch.WIDTHS[1:], strict=False))
    calls = {what: (where, to) for what, where, to in run["ranks"][2]["meetings"]}
    slices = [whole] * watch.RANKS  # whole elements of 4 bytes, a quarter of them to each
    slices[2] = 0
    assert calls["reduce_scatter"][1] == calls["all_gather"][1] == tuple(slices)
    text = (ROOT / "zero_min" / "stage1.py").read_text().splitlines()
    for what, (where, _) in calls.items():
        name, number = where.split(":")
        assert name == "stage1.py" and f"comm.{what}(" in text[int(number) - 1]


def test_memory_is_what_the_trainer_holds_then() -> None:
    run = watch.watched(LESSONS[2])
    last = run["memories"][run["ranks"][0]["lines"][-1][3]]
    whole = sum(a * b for a, b in zip(watch.WIDTHS, watch.WIDTHS[1:], strict=False))
    assert last[:3] == (4 * whole, whole, 2 * whole)  # stage 2 after its last bucket, before the update


def broken(monkeypatch: pytest.MonkeyPatch, step: Any) -> Run:
    """Lesson 2 with another `step`."""
    monkeypatch.setattr(zero_min, "Stage2", type("Broken", (Stage2,), {"step": step}))
    monkeypatch.setattr(watch, "SECONDS", 1.0)
    return watch.watched(LESSONS[2])


def test_a_hang_says_who_waits_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    run = broken(monkeypatch, lambda self: None if self.comm.rank == 2 else Stage2.step(self))
    for rank in (0, 1, 3):
        assert re.fullmatch(
            rf"rank {rank} waits in all_gather \(stage1.py:\d+\) for rank 2", run["end"][rank]
        )
    assert run["end"][2].startswith("rank 2 has ended; its last call: reduce_scatter (stage2.py:")
    assert run["moments"][-1][1] == [1, 1, 0, 1]
    assert "watch.py" not in run["error"] and "stage1.py" in run["error"]


def test_a_rank_that_raises_is_named_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Any) -> None:
        if self.comm.rank == 1:
            raise ValueError("as planned")
        Stage2.step(self)

    run = broken(monkeypatch, step)
    assert run["end"][1].startswith("rank 1 raised ValueError: as planned; its last call: reduce_scatter")
    for rank in (0, 2, 3):  # whichever was already there when rank 1 failed
        assert re.search(r"waits in all_gather \(.*\) for rank 1$|was stopped on its way", run["end"][rank])


def test_ranks_that_call_different_things_stop_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Any) -> None:
        if self.comm.rank == 0:
            self.comm.barrier()
        Stage2.step(self)

    run = broken(monkeypatch, step)
    assert run["end"][0].startswith("rank 0 waits in barrier (test_watch.py:")
    assert run["end"][1].startswith("rank 1 waits in all_gather (stage1.py:")
    assert "the ranks made different calls" in run["error"]


def test_a_long_run_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MOST_LINES", 50)
    run = watch.watched(LESSONS[3])
    assert run["cut"] and max(len(rank["lines"]) for rank in run["ranks"]) <= 50
    assert run["moments"][-1][2] == len(run["ranks"][0]["meetings"]) - 1  # calls are shown to the end


def test_the_ring_is_watched_round_by_round_and_says_whom_it_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    (lesson,) = [lesson for lesson in LESSONS if lesson.folder == "step1_2_ring"]
    run = watch.watched(lesson)
    for rank, each in enumerate(run["ranks"]):
        assert [what for what, *_ in each["meetings"]] == ["receive"] * 6  # 2 (N-1) rounds
        right = (rank + 1) % watch.RANKS
        assert all(to[right] == sum(to) == 8 for _, _, to in each["meetings"])  # two elements
    monkeypatch.setattr(watch, "SECONDS", 1.0)
    monkeypatch.setattr(watch.WatchedComm, "send", lambda self, tensor, to: None)
    run = watch.watched(lesson)
    for rank, said in enumerate(run["end"]):
        assert re.fullmatch(rf"rank {rank} waits in receive \(ring.py:\d+\) for rank {(rank - 1) % 4}", said)
    assert run["waitsFor"] == [[3], [0], [1], [2]]


def test_a_pipeline_is_watched_message_by_message(monkeypatch: pytest.MonkeyPatch) -> None:
    run = watch.watched(PIPELINE)
    arrows = [tuple(each) for moment in run["moments"] for each in moment[3]]
    for rank, each in enumerate(run["ranks"]):
        assert len([to for _, to, _ in arrows if to == rank]) == len(each["meetings"])
    of_activations, of_the_weight = 4 * 4 * 8, 4 * 8 * GPTConfig().vocabulary  # fp32
    forwards = [(rank, rank + 1, of_activations) for rank in range(3)] * 4
    ties = [(0, 3, of_the_weight), (3, 0, of_the_weight)]
    assert sorted(arrows) == sorted([*forwards, *((b, a, n) for a, b, n in forwards), *ties])
    # At the beginning the last rank waits longest.
    first = [moment[1] for moment in run["moments"]][:60]
    assert (
        sum(waits[3] for waits in first) > sum(waits[1] for waits in first) > sum(waits[0] for waits in first)
    )
    monkeypatch.setattr(watch, "SECONDS", 1.0)
    sent = watch.WatchedComm.send

    def lose(comm: watch.WatchedComm, tensor: Any, to: int) -> None:
        if (comm.rank, to) != (2, 1):
            sent(comm, tensor, to)

    monkeypatch.setattr(watch.WatchedComm, "send", lose)
    run = watch.watched(PIPELINE)
    assert re.fullmatch(r"rank 1 waits in receive \(pipeline.py:\d+\) for rank 2", run["end"][1])
    assert run["moments"][-1][1][1] == 1 and run["waitsFor"][1] == [2]


LOOP = """

class Stage1(Stage1):
    def reduce_gradients(self):
        while self.comm.rank == 2:
            self.round = getattr(self, "round", 0) + 1
        super().reduce_gradients()
"""


@pytest.mark.rotates
def test_the_learner_s_endless_loop_ends_up_in_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setattr(registry, "WORK", tmp_path / "work")
    ((answer, file),) = LESSONS[1].files
    exercise.start(LESSONS[1])
    file.write_text(exercise.fill(answer, 1, file.read_text()) + LOOP)
    assert cli.main(["watch", "1"]) == 0
    said = capfd.readouterr().out
    assert said.startswith(f"your file: {file}")
    assert re.search(r"rank 0 waits in reduce_scatter \(stage1.py:\d+\) for rank 2", said)
    assert re.search(r"rank 2 has not come: it is at stage1.py:\d+; its last call: broadcast", said)
    page = (ROOT / "build" / "lessons" / "watch1.html").read_text()
    assert "self.round = getattr" in page and "for rank 2" in page
