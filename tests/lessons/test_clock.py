"""The clock: what it records, what a replay takes, and from which batch on communication hides."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lessons import __main__ as cli
from lessons import exercise, registry
from lessons.clock import MACHINES, Machine, Size, bound, chart, gantt, hides_from, replay, show
from lessons.exercise import LessonError
from lessons.recording import CONFIG, Call, Diary, Recording, Work, record
from lessons.registry import LESSONS
from lessons.yours import places_of
from zero_min import Stage0, Stage1, Stage2, Stage3, Stage3Prefetch, formula
from zero_min.gpt import GPT

SIZES = [p.numel() for p in GPT(CONFIG).parameters()]
NUMEL = sum(SIZES)
STAGES = {0: Stage0, 1: Stage1, 2: partial(Stage2, bucket_size=4096), 3: Stage3}
ROUND = Machine("round numbers", latency=1.0, bandwidth=10.0, flops=100.0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_recording_sends_what_the_formula_says_and_multiplies_what_a_gpt_does(stage: int) -> None:
    made = record(STAGES[stage], 3, micro_batches=2)
    sent = sum(entry.sent for entries in made.ranks for entry in entries if isinstance(entry, Call))
    assert sent == formula.sent(stage, SIZES if stage == 3 else [NUMEL], 3, 2)
    T, w, layers = CONFIG.context, CONFIG.width, CONFIG.layers
    forward = layers * (2 * T * 12 * w * w + 4 * T * T * w) + 2 * T * CONFIG.vocabulary * w
    for entries in made.ranks:
        flops = dict.fromkeys(("forward", "backward", "step"), 0)
        for entry in entries:
            if isinstance(entry, Work):
                flops[entry.phase] += entry.flops
        assert flops == {"forward": 2 * forward, "backward": 4 * forward, "step": 0}


def hidden(build: Any, tokens: float = 8192, machine: str = "pcie") -> float:
    """How much of the network's time passes beside arithmetic."""
    run = replay(record(build), MACHINES[machine], Size(1e9, tokens))
    return run.hidden / run.sending


@pytest.mark.rotates
def test_what_overlaps_is_read_off_the_order_of_the_calls() -> None:
    assert hidden(Stage0) == hidden(Stage1) == 0
    assert hidden(partial(Stage2, bucket_size=NUMEL)) == 0  # one bucket leaves when backward is over
    assert hidden(STAGES[2]) > 0.4
    assert hidden(Stage3) < 0.1 < 0.4 < hidden(Stage3Prefetch)


def test_who_reads_a_result_at_once_waits_for_it() -> None:
    def impatient(model: Any, comm: Any) -> Any:
        def reduce_scatter(parts: Any, label: str = "", really: Any = comm.reduce_scatter) -> Any:
            result = really(parts, label)
            assert float(result.sum()) == float(result.sum())  # the program needs a number
            return result

        comm.reduce_scatter = reduce_scatter
        return Stage2(model, comm, bucket_size=4096)

    assert hidden(impatient) == 0


def test_a_replay_by_hand() -> None:
    """100 FLOP/s, 10 bytes/s, 1 s a message. Rank 1 is slower, and rank 0's second work needs the call."""
    first = (Work("forward", 100, -1), Call("all_gather", 10), Work("backward", 200, 0))
    second = (Work("forward", 300, -1), Call("all_gather", 20), Work("backward", 200, -1))
    run = replay(Recording(1, 1, 1, (first, second)), ROUND, Size(1, 1))
    assert [(bar.start, bar.end) for bar in run.network] == [(3, 6)]  # both are there; 1 s, and 20 bytes
    assert [(bar.start, bar.end) for bar in run.arithmetic[0]] == [(0, 1), (6, 8)]
    assert [(bar.start, bar.end) for bar in run.arithmetic[1]] == [(0, 3), (3, 5)]
    assert (run.step, run.idle, run.sending, run.hidden) == (8, 3, 3, 0)
    larger = replay(Recording(1, 1, 1, (first, second)), ROUND, Size(parameters=2, tokens=1))
    assert larger.step == 2 * 8 - 1  # all but the latency
    assert "rank 0   ffffffff....." in chart(run) and "G all_gather" in chart(run)
    assert "8 s, of which the arithmetic stands still 3 s" in gantt({"it": run}).alt


