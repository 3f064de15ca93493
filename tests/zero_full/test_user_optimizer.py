"""The optimizer that was passed in, hooks on it, copies of it; and engines that have none."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import zero_full
from tests.worlds import POOL, run_each
from tests.zero_full.runs import Net, assert_close, assert_same, config, data, reference, said_by
from tests.zero_full.stage3_runs import RELEASED, Tower, seeded


def own(stage: int, **keys: Any) -> dict[str, Any]:
    """A config without an optimizer."""
    made = config(stage, **keys)
    del made["optimizer"]
    return made


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


# The object that was passed in -------------------------------------------------------------------


def train_by_hand(comm: Any, stage: int, hooked: bool) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The loop that a PyTorch user has, around the optimizer that he made. (parameters, hooks' calls)."""
    model, seen = Net(), {"before": 0, "after": 0}
    raw = adamw(model.parameters())
    engine, optimizer, _, _ = zero_full.initialize(model=model, optimizer=raw, config=own(stage))
    if hooked:
        optimizer.register_step_pre_hook(lambda *_: seen.update(before=seen["before"] + 1))
        optimizer.register_step_post_hook(lambda *_: seen.update(after=seen["after"] + 1))
        optimizer.register_state_dict_post_hook(lambda opt, state: state)
    for step in range(4):
        raw.zero_grad()
        engine(data(step, 0, comm.rank)).backward()
        raw.step()
    return engine.module_state_dict(), seen


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_stepping_the_optimizer_that_was_passed_in_trains(stage: int) -> None:
    for parameters, _ in POOL.run(train_by_hand, 2, stage, False):
        assert_close(parameters, reference(2))


@pytest.mark.parametrize("stage", [1, 3])
def test_hooks_on_the_optimizer_are_called(stage: int) -> None:
    for _, seen in POOL.run(train_by_hand, 2, stage, True):
        assert seen == {"before": 4, "after": 4}


def hooks_of(optimizer: Any, said: list[str]) -> None:
    names = ("step_pre", "step_post", "state_dict_pre", "state_dict_post")
    for name in (*names, "load_state_dict_pre", "load_state_dict_post"):
        getattr(optimizer, f"register_{name}_hook")(lambda *_, name=name: said.append(name))


@pytest.mark.parametrize("whose", ["the one that was passed in", "ours"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, zero_full.Lamb])
def test_every_hook_is_called_once(whose: str, kind: Any) -> None:
    model, said = Net(), list[str]()
    raw = kind(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(raw)  # which wraps step
    engine, optimizer, _, _ = zero_full.initialize(model=model, optimizer=raw, config=own(2))
    hooks_of(optimizer if whose == "ours" else raw, said)
    everywhere = register_optimizer_step_pre_hook(lambda *_: said.append("of every optimizer"))
    try:
        engine.backward(engine(data(0, 0, 0)))
        engine.step()
        schedule.step()
    finally:
        everywhere.remove()
    assert sorted(said) == ["of every optimizer", "step_post", "step_pre"]
    said.clear()
    optimizer.load_state_dict(optimizer.state_dict())
    assert said == ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"]


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "swept": adamw,
    "torch's own step": lambda params: torch.optim.SGD(params, lr=0.1),
    "a stepper": lambda params: zero_full.Lamb(params, lr=0.01),
    "another step": lambda params: with_another_step(torch.optim.SGD(params, lr=0.1)),
}


def with_another_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.step = lambda: type(optimizer).step(optimizer)  # type: ignore[method-assign, misc]
    return optimizer


def hooked_with(writes: bool, kind: str, model: nn.Module, seen: list[str]) -> torch.optim.Optimizer:
    """An optimizer with hooks, one of which may write gradients."""

    def before(*_: Any) -> None:
        seen.append("before")
        for p in model.parameters() if writes else ():
            p.grad = torch.full(p.shape, 0.5)

    raw = KINDS[kind](model.parameters())
    raw.register_step_pre_hook(before)
    raw.register_step_post_hook(lambda *_: seen.append("after"))
    return raw


def writes_in_a_hook(comm: Any, kind: str, stage: int) -> tuple[dict[str, Tensor], list[str]]:
    model, seen = Net(), list[str]()
    raw = hooked_with(True, kind, model, seen)
    zero = {"stage3_param_persistence_threshold": 20} if stage == 3 else {}
    engine, *_ = zero_full.initialize(model=model, optimizer=raw, config=own(stage, zero_optimization=zero))
    for step in range(2):
        engine.backward(engine(data(step, 0, comm.rank)))
        engine.step()
    found = engine.module_state_dict()
    engine.destroy()
    return found, seen


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_that_a_hook_before_the_step_writes_are_used(world: int) -> None:
    cases = [(kind, stage) for kind in KINDS for stage in (0, 1, 2, 3)]
    for (kind, _), ranks in zip(cases, run_each(writes_in_a_hook, world, cases), strict=True):
        plain = Net()
        optimizer = hooked_with(True, kind, plain, [])
        for _ in range(2):
            optimizer.step()
        for got, seen in ranks:
            assert_close(got, dict(plain.named_parameters()))
            assert seen == ["before", "after"] * 2


