"""Lesson 4's tasks, one claim at a time; a learner's file takes the place of zero_min.precision."""

import math
from typing import Any

import pytest
import torch
from torch import nn

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


def test_scale_is_halved_by_every_overflow_without_hysteresis() -> None:
    got, expected = scales([1, 0, 1, 1], hysteresis=1), [8, 8, 4, 2]
    assert got == expected, f"overflow in steps 1, 3 and 4: expected {expected}, got {got}"


def test_scale_forgives_the_first_overflow() -> None:
    got, expected = scales([1, 1, 1], hysteresis=2), [16, 8, 4]
    assert got == expected, f"three overflows, hysteresis 2: expected {expected}, got {got}"
    got, expected = scales([1, 0, 1], hysteresis=2), [16, 16, 8]
    assert got == expected, f"a good step alone renews no patience: expected {expected}, got {got}"


@pytest.mark.parametrize(
    ("window", "expected"), [(1, [16, 32, 64, 128, 256, 512]), (2, [16, 16, 32, 32, 64, 64])]
)
def test_scale_doubles_after_a_window_of_good_steps(window: int, expected: list[float]) -> None:
    got = scales([0] * 6, window=window)
    assert got == expected, f"six good steps, window {window}: expected {expected}, got {got}"


def test_scale_counts_the_window_from_the_last_overflow() -> None:
    got, expected = scales([0, 0, 1, 0, 0, 0, 0], window=3, hysteresis=1), [16, 16, 8, 8, 8, 8, 16]
    assert got == expected, f"an overflow in the third step, window 3: expected {expected}, got {got}"


def test_scale_follows_the_known_trace() -> None:
    overflows = [1, 1, 1, 0, 0, 0, 0, 1, 1]
    got, expected = scales(overflows, window=2, hysteresis=2), [16, 8, 4, 4, 4, 8, 8, 8, 4]
    assert got == expected, f"overflows {overflows}: expected {expected}, got {got}"


def test_scale_forgives_anew_after_each_good_step_if_asked() -> None:
    overflows = [1, 0, 1, 0, 1, 1]
    got, expected = scales(overflows, consecutive_hysteresis=True), [16] * 5 + [8]
    assert got == expected, f"consecutive_hysteresis, overflows {overflows}: expected {expected}, got {got}"


def test_scale_stops_at_the_minimum_and_says_why() -> None:
    scaler = precision.DynamicScale(3, minimum=2, hysteresis=1)
    scaler.update(True)
    assert scaler.scale == 2, f"half of 3 with minimum 2: expected 2, got {scaler.scale}"
    with pytest.raises(OverflowError) as caught:
        scaler.update(True)
    got = str(caught.value)
    assert "NaN" in got and "2" in got, f"expected an error that names NaN and the minimum, got {got!r}"
    patient = precision.DynamicScale(1, minimum=1, hysteresis=2)
    patient.update(True)
    assert patient.scale == 1, f"the forgiven overflow is no error: expected scale 1, got {patient.scale}"


def asked(comm: Comm, mine: list[list[float]]) -> tuple[object, int, int]:
    """Rank 0 brings gradients of ones, the last rank these; the answer, and what it sent."""
    trainer = precision.MixedPrecision(Stage2(nn.Linear(2, 1), comm))
    comm.ledger.clear_traffic()
    last = comm.rank == comm.world_size - 1
    grads = [torch.tensor(g) for g in mine] if last else [torch.ones(3)]
    answer = trainer.anyone_overflowed(grads)
    return answer, len(comm.ledger.events), comm.ledger.total_sent()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_overflow_on_one_rank_is_known_to_all(bad: float) -> None:
    got = [answer[0] for answer in run_world(asked, 3, [[1.0], [2.0, bad]])]
    assert got == [True] * 3, f"{bad} on the last rank only: expected True on all ranks, got {got}"


def test_overflow_is_denied_when_all_is_finite() -> None:
    for mine in ([[65504.0, -3e38], [0.0]], []):
        got = [answer[0] for answer in run_world(asked, 3, mine)]
        assert got == [False] * 3, f"the last rank brings {mine}: expected False on all ranks, got {got}"


def test_overflow_costs_one_small_call_whatever_it_finds() -> None:
    for mine in ([[math.inf], [math.nan]], [[1.0]], []):
        calls = [answer[1:] for answer in run_world(asked, 2, mine)]
        assert calls == [(1, 4)] * 2, (
            f"(calls, bytes) of 2 ranks, the last brings {mine}: expected one all_reduce of one number, "
            f"[(1, 4), (1, 4)], got {calls}"
        )


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
        assert not applied, f"rank {rank}: expected the step to be skipped, got applied={applied}"
        assert scale == 4, f"rank {rank}: expected the scale 8 to become 4, got {scale}"
        assert weights == [0.5] * 4, f"rank {rank}: expected weights of 0.5 everywhere, got {weights}"
