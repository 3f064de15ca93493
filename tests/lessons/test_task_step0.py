"""Lesson 0's tasks, one claim at a time. Learners' files take the place of zero_min's."""

import pytest
import torch
from torch import nn

from lessons.evidence import same
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
        known = {"neither average is corrected for its start at zero": [0.683772]}
        known["the average gradient is not corrected for its start at zero"] = [0.99]
        known["the average square is not corrected for its start at zero"] = [
            1 - 0.1 * grad / (0.001**0.5 * grad + 1e-8)
        ]
        known["the step goes uphill: a minus is missing"] = [1.1]
        known["the root of the average square is missing"] = [1 - 0.1 * grad / (grad**2 + 1e-8)]
        known["eps is added before the root is taken: it belongs behind it"] = [
            round(1 - 0.1 * grad / (grad**2 + 1e-8) ** 0.5, 6)
        ]
        what = f"a weight of 1 after one step with gradient {grad}"
        same(what, got, [0.9], near=1e-5, before=[1.0], lookalikes=known)


def test_adam_two_gradients_of_different_size() -> None:
    got = one_parameter("Adam", [1.0, 3.0], lr=0.1)
    # m = .1*3 + .9*.1 = .39, over 1 - .81; v = .001*9 + .999*.001 = .009999, over 1 - .998001
    expected = 0.9 - 0.1 * (0.39 / 0.19) / ((0.009999 / 0.001999) ** 0.5 + 1e-8)
    known = {
        "the corrections stay those of the first step: a power is missing": 0.9
        - 0.39 / 0.009999**0.5 * 0.001**0.5
    }
    for names, m, v in [("m and v do", 0.3, 0.009), ("m does", 0.3, 0.009999), ("v does", 0.39, 0.009)]:
        cause = (
            f"{names} not remember: `m = ...` makes a new tensor, `m.mul_(...)` changes the one that is kept"
        )
        known[cause] = 0.9 - 0.1 * (m / 0.19) / (v / 0.001999) ** 0.5
    first = 0.9 - 0.1 * (0.39 / 0.1) / ((0.009999 / 0.001999) ** 0.5 + 1e-8)
    known["the average's correction stays that of the first step: a power is missing"] = first
    same("a weight of 1 after two steps", got[1], expected, near=1e-5, lookalikes=known)


@pytest.mark.parametrize(("name", "expected"), [("Adam", 0.9), ("AdamW", 0.98)])
def test_adam_weight_decay_without_a_gradient(name: str, expected: float) -> None:
    got = one_parameter(name, [0.0], lr=0.1, weight_decay=0.2)
    known = {"the decay is not multiplied by the rate": [0.8]}
    known[f"the weight does not decay: of `weight_decay` nothing has come to {name}"] = [1.0]
    known["this is the other one's decay: Adam adds it to the gradient, AdamW shrinks the weight"] = [
        1.88 - expected
    ]
    same(
        f"{name}, a weight of 1 without a gradient",
        got,
        [expected],
        near=1e-5,
        before=[1.0],
        lookalikes=known,
    )


def test_adam_leaves_the_gradient_as_it_is() -> None:
    p = nn.Parameter(torch.ones(1))
    p.grad = torch.full((1,), 3.0)
    adam.Adam([{"params": [p]}], weight_decay=0.5).step()
    known = {"the decay is added to `p.grad` itself: `g += ...` changes it, `g = g + ...` does not": [3.5]}
    what = "the gradient of a weight of 1 after a step with decay"
    same(what, p.grad, [3.0], lookalikes=known)


def test_adam_moves_the_weight_where_it_lies() -> None:
    p = nn.Parameter(torch.ones(2))
    window = p.detach()  # of the same memory, as stage 1 will have one
    p.grad = torch.ones(2)
    adam.Adam([{"params": [p]}], lr=0.5).step()
    known = {
        "`p` has other memory now: `p.data = ...` gives it some, `p.add_(...)` changes what it has": [1.0] * 2
    }
    same(
        "a window into the weight's memory after a step of 0.5",
        window,
        [0.5] * 2,
        near=1e-5,
        lookalikes=known,
    )


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
    got = [grad for grad, *_ in run_world(averaged, world, tuple(range(world)))]
    alone = [[rank + 1.0] * 3 for rank in range(world)]
    known = {"everybody has rank 0's gradient: the others' data are lost": [[1.0] * 3] * world}
    what, expected = f"{world} ranks with gradients 1 to {world}", [[mean] * 3] * world
    same(what, got, expected, world=world, alone=alone, lookalikes=known)


def test_average_counts_no_gradient_as_zero() -> None:
    got = [grad for grad, *_ in run_world(averaged, 2, (1,))]
    same("rank 0 has no gradient, rank 1 has 2", got, [[1.0] * 3] * 2, world=2)


def test_average_is_one_all_reduce_a_parameter() -> None:
    for rank, (_, calls, sent) in enumerate(run_world(averaged, 3, (0, 1, 2))):
        same(f"collectives of rank {rank}", calls, ["all_reduce"], about="calls")
        same(f"bytes sent by rank {rank}, 2 x 2/3 of 12", sent, 16, about="bytes")