def clips_in_a_hook(comm: Any, kind: str) -> str:
    """It would find the norm of this rank's pieces."""
    model = Net()
    raw = hooked_with(False, kind, model, [])
    raw.register_step_pre_hook(
        lambda of, *_: nn.utils.clip_grad_norm_([p for g in of.param_groups for p in g["params"]], 0.1)
    )
    engine, *_ = zero_full.initialize(model=model, optimizer=raw, config=own(2))
    engine.backward(engine(data(0, 0, comm.rank)))
    said = said_by(engine.step)
    engine.destroy()
    return said


def test_a_hook_that_reads_gradients_hears_that_they_are_not_there() -> None:
    for ranks in run_each(clips_in_a_hook, 2, [(kind,) for kind in KINDS]):
        assert all("grad has no values" in said for said in ranks), ranks


def raises_on_one_rank(comm: Any, whose: str, stage: int) -> str:
    """A hook of the user's fails on the last rank only."""
    model = Net()
    raw = torch.optim.SGD(model.parameters(), lr=0.01)
    engine, optimizer, *_ = zero_full.initialize(model=model, optimizer=raw, config=own(stage))

    def fail(*_: Any) -> None:
        if comm.rank:
            raise ValueError("out of luck")

    registers = {
        "the one that was passed in": raw.register_step_pre_hook,
        "ours": optimizer.register_step_pre_hook,
        "every optimizer": register_optimizer_step_pre_hook,
    }
    hook = registers[whose](fail)
    engine.backward(engine(data(0, 0, comm.rank)))
    said = said_by(engine.step)
    hook.remove()
    engine.step()
    assert optimizer.last is not None and optimizer.last.applied
    engine.destroy()
    return said


def test_a_hook_that_raises_on_one_rank_ends_the_others_with_its_words() -> None:
    cases = [("the one that was passed in", 2), ("ours", 1), ("ours", 3), ("every optimizer", 2)]
    for ranks in run_each(raises_on_one_rank, 2, cases):
        assert all(said.startswith("DisagreementError") and "out of luck" in said for said in ranks)


def test_a_hook_that_returns_other_arguments_is_an_error() -> None:
    model = Net()
    raw = adamw(model.parameters())
    raw.register_step_pre_hook(lambda *_: ((raw, lambda: None), {}))
    engine, *_ = zero_full.initialize(model=model, optimizer=raw, config=own(1))
    engine.backward(engine(data(0, 0, 0)))
    with pytest.raises(RuntimeError, match="pre-step hook"):
        engine.step()


def test_hooks_may_change_what_is_saved_and_loaded() -> None:
    _, optimizer, _, _ = zero_full.initialize(model=Net(), config=config(1))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {**state, "scaler": saved["scaler"]})
    saved = optimizer.state_dict()
    assert saved["mine"] == 1
    optimizer.load_state_dict({**saved, "scaler": "lost"})


def test_the_passed_in_optimizer_of_an_engine_that_is_gone_says_so() -> None:
    model = Net()
    raw = adamw(model.parameters())
    engine, *_ = zero_full.initialize(model=model, optimizer=raw, config=own(1))
    engine.destroy()
    with pytest.raises(RuntimeError, match="whose engine was destroyed"):
        raw.step()


# Groups and state --------------------------------------------------------------------------------


def through_the_groups(comm: Any, stage: int) -> dict[str, Any]:
    """What a loop finds that goes to parameters by way of the optimizer."""
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=config(stage))
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    found: dict[str, Any] = {"same": [id(p) for p in listed] == [id(p) for p in engine.module.parameters()]}
    bias = engine.module.layers[2].bias
    for step in range(2):
        engine(data(step, 0, comm.rank)).backward()
        try:
            nn.utils.clip_grad_norm_(listed, 1e-3)
        except RuntimeError as error:
            found["clip"] = str(error)
        listed[0].grad = None  # as torch: the first weight is left alone
        before = listed[0].detach().clone() if stage < 3 else None
        optimizer.step()
        if before is not None:
            assert torch.equal(listed[0], before)
        optimizer.zero_grad()
        found[f"known after {step}"] = listed[0] in optimizer.state
    raw = optimizer.base.state
    kept = [optimizer.state[p] for p in optimizer.state]
    assert all(raw[p] is optimizer.state[p] for p in optimizer.state), "the optimizer that was passed in"
    found["kept"] = sum(state["exp_avg"].numel() for state in kept)
    for state in kept:
        state["exp_avg"].zero_()  # every rank resets what it keeps
    found["moment"] = float(zero_full.safe_get_full_optimizer_state(bias, "exp_avg").abs().sum())  # type: ignore[union-attr]
    for number, param in enumerate(list(optimizer.state)):
        (raw if number % 2 else optimizer.state).pop(param)
    found["left"] = len(optimizer.state)
    optimizer.param_groups[0]["params"] = listed[1:]
    engine(data(3, 0, comm.rank)).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        found["removed"] = str(error)
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_groups_show_the_parameters_and_state_is_found_by_them(stage: int) -> None:
    everyones = POOL.run(through_the_groups, 2, stage)
    for found in everyones:
        assert found["same"] and "has no values" in found["clip"]
        assert not found["known after 1"] and found["moment"] == found["left"] == 0
        assert "removed from them after initialize" in found["removed"]
    whole = sum(p.numel() for p in Net().parameters()) - 16 * 13
    assert sum(found["kept"] for found in everyones) == whole * (2 if stage == 0 else 1)


