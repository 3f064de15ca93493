"""Modules whose state dict is not just tensors in a row, and runs that are told otherwise than before."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LRScheduler

import zero_full
from tests.zero_full.runs import config
from zero_full import CheckpointError

WIDTH = 6


class Plain(nn.Module):
    """A loss of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x))) - x
        return out.square().mean()


def engine_of(model: nn.Module | None = None, stage: int = 1, **keys: Any) -> Any:
    objects = {key: keys.pop(key) for key in ("optimizer", "lr_scheduler") if key in keys}
    told = config(stage, **keys)
    if "optimizer" in objects:
        told.pop("optimizer")
    return zero_full.initialize(model=Plain() if model is None else model, config=told, **objects)[0]


def train(engine: Any, *batches: int) -> list[float]:
    losses = []
    for number in batches:
        generator = torch.Generator().manual_seed(number)
        loss = engine(torch.randn(4, WIDTH, generator=generator))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# Modules ---------------------------------------------------------------------------------------------


class Scattered(Plain):
    """Tensors whose elements do not lie in a row, and one that shows one number many times."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.register_buffer("transposed", torch.rand(4, 3).t())
        self.register_buffer("every_second", torch.rand(3, 8)[:, ::2])
        self.register_buffer("shown_often", torch.ones(1).expand(3))
        self.frozen = nn.Conv2d(2, 3, 2).requires_grad_(False)
        self.frozen.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        seen: Tensor = self.frozen(x[:, :2, None, None].expand(-1, -1, 2, 2)).mean()
        return super().forward(x) + seen * self.transposed.sum() * self.every_second.sum()


class Halved(Plain):
    """A hook shows a buffer in another type."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.full((3,), float(seed)))
        self.register_state_dict_post_hook(self._halve)

    @staticmethod
    def _halve(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}seen"] = state[f"{prefix}seen"].half()


class Counting(Plain):
    """It writes and reads a number of its own, which it insists on."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.count = seed

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}count"] = torch.tensor([self.count])

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.count = int(state.pop(f"{prefix}count"))
        super()._load_from_state_dict(state, prefix, *rest)


class Extra(Plain):
    """torch's own way for it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.told = seed

    def get_extra_state(self) -> int:
        return self.told

    def set_extra_state(self, state: int) -> None:
        if state < 0:
            raise ValueError("negative")
        self.told = state


def kept_of(engine: Any) -> dict[str, Any]:
    module = engine.module
    state = {name: value for name, value in engine.module_state_dict().items() if name != "count"}
    return {**state, "count": getattr(module, "count", 0), "told": getattr(module, "told", 0)}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    pairs = [(one[name], other[name]) for name in one.keys() | other.keys()]
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", [Scattered, Halved, Counting, Extra])
def test_all_of_a_module_comes_back(kind: Callable[[int], nn.Module], stage: int, tmp_path: Path) -> None:
    engine = engine_of(kind(7), stage)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    own = engine.state_dict()
    by_checkpoint, by_state = engine_of(kind(1), stage), engine_of(kind(2), stage)
    by_checkpoint.load_checkpoint(tmp_path)
    by_state.load_state_dict(own)
    assert same(kept_of(by_checkpoint), kept_of(engine)) and same(kept_of(by_state), kept_of(engine))
    assert train(by_checkpoint, 2, 3) == train(engine, 2, 3) == train(by_state, 2, 3)


def test_a_module_that_refuses_its_state_leaves_all_as_it_was(tmp_path: Path) -> None:
    engine = engine_of(Extra(-1))
    train(engine, 0)
    engine.save_checkpoint(tmp_path)
    other = engine_of(Extra(3))
    before = kept_of(other)
    with pytest.raises(CheckpointError, match=r"the module's own _extra_state cannot load .*'negative'"):
        other.load_checkpoint(tmp_path)
    assert same(kept_of(other), before)


def test_extra_states_must_match_like_tensors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, model in (("with", Extra(3)), ("without", Plain())):
        engine_of(model).save_checkpoint(tmp_path, name)
    with pytest.raises(CheckpointError, match="lacks _extra_state"):
        engine_of(Extra(1)).load_checkpoint(tmp_path, "without")
    with pytest.raises(CheckpointError, match="has _extra_state, which the model lacks"):
        engine_of(Plain()).load_checkpoint(tmp_path, "with")
    engine_of(Plain()).load_checkpoint(tmp_path, "with", load_module_strict=False)
    assert "has _extra_state, which the model lacks" in caplog.text


def test_weights_that_were_tied_later_are_not_saved_under_one_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    engine = engine_of(model)
    model[1].weight = model[0].weight
    with pytest.raises(CheckpointError, match=r"1\.weight is not the parameter that it was"):
        engine.save_checkpoint(tmp_path)


