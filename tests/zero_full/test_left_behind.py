"""What one object leaves to another: state, gradients and hooks that would be lost or used in silence."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import Net, config, data, said_by
from zero_full.assemble import shard
from zero_full.comm.topology import Topology
from zero_full.precision import Dtypes, DynamicScale
from zero_full.settings import Settings


def partly_frozen(kept: int) -> zero_full.Engine:
    """With at most `kept` elements in parameters that stay whole, at stage 3."""
    model = Net()
    model.layers[0].requires_grad_(False)
    zero = {"stage": 3, "stage3_param_persistence_threshold": kept}
    return zero_full.initialize(model=model, config=config(3, zero_optimization=zero))[0]


def frozen_elsewhere(comm: Any) -> list[str]:
    """A state whose frozen weights are sharded, loaded where they are whole; and where there are others."""
    sharded, whole = partly_frozen(0), partly_frozen(10_000)
    state, other = sharded.state_dict(), whole.state_dict()
    other["module"]["tensors"]["parameters/layers.7.weight"] = {"shape": (1,), "values": torch.ones(1)}
    return [
        said_by(lambda: whole.load_state_dict(state)),
        said_by(lambda: whole.load_state_dict(other)),
    ]


def test_frozen_weights_that_a_load_would_leave_alone_are_an_error() -> None:
    for part, other in POOL.run(frozen_elsewhere, 2):
        assert "ValueError: layers.0." in part and "owns elements 0 to 208" in part
        assert "ValueError" in other and "has parameters/layers.7.weight, which the model lacks" in other


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_state_that_an_optimizer_makes_early_has_the_type_of_its_master(dtype: torch.dtype) -> None:
    model = nn.Linear(3, 1, bias=False).to(dtype)
    keys = config(1, bf16={"enabled": True})
    engine, *_ = zero_full.initialize(
        model=model, optimizer=torch.optim.Adagrad(model.parameters()), config=keys
    )
    assert engine.optimizer.state[model.weight]["sum"].dtype == torch.float32
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 3, dtype=torch.bfloat16)).sum())
        engine.step()
    assert float(engine.optimizer.state[model.weight]["sum"].sum()) == 9
    engine.destroy()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, zero_full.Lamb])
def test_an_optimizer_that_was_given_away_is_refused_at_once(kind: Any) -> None:
    model = Net()
    base = kind(model.parameters(), lr=0.1)
    shard(model, base).close(gather=True)
    for given in (base, shard(Net(), None)):
        with pytest.raises(ValueError, match="belongs to another engine"):
            shard(model, given)


@pytest.mark.parametrize("kind", ["AdamW", "Lamb", "SGD"])
def test_assigning_an_empty_state_resets_it_and_a_cleared_gradient_is_none(kind: str) -> None:
    model = Net()
    params = {"lr": 0.01} | ({"momentum": 0.9} if kind == "SGD" else {})
    keys = config(1, optimizer={"type": kind, "params": params})
    engine, optimizer, _, _ = zero_full.initialize(model=model, config=keys)
    engine.backward(engine(data(0, 0, 0)))
    engine.step()
    assert optimizer.state
    optimizer.state = defaultdict(dict)
    assert not optimizer.state and not optimizer.base.state
    for place in (optimizer, optimizer.base):  # the one that was passed in cannot say so at once
        with pytest.raises(RuntimeError, match="safe_set_full_optimizer_state"):
            place.state = {model.layers[0].weight: {}}
            engine.state_dict()
    engine.backward(engine(data(2, 0, 0)))
    engine.step()
    optimizer.base.state = {}
    assert not [key for key in engine.state_dict()["optimizer"]["tensors"] if key.startswith("state/")]
    before = model.layers[0].weight.detach().clone()
    engine.backward(engine(data(1, 0, 0)))
    model.layers[0].weight.grad = None
    engine.step()
    assert torch.equal(model.layers[0].weight, before) and model.layers[0].weight not in optimizer.state
    engine.destroy()


def test_nothing_is_stepped_or_read_while_states_are_offloaded() -> None:
    model = Net()
    engine, optimizer, _, _ = zero_full.initialize(model=model, config=config(1))
    for step in range(2):
        engine.module(data(step, 0, 0)).backward()
        if step:
            engine.offload_states(include=["optim_states"])
            for act in (optimizer.step, lambda: optimizer.state[model.layers[0].weight]):
                assert "engine.reload_states()" in said_by(act)
            engine.reload_states()
        optimizer.step()
        optimizer.zero_grad()
    engine.destroy()


def clipped_without_zero_grad(comm: Any, foreach: bool | None) -> float:
    """AdamW, fused and by torch; gradients stay from step to step."""
    model = Net()
    base = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach)
    optimizer = shard(model, base, Settings(2, clip=0.1))
    for step in range(4):
        model(data(step, 0, comm.rank)).backward()
        optimizer.step()
    return float(sum(p.detach().double().abs().sum() for p in model.parameters()))


def test_gradients_that_stay_are_clipped_ones_whoever_steps() -> None:
    fused, passes = (POOL.run(clipped_without_zero_grad, 2, foreach) for foreach in (None, True))
    assert fused == pytest.approx(passes, rel=1e-6)


def test_a_model_in_fp16_gets_a_loss_scale() -> None:
    model = Net().half()
    assert isinstance(shard(model, torch.optim.SGD(model.parameters(), 0.1)).scaler, DynamicScale)


def test_a_model_in_fp16_is_refused_where_the_configuration_has_no_scale() -> None:
    with pytest.raises(ValueError, match=r"fp16 is not enabled.*layers.0.weight"):
        zero_full.initialize(model=Net().half(), config=config(1))
    for section in ({"fp16": {"enabled": True, "loss_scale": 1}}, {"bf16": {"enabled": True}}):
        zero_full.initialize(model=Net().half(), config=config(1, **section))[0].destroy()
    frozen = Net().half()
    frozen.layers[0].requires_grad_(False)
    frozen.layers[2:].float()
    zero_full.initialize(model=frozen, config=config(1))[0].destroy()


@pytest.mark.parametrize(
    "make",
    [lambda: Dtypes(reduce=torch.int32), lambda: Dtypes("bf16"), lambda: Settings(tier="cpu")],  # type: ignore[arg-type]
)
def test_types_that_cannot_be_meant_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match="must be"):
        make()


def test_a_rule_about_whole_tensors_refuses_split_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from zero_full.start.dtensor_checks import check_split_rule

    model = Net()
    topology = Topology(is_split=lambda name, p: name == "layers.0.weight")
    with pytest.raises(ValueError, match=r"Muon needs whole parameters, and layers.0.weight"):
        check_split_rule(model, zero_full.Muon(zero_full.muon_groups(model)), topology)
    check_split_rule(model, zero_full.Lamb(model.parameters()), topology)


def test_a_run_without_batch_sizes_goes_on_from_one_with_them() -> None:
    with_sizes, *_ = zero_full.initialize(model=Net(), config=config(1))
    keys = config(1)
    del keys["train_micro_batch_size_per_gpu"]
    without, *_ = zero_full.initialize(model=Net(), config=keys)
    without.load_state_dict(with_sizes.state_dict())
    without.backward(without(data(0, 0, 0)))
    without.step()
    assert (without.global_steps, without.global_samples) == (1, None)
