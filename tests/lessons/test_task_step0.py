"""Lesson 0's tasks, one claim at a time. Learners' files take the place of zero_min's."""

import pytest
import torch
from torch import nn

from zero_min import adam, run_world, stage0
from zero_min.comm import Comm


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


def averaged(comm: Comm, used_by: tuple[int, ...]) -> tuple[list[float], list[str], int]:
    """Ranks 0, 1, ... bring gradients of 1, 2, ...; a rank that is not in `used_by` has none."""
    model = nn.Linear(3, 1, bias=False)
    stage = stage0.Stage0(model, comm)
    if comm.rank in used_by:
        stage.backward(model(torch.full((1, 3), comm.rank + 1.0)).sum())
    comm.ledger.clear_traffic()
    with torch.no_grad():
        stage.reduce_gradients()
    calls = [event.what for event in comm.ledger.events]
    grad = model.weight.grad
    return [] if grad is None else grad.flatten().tolist(), calls, comm.ledger.total_sent()


@pytest.mark.parametrize(("world", "mean"), [(1, 1.0), (2, 1.5), (3, 2.0)])
def test_average_gives_everyone_the_mean(world: int, mean: float) -> None:
    for rank, (got, _, _) in enumerate(run_world(averaged, world, tuple(range(world)))):
        assert got == [mean] * 3, (
            f"{world} ranks with gradients 1 to {world}, rank {rank}: expected {[mean] * 3}, got {got}"
        )


def test_average_counts_no_gradient_as_zero() -> None:
    for rank, (got, _, _) in enumerate(run_world(averaged, 2, (1,))):
        assert got == [1.0] * 3, (
            f"rank 0 has no gradient, rank 1 has 2; rank {rank}: expected {[1.0] * 3}, got {got}"
        )


def test_average_is_one_all_reduce_a_parameter() -> None:
    for rank, (_, calls, sent) in enumerate(run_world(averaged, 3, (0, 1, 2))):
        assert calls == ["all_reduce"], f"rank {rank}: expected the call ['all_reduce'], got {calls}"
        assert sent == 16, f"rank {rank}: expected 2 x 2/3 of 12 bytes sent, 16, got {sent}"