# Runs ------------------------------------------------------------------------------------------------


def test_a_step_begins_anew_with_another_number_of_micro_batches(tmp_path: Path) -> None:
    """Five steps of two, and then steps of three: the first of these has three, too."""
    engine = engine_of(gradient_accumulation_steps=2)
    train(engine, *range(10))
    engine.save_checkpoint(tmp_path)
    other = engine_of(gradient_accumulation_steps=3)
    other.load_checkpoint(tmp_path)
    steps = []
    for number in range(6):
        train(other, number)
        steps.append(other.global_steps)
    assert steps == [5, 5, 6, 6, 6, 7]
    other.set_train_batch_size(other.train_micro_batch_size_per_gpu() * other.world_size)
    train(other, 0)
    other.save_checkpoint(tmp_path)  # a whole step of one


def test_a_state_dict_counts_micro_batches_as_a_checkpoint_does() -> None:
    """Five steps of two, and then steps of three; between the batches of a step there is none."""
    engine, other = engine_of(gradient_accumulation_steps=2), engine_of(gradient_accumulation_steps=3)
    train(engine, *range(10))
    other.load_state_dict(engine.state_dict())
    steps = []
    for number in range(4):
        train(other, number)
        steps.append(other.global_steps)
    assert steps == [5, 5, 6, 6]
    with pytest.raises(RuntimeError, match="state_dict after 1 of a step's 3 micro-batches"):
        other.state_dict()


def test_a_state_dict_that_is_refused_changes_nothing() -> None:
    """The model fits, and the optimizer does not."""
    engine, model = engine_of(), Plain()
    other = engine_of(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    train(engine, 0)
    train(other, 1)
    before = kept_of(other)
    with pytest.raises(ValueError, match="AdamW, and SGD cannot use it"):
        other.load_state_dict(engine.state_dict())
    assert same(kept_of(other), before)


def test_a_state_dict_without_what_this_run_has_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of()
    scheduled = engine_of(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}})
    train(engine, 0)
    train(scheduled, *range(3))
    before, state = kept_of(scheduled), engine.state_dict()
    schedule = scheduled.lr_scheduler.state_dict()
    with pytest.raises(ValueError, match="has no schedule, so this run's WarmupLR"):
        scheduled.load_state_dict(state)
    with pytest.raises(ValueError, match=r"\['module'.* are missing"):
        scheduled.load_state_dict(state["optimizer"])
    assert same(kept_of(scheduled), before)
    scheduled.load_state_dict(state | {"lr_scheduler": schedule})
    assert scheduled.lr_scheduler.state_dict() == schedule and scheduled.global_steps == 1
    assert "schedule" not in caplog.text
    engine.load_state_dict(scheduled.state_dict())
    assert "the schedule's state is not loaded" in caplog.text


@pytest.mark.parametrize("saved", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("way", ["checkpoint", "state dict"])
def test_adam_stays_adam_and_adamw_adamw(saved: Any, way: str, tmp_path: Path) -> None:
    def made(kind: Any) -> Any:
        model = Plain()
        return engine_of(model, optimizer=kind(model.parameters(), lr=0.1, weight_decay=0.3))

    other = torch.optim.Adam if saved is torch.optim.AdamW else torch.optim.AdamW
    engine, here = made(saved), made(other)
    train(engine, 0)
    engine.save_checkpoint(tmp_path)
    if way == "checkpoint":
        here.load_checkpoint(tmp_path)
    else:
        here.load_state_dict(engine.state_dict())
    mode = "decoupled_weight_decay"
    assert here.optimizer.param_groups[0][mode] == (other is torch.optim.AdamW)
    assert engine.optimizer.param_groups[0][mode] != here.optimizer.param_groups[0][mode]


def test_options_that_are_overridden_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine_of(
        optimizer=torch.optim.AdamW((model := Plain()).parameters(), lr=0.1), model=model
    ).save_checkpoint(tmp_path)
    model = Plain()
    other = engine_of(model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.2, weight_decay=0.5))
    with caplog.at_level(logging.WARNING):
        other.load_checkpoint(tmp_path)
    assert "parameter group 0 uses the saved options in place of this run's: lr 0.1, not 0.2" in caplog.text
    assert "weight_decay 0.01, not 0.5" in caplog.text
    assert other.optimizer.param_groups[0]["lr"] == 0.1


def test_inside_a_step_nothing_is_saved_or_loaded(tmp_path: Path) -> None:
    engine = engine_of()
    state = engine.state_dict()
    calls = {
        engine.save_checkpoint: tmp_path,
        engine.load_checkpoint: tmp_path,
        engine.load_state_dict: state,
    }
    for call, argument in calls.items():
        hook = engine.optimizer.register_step_post_hook(lambda *_, c=call, a=argument: c(a))
        with pytest.raises(RuntimeError, match=rf"{call.__name__} inside engine\.step\(\)"):
            train(engine, 0)
        hook.remove()
        engine.optimizer.zero_grad()
    assert not list(tmp_path.iterdir())


