"""Lesson 0's task, one claim at a time. A learner's file takes the place of zero_min's."""

import pytest
import torch
from torch import nn

from zero_min import adam


def one_parameter(name: str, grads: list[float], **options: float) -> list[float]:
    """Where a single weight of 1.0 goes, given its gradients."""
    p = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = getattr(adam, name)([{"params": [p]}], **options)
    path = []
    for grad in grads:
        p.grad = torch.tensor([grad], dtype=torch.float64)
        optimizer.step()
        path.append(round(p.item(), 6))
    return path


def test_adam_the_first_step_is_the_learning_rate_whatever_the_gradient() -> None:
    for grad in (0.001, 1.0, 1000.0):
        got = one_parameter("Adam", [grad], lr=0.1)
        assert got == [pytest.approx(0.9, abs=1e-5)], (
            f"after one step with gradient {grad}: got {got[0]}, expected 0.9"
        )


def test_adam_two_gradients_of_different_size() -> None:
    got = one_parameter("Adam", [1.0, 3.0], lr=0.1)
    # m = .1*3 + .9*.1 = .39, over 1 - .81; v = .001*9 + .999*.001 = .009999, over 1 - .998001
    expected = 0.9 - 0.1 * (0.39 / 0.19) / ((0.009999 / 0.001999) ** 0.5 + 1e-8)
    assert got[1] == pytest.approx(expected, abs=1e-5), (
        f"after two steps: got {got[1]}, expected {expected:.6f}"
    )


@pytest.mark.parametrize(("name", "expected"), [("Adam", 0.9), ("AdamW", 0.99)])
def test_adam_weight_decay_without_a_gradient(name: str, expected: float) -> None:
    got = one_parameter(name, [0.0], lr=0.1, weight_decay=0.1)
    assert got == [pytest.approx(expected, abs=1e-5)], f"{name}: got {got[0]}, expected {expected}"
