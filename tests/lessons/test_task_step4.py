"""Lesson 4's tasks, one claim at a time; a learner's file takes the place of zero_min.precision."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from lessons.evidence import same
from zero_min import Stage2, Stage3, precision, run_world
from zero_min.comm import Comm


def scales(overflows: list[int], **options: Any) -> list[float]:
    """The scale after each step, from 16."""
    scaler = precision.DynamicScale(16, **options)
    seen = []
    for overflow in overflows:
        scaler.update(bool(overflow))
        seen.append(scaler.scale)
    return seen


FORGIVES = {"the first overflow is forgiven, although `hysteresis` is 1": [16, 16, 8, 4]}
SILENT = {"no OverflowError is raised, so training would go on at the minimum for ever": ["goes on"]}


def test_scale_is_halved_by_every_overflow_without_hysteresis() -> None:
    got = scales([1, 0, 1, 1], hysteresis=1)
    same("overflow in steps 1, 3 and 4", got, [8, 8, 4, 2], before=[16] * 4, lookalikes=FORGIVES)


def test_scale_forgives_the_first_overflow() -> None:
    at_once = {"no overflow is forgiven: `hysteresis` does nothing": [8, 4, 2]}
    at_once["every second overflow is forgiven: after the first halving patience is used up"] = [16, 8, 8]
    same("three overflows, hysteresis 2", scales([1, 1, 1], hysteresis=2), [16, 8, 4], lookalikes=at_once)
    renewed = {"a good step renews patience, which only a growing scale does": [16, 16, 16]}
    got = scales([1, 0, 1], hysteresis=2)
    same("overflow, good step, overflow", got, [16, 16, 8], lookalikes=renewed)


@pytest.mark.parametrize(
    ("window", "expected"), [(1, [16, 32, 64, 128, 256, 512]), (2, [16, 16, 32, 32, 64, 64])]
)
def test_scale_doubles_after_a_window_of_good_steps(window: int, expected: list[float]) -> None:
    early = [16.0 * 2 ** ((step + 1) // window) for step in range(6)]
    soon = {"the step itself is counted, but only good steps before this one count": early}
    got = scales([0] * 6, window=window)
    same(f"six good steps, window {window}", got, expected, before=[16] * 6, lookalikes=soon)


def test_scale_counts_the_window_from_the_last_overflow() -> None:
    got, expected = scales([0, 0, 1, 0, 0, 0, 0], window=3, hysteresis=1), [16, 16, 8, 8, 8, 8, 16]
    all_along = {"the window is counted from the start, not from an overflow": [16, 16, 8, 16, 16, 16, 32]}
    same("an overflow in the third step, window 3", got, expected, lookalikes=all_along)


def test_scale_follows_the_known_trace() -> None:
    overflows = [1, 1, 1, 0, 0, 0, 0, 1, 1]
    got, expected = scales(overflows, window=2, hysteresis=2), [16, 8, 4, 4, 4, 8, 8, 8, 4]
    spent = {"a growing scale renews no patience": [16, 8, 4, 4, 4, 8, 8, 4, 2]}
    same(f"overflows {overflows}", got, expected, lookalikes=spent)


def test_scale_forgives_anew_after_each_good_step_if_asked() -> None:
    overflows = [1, 0, 1, 0, 1, 1]
    got, expected = scales(overflows, consecutive_hysteresis=True), [16] * 5 + [8]
    ignored = {"good steps renew no patience: `consecutive_hysteresis` does nothing": [16, 16, 8, 8, 4, 2]}
    same(f"consecutive_hysteresis, overflows {overflows}", got, expected, lookalikes=ignored)


def test_scale_may_be_any_number_after_halving() -> None:
    scaler = precision.DynamicScale(3, minimum=0.5, hysteresis=1)
    scaler.update(True)
    known = {"it is rounded down to a whole number: `/` halves, `//` does not": 1.0}
    same("half of 3", scaler.scale, 1.5, before=3, lookalikes=known)


def test_scale_stops_at_the_minimum() -> None:
    scaler = precision.DynamicScale(3, minimum=2, hysteresis=1)
    scaler.update(True)
    below = {"the scale has fallen below `minimum`": 1.5}
    same("half of 3 with minimum 2", scaler.scale, 2, before=3, lookalikes=below)
    got = ["goes on"]
    try:
        scaler.update(True)
    except OverflowError:  # in words of the learner's own
        got = ["OverflowError"]
    same("an overflow at the minimum", got, ["OverflowError"], lookalikes=SILENT)
    patient = precision.DynamicScale(1, minimum=1, hysteresis=2)
    patient.update(True)
    same("at the minimum, after an overflow that is forgiven", patient.scale, 1)


MISSED = {"an inf, or a NaN, is not seen: look at every slice, and at every kind": [False] * 2}
MISSED["an inf, or a NaN, is not seen at all"] = [False] * 3
ALARM = {"an alarm where all is finite": [True] * 3}


def asked(comm: Comm, mine: list[list[float]]) -> tuple[object, list[str], int]:
    """Rank 0 brings gradients of ones, the last rank these; the answer, and what it sent."""
    trainer = precision.MixedPrecision(Stage2(nn.Linear(2, 1), comm))
    comm.ledger.clear_traffic()
    last = comm.rank == comm.world_size - 1
    grads = [torch.tensor(g) for g in mine] if last else [torch.ones(3)]
    answer = trainer.anyone_overflowed(grads)
    return answer, [event.what for event in comm.ledger.events], comm.ledger.total_sent()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_overflow_on_one_rank_is_known_to_all(bad: float) -> None:
    got = [answer[0] for answer in run_world(asked, 3, [[1.0], [2.0, bad]])]
    same(f"{bad} on the last rank only", got, [True] * 3, alone=[False, False, True], lookalikes=MISSED)


def test_overflow_of_any_slice_counts() -> None:
    got = [answer[0] for answer in run_world(asked, 2, [[math.inf], [1.0]])]
    same("inf in the first of two slices", got, [True] * 2, alone=[False, True], lookalikes=MISSED)


def test_overflow_is_denied_when_all_is_finite() -> None:
    for mine in ([[65504.0, -3e38], [0.0]], []):
        got = [answer[0] for answer in run_world(asked, 3, mine)]
        same(f"the last rank brings {mine}", got, [False] * 3, world=3, lookalikes=ALARM)


def test_overflow_costs_one_small_call_whatever_it_finds() -> None:
    for mine in ([[math.inf], [math.nan]], [[1.0]], []):
        answers = run_world(asked, 2, mine)
        calls, sent = [calls for _, calls, _ in answers], [sent for *_, sent in answers]
        what = f"2 ranks, the last brings {mine}"
        same(f"{what}: collectives", calls, [["all_reduce"]] * 2, about="calls", by_rank=True)
        same(f"{what}: bytes sent", sent, [4, 4], about="bytes", by_rank=True)


def one_overflow(comm: Comm) -> tuple[bool, float, list[float]]:
    """A step of stage 3 in which only the last gradient overflows; it belongs to rank 1."""
    model = nn.Linear(4, 1, bias=False).half()
    nn.init.constant_(model.weight, 0.5)
    stage = Stage3(model, comm, lr=0.125)
    trainer = precision.MixedPrecision(stage, precision.DynamicScale(8, hysteresis=1))
    trainer.backward(model(torch.tensor([[1, 1, 1, 6e4]]).half()).float().sum())
    report = trainer.step()
    with stage.gathered():
        return report.applied, trainer.scaler.scale, model.weight.flatten().tolist()


def test_overflow_makes_every_rank_skip() -> None:
    for rank, (applied, scale, weights) in enumerate(run_world(one_overflow, 2)):
        same(f"rank {rank}: whether the step is made", applied, False)
        same(f"rank {rank}: the scale", scale, 4, before=8)
        same(f"rank {rank}: weights after a step that nobody makes", weights, [0.5] * 4)