SCHEDULES: list[Callable[[Any], LRScheduler]] = [
    lambda optimizer: ExponentialLR(optimizer, 0.5),
    lambda optimizer: CosineAnnealingLR(optimizer, 9),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_goes_on_without_the_optimizers_state(schedule: Any, tmp_path: Path) -> None:
    def made() -> Any:
        model = Plain()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return engine_of(model, optimizer=optimizer, lr_scheduler=schedule(optimizer))

    engine, other = made(), made()
    train(engine, 0, 1, 2)
    engine.save_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path, load_optimizer_states=False)
    for number in (3, 4):
        assert engine.get_lr() == other.get_lr()
        train(engine, number)
        train(other, number)


def test_a_state_dict_of_another_schedule_is_not_loaded() -> None:
    engines = []
    for schedule in SCHEDULES:
        model = Plain()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        engines.append(engine_of(model, optimizer=optimizer, lr_scheduler=schedule(optimizer)))
    with pytest.raises(ValueError, match="of a run with a ExponentialLR, and this run has a CosineAnnealing"):
        engines[1].load_state_dict(engines[0].state_dict())


def in_groups(names: Sequence[Sequence[str]]) -> Any:
    """An engine with these parameter groups, and a schedule whose state has a rate for each."""
    model = Plain()
    named = dict(model.named_parameters())
    for name, param in named.items():
        param.requires_grad_(any(name in each for each in names))
    groups = [{"params": [named[n] for n in each], "lr": 10.0**-place} for place, each in enumerate(names)]
    optimizer = torch.optim.AdamW(groups)
    return engine_of(model, optimizer=optimizer, lr_scheduler=ExponentialLR(optimizer, 0.5))


def test_a_schedule_of_other_groups_is_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, *others = dict(Plain().named_parameters())
    engine = in_groups([[first], others])
    train(engine, 0)
    engine.save_checkpoint(tmp_path)
    cases = (
        ([others, [first]], "is in the optimizer's parameter group 0, but was saved in group 1"),
        ([[first]], "the learning rates of 2 parameter groups, but the optimizer has 1"),
    )
    for names, message in cases:
        other = in_groups(names)
        before, rates = kept_of(other), (other.get_lr(), other.lr_scheduler.state_dict())
        with pytest.raises(CheckpointError, match=rf"{message}.* \(load_lr_scheduler_states=False\)"):
            other.load_checkpoint(tmp_path, load_optimizer_states=False)
        assert same(kept_of(other), before) and rates == (other.get_lr(), other.lr_scheduler.state_dict())
    in_groups([[first], others]).load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert "parameter group 1 uses the saved options in place of this run's: lr 0.05, not 0.1" in caplog.text


def test_a_schedule_that_nobody_takes_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine_of(model, optimizer=optimizer, lr_scheduler=ExponentialLR(optimizer, 0.5)).save_checkpoint(
        tmp_path
    )
    engine_of().load_checkpoint(tmp_path)
    assert (
        "has the state of an LR scheduler, but this run has none: the learning rate stays as it was"
        in caplog.text
    )
    engine_of().load_checkpoint(tmp_path, load_optimizer_states=False)
    assert "this run has none: the learning rate stays as it is" in caplog.text


class Silent:
    """A schedule that does not tell its learning rate."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def step(self) -> None:
        pass


def test_a_schedule_that_does_not_tell_its_rate_needs_the_optimizers_state(tmp_path: Path) -> None:
    engine = engine_of(lr_scheduler=Silent())
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    before = kept_of(engine)
    with pytest.raises(CheckpointError, match="Silent has no get_last_lr"):
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert same(kept_of(engine), before)


def test_a_load_in_inference_mode_leaves_tensors_that_can_be_trained(tmp_path: Path) -> None:
    engine, other = engine_of(), engine_of()
    train(engine, 0)
    engine.save_checkpoint(tmp_path)
    with torch.inference_mode():
        other.load_checkpoint(tmp_path)
    assert train(other, 1, 2) == train(engine, 1, 2)


def test_an_empty_folder_with_the_name_of_a_tag_is_taken(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    engine_of().save_checkpoint(tmp_path, "mine")
    assert zero_full.checkpoint.complete(tmp_path).keys() == {"mine"}


def test_equal_sets_are_the_same_state() -> None:
    from zero_full.checkpoint.json_values import fingerprint

    one, other = {"a", "b", 8, 0, 16}, {16, 8, 0, "b", "a"}
    assert fingerprint(one) == fingerprint(other) != fingerprint({"a", "b"})
