"""What a user can get wrong, and what the error must name."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from zero_min import STAGES, Stage1, run_world
from zero_min.comm import Comm, WorldError


def values(trainer: Any) -> dict[str, list[float]]:
    """All parameters, gathered first where they are sharded."""
    with getattr(trainer, "gathered", nullcontext)():
        return {name: p.detach().flatten().tolist() for name, p in trainer.model.named_parameters()}


SHARDED = [number for number in STAGES if number > 0]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(2, 1)


@pytest.mark.parametrize("stage", STAGES)
def test_mixed_dtypes_in_one_group_name_both_parameters(stage: int) -> None:
    def body(comm: Comm) -> None:
        model = Two()
        model.b.half()
        STAGES[stage](model, comm)

    with pytest.raises(
        WorldError, match=r"'a.weight' is torch.float32, 'b.weight' is torch.float16"
    ) as caught:
        run_world(body, 2)
    assert "give each dtype a group of its own" in str(caught.value)


@pytest.mark.parametrize("stage", STAGES)
def test_dtypes_in_groups_of_their_own_train(stage: int) -> None:
    def body(comm: Comm) -> bool:
        model = Two()
        model.b.bfloat16()
        groups = [{"params": model.a.parameters()}, {"params": model.b.parameters()}]
        groups = [{**g, "params": list(g["params"])} for g in groups]
        trainer = STAGES[stage](model, comm, groups, lr=0.5)
        before = values(trainer)
        trainer.backward(model.b(model.a(torch.ones(1, 3)).bfloat16()).float().sum())
        trainer.step()
        return all(before[name] != after for name, after in values(trainer).items())

    assert all(run_world(body, 2))


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_listed_twice_is_named(stage: int) -> None:
    def body(comm: Comm) -> None:
        model = Two()
        STAGES[stage](model, comm, [{"params": [model.a.bias]}, {"params": [model.a.bias]}])

    with pytest.raises(WorldError, match=r"parameter 'a.bias' is listed twice"):
        run_world(body, 2)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_second_trainer_for_the_same_model_is_refused(stage: int) -> None:
    def body(comm: Comm) -> None:
        model = Two()
        STAGES[stage](model, comm)
        STAGES[stage](model, comm)

    with pytest.raises(WorldError, match="this Two has a trainer already: make a new model"):
        run_world(body, 2)


def test_a_parameter_of_another_model_is_refused() -> None:
    def body(comm: Comm) -> None:
        Stage1(Two(), comm, [{"params": [nn.Parameter(torch.zeros(9, 9))]}])

    with pytest.raises(WorldError, match=r"shape \(9, 9\) is in a group but not in the model"):
        run_world(body, 2)


@pytest.mark.parametrize("stage", STAGES)
def test_an_unknown_option_is_named_with_the_known_ones(stage: int) -> None:
    def body(comm: Comm) -> None:
        model = Two()
        STAGES[stage](model, comm, [{"params": list(model.parameters()), "momentum": 0.9}])

    with pytest.raises(WorldError, match=r"unknown option momentum; a group may set lr"):
        run_world(body, 2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_with_nothing_to_train_is_harmless(stage: int) -> None:
    def body(comm: Comm) -> None:
        model = Two().requires_grad_(False)
        trainer = STAGES[stage](model, comm)
        trainer.step()
        trainer.zero_grad()

    run_world(body, 3)


@pytest.mark.parametrize("stage", STAGES)
def test_a_world_larger_than_the_model(stage: int) -> None:
    def body(comm: Comm) -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        trainer = STAGES[stage](model, comm, lr=0.25)
        trainer.backward(model(torch.ones(1, 1)).sum())
        trainer.step()
        return values(trainer)["weight"][0]

    assert run_world(body, 5) == pytest.approx([0.75] * 5)


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_start_from_different_values_end_up_equal(stage: int) -> None:
    def body(comm: Comm) -> list[float]:
        model = nn.Linear(3, 1)
        nn.init.constant_(model.weight, comm.rank)
        trainer = STAGES[stage](model, comm)
        trainer.step()
        return values(trainer)["weight"]

    assert run_world(body, 3) == [[0.0] * 3] * 3  # rank 0's values


@pytest.mark.parametrize("stage", SHARDED)
def test_plain_backward_also_reaches_the_owner(stage: int) -> None:
    def body(comm: Comm) -> list[float]:
        model = Two()
        nn.init.ones_(model.a.weight)
        trainer = STAGES[stage](model, comm, lr=0.25)
        weights = []
        for _ in range(2):  # `b` is never used, so its bucket never fills by itself
            trainer.zero_grad()
            model.a(torch.ones(1, 3)).sum().backward()  # not trainer.backward
            trainer.step()
            weights.append(values(trainer)["a.weight"][0])
        return weights

    assert run_world(body, 2) == [pytest.approx([0.75, 0.5])] * 2
