"""Parameters that are frozen and unfrozen, and those that no rank has used."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import Net, assert_close, assert_same, config, data
from tests.zero_full.stage3_runs import RELEASED

SIXTEEN = {"bf16": {"enabled": True}}
STEPS = 6
Schedule = Callable[[int], dict[str, bool]]  # step -> which parameters (by the start of a name) are trained

SCHEDULES: dict[str, Schedule] = {
    "asleep, then awake": lambda step: {"layers.0": step >= 2},
    "awake, then asleep": lambda step: {"layers.0": step < 2},
    "on and off": lambda step: {"layers.2": step % 2 == 0, "layers.0": step % 3 == 1},
    "only the last at first": lambda step: {"layers.0": step >= 1, "layers.2": step >= 3},
}


def switch(model: nn.Module, trained: dict[str, bool]) -> None:
    for name, param in model.named_parameters():
        for start, on in trained.items():
            if name.startswith(start):
                param.requires_grad_(on)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def by_torch(schedule: str, world: int) -> dict[str, Tensor]:
    model = Net()
    switch(model, SCHEDULES[schedule](0))
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        switch(model, SCHEDULES[schedule](step))
        optimizer.zero_grad()
        for rank in range(world):
            (model(data(step, 0, rank)) / world).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def by_us(
    comm: Any, stage: int, schedule: str, keys: dict[str, Any], saved_at: int | None
) -> dict[str, Tensor]:
    """With `saved_at`, another engine goes on from there."""

    def start() -> zero_full.Engine:
        model = Net()
        switch(model, SCHEDULES[schedule](0))
        zero = RELEASED if stage == 3 else {}
        more = config(stage, zero_optimization=zero, **keys)
        return zero_full.initialize(model=model, model_parameters=model.parameters(), config=more)[0]

    engine = start()
    for step in range(STEPS):
        if step == saved_at:
            state = engine.state_dict()
            engine.destroy()
            engine = start()
            engine.load_state_dict(state)
        switch(engine.module, SCHEDULES[schedule](step))
        dtype = next(engine.module.parameters()).dtype
        engine.backward(engine(data(step, 0, comm.rank, dtype)))
        engine.step()
    return engine.module_state_dict()


@pytest.mark.rotates
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_freezing_and_unfreezing_is_torchs(schedule: str, stage: int) -> None:
    for world in (1, 2):
        for got in POOL.run(by_us, world, stage, schedule, {}, None):
            assert_close(got, by_torch(schedule, world))


@pytest.mark.pairwise
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("schedule", ["asleep, then awake", "on and off"])
@pytest.mark.parametrize("keys", [{}, SIXTEEN], ids=["fp32", "bf16"])
def test_a_saved_run_knows_who_was_awake(schedule: str, stage: int, keys: dict[str, Any]) -> None:
    for saved_at in (1, 4):
        went_on = POOL.run(by_us, 2, stage, schedule, keys, None)
        started_again = POOL.run(by_us, 2, stage, schedule, keys, saved_at)
        for got, want in zip(started_again, went_on, strict=True):
            assert_same(got, want)


def wakes_what_is_in_no_group(stage: int) -> str:
    model = Net()
    model.layers[0].requires_grad_(False)
    engine, *_ = zero_full.initialize(model=model, config=config(stage))
    model.layers[0].requires_grad_(True)
    try:
        engine.backward(engine(data(0, 0, 0)))
        engine.step()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_unfreezing_what_is_in_no_group_is_an_error_with_the_name(stage: int) -> None:
    said = wakes_what_is_in_no_group(stage)
    assert "layers.0.weight" in said and "was frozen at initialize and is in no parameter group" in said
    assert "model_parameters" in said


class Branches(Net):
    """Uses its middle layer on some ranks only, or on none."""

    def __init__(self, users: tuple[int, ...], rank: int) -> None:
        super().__init__()
        self.used = rank in users

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        first, tanh, middle, _, last = self.layers
        h = tanh(first(x))
        return last(tanh(middle(h)) if self.used else h).float().square().mean()


def branching(comm: Any, stage: int, users_by_step: list[tuple[int, ...]]) -> dict[str, Tensor]:
    model = Branches((), comm.rank)
    zero = {**RELEASED, "stage3_param_persistence_threshold": 10**6} if stage == 3 else {}
    engine, *_ = zero_full.initialize(model=model, config=config(stage, zero_optimization=zero))
    for step, users in enumerate(users_by_step):
        model.used = comm.rank in users
        engine.backward(engine(data(step, 0, comm.rank)))
        engine.step()
    return engine.module_state_dict()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_no_rank_uses_stays_and_what_some_use_has_their_mean(stage: int) -> None:
    steps: list[tuple[int, ...]] = [(0, 1), (), (1,), (), (0,)]
    models = [Branches((), rank) for rank in range(2)]
    optimizer = adamw(models[0].parameters())
    for step, users in enumerate(steps):
        optimizer.zero_grad()
        for rank, model in enumerate(models):
            model.load_state_dict(models[0].state_dict())
            model.used, model.layers = rank in users, models[0].layers
            (model(data(step, 0, rank)) / 2).backward()
        optimizer.step()
    want = {name: p.detach() for name, p in models[0].named_parameters()}
    for got in POOL.run(branching, 2, stage, steps):
        assert_close(got, want)