# Copies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "act", [copy.copy, copy.deepcopy, pickle.dumps, lambda x: torch.save(x, io.BytesIO())]
)
@pytest.mark.parametrize("what", ["engine", "optimizer"])
def test_what_cannot_be_copied_says_so_and_goes_on_working(what: str, act: Callable[[Any], Any]) -> None:
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=config(1))
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        act({"engine": engine, "optimizer": optimizer}[what])
    before = engine.module.layers[0].weight.detach().clone()
    engine.backward(engine(data(0, 0, 0)))
    engine.step()
    assert not torch.equal(engine.module.layers[0].weight, before)


# An optimizer with a past, and a parameter without dimensions ------------------------------------


class Scaled(Net):
    """With a temperature: a parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return super().forward(x) * self.temperature


def after_a_past(comm: Any, stage: int | None) -> dict[str, Tensor]:
    """Two steps of plain torch on everybody's data, then two more, with an engine unless stage is None."""
    model = Scaled()
    raw = adamw(model.parameters())

    def plainly(step: int) -> None:
        raw.zero_grad()
        for rank in range(2):
            (model(data(step, 0, rank)) / 2).backward()
        raw.step()

    for step in range(2):
        plainly(step)
    if stage is None:
        for step in range(2, 4):
            plainly(step)
        return {name: p.detach().clone() for name, p in model.named_parameters()}
    raw.zero_grad()
    engine, *_ = zero_full.initialize(model=model, optimizer=raw, config=own(stage))
    for step in range(2, 4):
        engine.backward(engine(data(step, 0, comm.rank)))
        engine.step()
    return engine.module_state_dict()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_optimizer_that_has_stepped_goes_on_with_a_parameter_without_dimensions_too(stage: int) -> None:
    want = after_a_past(None, None)
    for got in POOL.run(after_a_past, 2, stage):
        assert_close(got, want)


# No optimizer ------------------------------------------------------------------------------------


def own_optimizer_outside(comm: Any) -> dict[str, Tensor]:
    """At stage 0: the engine averages, an optimizer that it does not know steps."""
    model = Net()
    raw = adamw(model.parameters())
    engine, *_ = zero_full.initialize(model=model, config=own(0))
    for step in range(4):
        raw.zero_grad()
        engine.backward(engine(data(step, 0, comm.rank)))
        raw.step()
    return engine.module_state_dict()


def test_at_stage_0_gradients_are_averaged_for_an_optimizer_of_ones_own() -> None:
    for got in POOL.run(own_optimizer_outside, 3):
        assert_close(got, reference(3))


def only_forward(comm: Any, keys: dict[str, Any]) -> tuple[Tensor, int, list[str]]:
    """(outputs, elements held, errors of backward and step), frozen and not."""
    model = seeded(Tower)
    engine, *_ = zero_full.initialize(model=model, config=own(3, zero_optimization=RELEASED, **keys))
    said = []
    x = data(0, 0, 0, next(model.parameters()).dtype)
    with torch.no_grad():
        loss = engine(x)
    held = sum(t.numel() for tensors in engine.optimizer.holdings().values() for t in tensors)
    for act in (lambda: engine.backward(engine(x)), engine.step):
        try:
            act()
        except RuntimeError as error:
            said.append(str(error))
    return loss, held, said


def test_without_an_optimizer_a_model_is_sharded_for_inference_and_does_not_pretend_to_train() -> None:
    model = seeded(Tower)
    elements = sum(p.numel() for p in model.parameters())
    for loss, held, said in POOL.run(only_forward, 2, {}):
        torch.testing.assert_close(loss, model(data(0, 0, 0)).detach())
        assert held <= elements // 2 + 64
        assert "of an engine without an optimizer" in said[0]
        assert len(said) == 2


def test_without_an_optimizer_nothing_is_kept_twice_in_16_bits() -> None:
    elements = sum(p.numel() for p in seeded(Tower).parameters())
    for _, held, _ in POOL.run(only_forward, 2, {"bf16": {"enabled": True}}):
        assert held <= elements // 2 + 64


def test_the_same_bits_come_of_an_optimizer_an_instance_and_a_section() -> None:
    model = Net()
    engine, *_ = zero_full.initialize(model=model, optimizer=adamw, config=own(1))
    other, *_ = zero_full.initialize(model=Net(), config=config(1))
    for step in range(2):
        for each in (engine, other):
            each.backward(each(data(step, 0, 0)))
            each.step()
    assert_same(engine.module_state_dict(), other.module_state_dict())