def test_a_collective_is_a_ring() -> None:
    for what, messages in {"reduce_scatter": 3, "all_gather": 3, "all_reduce": 6}.items():
        made = Recording(1, 1, 1, ((Call(what, 40),),) * 4)
        assert replay(made, ROUND, Size(1, 1)).step == messages + 4
    assert replay(record(Stage1, 1), MACHINES["laptops"], Size(1e9, 1)).sending == 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_equal_layers_hide_from_exactly_the_batch_of_the_formula(ranks: int) -> None:
    """T >= (N-1)/N x FLOP/s / bandwidth, if messages cost nothing."""
    tokens, layers, n = 16, 12, 1024 * ranks
    step = (Work("backward", 4 * n * tokens, -1), Call("reduce_scatter", 4 * n * (ranks - 1) // ranks))
    made = Recording(layers * n, tokens, 1, (step * layers,) * ranks)
    for machine in MACHINES.values():
        free = Machine("", 0.0, machine.bandwidth, machine.flops)
        derived = (ranks - 1) / ranks * machine.flops / machine.bandwidth
        assert bound(made, free) == pytest.approx(derived)
        assert hides_from(made, free, 1e9) == pytest.approx(derived, rel=1e-4)
        found = hides_from(made, machine, 1e9)
        assert found is not None and found > derived  # latency asks for more


def test_the_learner_s_way_of_stage_2_hides_from_near_the_formula_s_batch() -> None:
    machine, made = MACHINES["pcie"], record(partial(Stage2, bucket_size=1024))
    early, found = bound(made, machine), hides_from(made, machine, 1e9)
    assert early is not None and found is not None
    assert 0.75 * machine.flops / machine.bandwidth < early < found < 2 * early
    idle = [replay(made, machine, Size(1e9, tokens)).idle for tokens in (found / 2, found, 2 * found)]
    assert idle[0] > 1.2 * idle[1] and idle[1] == pytest.approx(idle[2], rel=1e-4)
    assert bound(record(Stage1), machine) is None and hides_from(record(Stage1), machine, 1e9) is None


# The command -------------------------------------------------------------------------------------

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work/ folder of our own."""
    monkeypatch.setattr(registry, "WORK", tmp_path / "work")
    return tmp_path / "work"


CHANGED = """

class Stage1(Stage1):
    def reduce_gradients(self):
        self.comm.all_reduce(torch.zeros(4096))
        super().reduce_gradients()
"""


@pytest.mark.rotates
def test_the_clock_replays_the_learner_s_file(work: Path, capfd: Capture) -> None:
    ((answer, file),) = LESSONS[1].files
    exercise.start(LESSONS[1])
    file.write_text(exercise.fill(answer, 1, file.read_text()) + CHANGED)
    assert cli.main(["clock", "1", "--machine", "laptops"]) == 0
    said = capfd.readouterr().out
    assert said.startswith(f"your file: {file}") and "A all_reduce" in said
    assert "Nothing is sent before the arithmetic is over" in said
    file.write_text(file.read_text() + "\n        raise ValueError('as planned')\n")
    assert cli.main(["clock", "1"]) == 1
    said = capfd.readouterr().out
    assert "of 4: ValueError: as planned" in said and f"{file}, line" in said


def test_a_file_with_blanks_is_not_run_and_that_is_said(work: Path, capfd: Capture) -> None:
    key = "the answer key's zero_min/stage2.py"
    assert places_of(LESSONS[2]) == {}
    assert f"{key} (to write yours: python -m lessons start 2)" in capfd.readouterr().out
    exercise.start(LESSONS[2])
    assert places_of(LESSONS[2]) == {}
    assert f"{key} (blank: {', '.join(exercise.tasks(LESSONS[2]))})" in capfd.readouterr().out


GIVEN = {"world": 4, "machine": "pcie", "tokens": 8192.0, "parameters": 1e9, "bucket": None}


@pytest.mark.parametrize(
    "number, given, message",
    [
        ("5", {}, "the clock knows the stages, lessons 0, 1, 2, 3, not 5"),
        ("1", {"bucket": 0.1}, "--bucket is of lesson 2"),
        ("1", {"machine": "abacus"}, "--machine abacus is not known: give one of nvlink, pcie"),
        ("1", {"machine": "1,0,1"}, "--machine 1,0,1: a latency of 0 or more"),
    ],
    ids=str,
)
def test_what_the_clock_cannot_do_is_said(number: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(LessonError, match=message):
        show(number, **{**GIVEN, **given})


def test_a_size_must_be_above_zero(capsys: Capture) -> None:
    assert cli.main(["clock", "1", "--batch", "0"]) == 2
    assert "--batch 0: give a number above 0" in capsys.readouterr().err


def test_what_only_the_clock_knows_is_refused_elsewhere(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["watch", "2", "--bucket", "0.1"])
    assert "unrecognized arguments: --bucket 0.1" in capsys.readouterr().err


def test_torch_s_tensors_carry_the_wait_and_lose_it_with_their_memory() -> None:
    diary, tensor = Diary(), torch.zeros(3)
    diary.fill([tensor], 7)
    assert diary.latest([tensor[1:], torch.zeros(1)]) == 7
    del tensor
    assert not diary._waiting
