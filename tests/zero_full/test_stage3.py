"""Stage 3: whatever is recomputed and whatever a loop does, the result is stage 2's, bit for bit."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import config, data
from tests.zero_full.stage3_runs import (
    WAYS,
    Block,
    Tower,
    assert_stage_3_is_stage_2,
    one_step,
    seeded,
    stage3,
)
from tests.zero_full.test_offload_param import host_apart
from zero_full.shard.group.parameters import is_released
from zero_full.shard.group.released import ReleasedTensor


def test_a_plain_model() -> None:
    assert_stage_3_is_stage_2(Tower, units=8)


@pytest.mark.parametrize("world_size", [3, 4])
def test_a_plain_model_on_more_ranks(world_size: int) -> None:
    assert_stage_3_is_stage_2(Tower, world_size=world_size, ways=["released, overlapping"], steps=2)


# Activation checkpointing ------------------------------------------------------------------------


class Recomputed(Tower):
    """How much is recomputed: each block, pairs of blocks, all with torch's own function."""

    def __init__(self, how: str, reentrant: bool) -> None:
        super().__init__()
        self.how, self.reentrant = how, reentrant

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        x = x * torch.ones(1, requires_grad=True)  # re-entrant checkpoints need an input with gradients
        if self.how == "sequential":
            x = checkpoint_sequential(list(self.blocks), 3, x, use_reentrant=self.reentrant)
        size = {"each": 1, "pairs": 2, "all": 8}.get(self.how, 0)
        for start in range(0, 8 if size else 0, size or 1):
            part = nn.Sequential(*self.blocks[start : start + size])
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x.square().mean()


class InnerRecomputed(Block):
    """A checkpoint inside a unit."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        start = x if x.requires_grad else x.clone().requires_grad_()
        return x + checkpoint(self._inner, start, use_reentrant=self.reentrant)

    def _inner(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


@pytest.mark.rotates
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("how", ["each", "pairs", "all", "sequential"])
def test_units_inside_checkpoints(how: str, reentrant: bool) -> None:
    assert_stage_3_is_stage_2(partial(Recomputed, how, reentrant), units=8)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_units(reentrant: bool) -> None:
    assert_stage_3_is_stage_2(partial(Tower, 8, partial(InnerRecomputed, reentrant)), units=8)


# Other loops -------------------------------------------------------------------------------------


def micro(engine: zero_full.Engine, step: int, rank: int, number: int = 0) -> Tensor:
    return engine(data(step, number, rank))


def summed(engine: zero_full.Engine, step: int, rank: int) -> float:
    """Two forwards, one backward."""
    loss = micro(engine, step, rank) + micro(engine, step, rank, 1)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def two_and_two(engine: zero_full.Engine, step: int, rank: int) -> float:
    """Two forwards, then two backwards, the first one's first."""
    losses = [micro(engine, step, rank), micro(engine, step, rank, 1)]
    for loss in losses:
        loss.backward()
    engine.step()
    return sum(float(loss.detach()) for loss in losses)


def twice_through(engine: zero_full.Engine, step: int, rank: int) -> float:
    """Two backwards through one graph."""
    loss = micro(engine, step, rank)
    loss.backward(retain_graph=True)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def not_synced(engine: zero_full.Engine, step: int, rank: int) -> float:
    """One of two micro-batches stays at home."""
    with engine.no_sync():
        micro(engine, step, rank).backward()
    loss = micro(engine, step, rank, 1)
    loss.backward()
    engine.step()
    return float(loss.detach())


def accumulated(engine: zero_full.Engine, step: int, rank: int) -> float:
    """Three backwards that the config does not know of."""
    for number in range(3):
        loss = micro(engine, step, rank, number)
        (loss / 3).backward()
    engine.step()
    return float(loss.detach())


def asked_in_between(engine: zero_full.Engine, step: int, rank: int) -> float:
    """The gradient of the input, by itself, before backward."""
    x = data(step, 0, rank).requires_grad_()
    loss = engine(x)
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert grad.isfinite().all()
    engine.backward(loss)
    engine.step()
    return float(loss.detach() + grad.sum())


def looked_at(engine: zero_full.Engine, step: int, rank: int) -> float:
    """Evaluation, with and without grad mode, between forward and backward and after the step."""
    with torch.no_grad():
        before = float(micro(engine, step, rank, 1))
    loss = micro(engine, step, rank)
    with torch.inference_mode():
        middle = float(micro(engine, step, rank, 2))
    engine.backward(loss)
    engine.step()
    engine.eval()
    after = float(micro(engine, step, rank, 3).detach())  # with a graph that nobody needs
    engine.train()
    engine.zero_grad()
    return before + middle + after + float(loss.detach())


def never_backward(engine: zero_full.Engine, step: int, rank: int) -> float:
    """Forwards without backwards in between."""
    wasted = micro(engine, step, rank, 1)
    del wasted
    kept = micro(engine, step, rank, 2)
    return one_step(engine, step, rank) + float(kept.detach())


def penalized(engine: zero_full.Engine, step: int, rank: int) -> float:
    """The gradient's gradient, while all is gathered."""
    with zero_full.GatheredParameters(list(engine.module.parameters())):
        x = data(step, 0, rank).requires_grad_()
        loss = engine(x)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + grad.square().sum()
        engine.backward(loss)
    engine.step()
    return float(loss.detach())


def all_recomputed(engine: zero_full.Engine, step: int, rank: int, reentrant: bool) -> float:
    """The whole engine inside a checkpoint."""
    loss = checkpoint(engine, data(step, 0, rank).requires_grad_(), use_reentrant=reentrant)
    loss.backward()
    engine.step()
    return float(loss.detach())


LOOPS = {
    "two forwards, one backward": summed,
    "two forwards, two backwards": two_and_two,
    "two backwards through one graph": twice_through,
    "no_sync": not_synced,
    "plain accumulation": accumulated,
    "torch.autograd.grad": asked_in_between,
    "evaluation in between": looked_at,
    "forwards without backwards": never_backward,
    "gradient penalty": penalized,
    "engine inside a checkpoint": partial(all_recomputed, reentrant=False),
    "engine inside a re-entrant checkpoint": partial(all_recomputed, reentrant=True),
}


@pytest.mark.rotates
@pytest.mark.parametrize("play", LOOPS.values(), ids=LOOPS.keys())
def test_whatever_a_loop_does(play: Any) -> None:
    assert_stage_3_is_stage_2(Tower, play, units=8)


@pytest.mark.rotates
@pytest.mark.parametrize("reentrant", [False, True])
def test_micro_batches_with_checkpoints(reentrant: bool) -> None:
    assert_stage_3_is_stage_2(partial(Recomputed, "pairs", reentrant), gradient_accumulation_steps=2)


def penalized_outside(comm: Any, overlap: bool) -> tuple[str, int]:
    engine, _, _, _ = zero_full.initialize(model=seeded(Tower), config=stage3(overlap_comm=overlap))
    x = data(0, 0, comm.rank).requires_grad_()
    said = ""
    try:
        torch.autograd.grad(engine(x), x, create_graph=True)
    except RuntimeError as error:
        said = str(error)
    engine.zero_grad()
    one_step(engine, 0, comm.rank)
    return said, engine.optimizer.gatherer.live


@pytest.mark.parametrize("overlap", [False, True])
def test_a_gradients_gradient_is_refused_where_parameters_are_released(overlap: bool) -> None:
    for said, live in POOL.run(penalized_outside, 2, overlap):
        assert "create_graph=True" in said and "GatheredParameters" in said and live == 0


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        """Something for the other model."""
        return self.blocks(x)


def against_each_other(comm: Any, stage: int, zero: dict[str, Any]) -> list[Any]:
    """Two engines; one's gradients pass through the other."""
    keys = config(stage, zero_optimization=zero)
    maker, critic = (zero_full.initialize(model=seeded(make), config=keys)[0] for make in (Generator, Tower))
    found = []
    for step in range(3):
        noise, real = data(step, 0, comm.rank), data(step, 1, comm.rank)
        apart = critic(maker(noise).detach()) - critic(real)
        critic.backward(apart)
        critic.step()
        fooled = critic(maker(noise))
        maker.backward(fooled)
        maker.step()
        critic.zero_grad()
        found += [float(apart.detach()), float(fooled.detach())]
    return [*found, *(float(p.sum()) for e in (maker, critic) for p in e.module_state_dict().values())]


@pytest.mark.rotates
@pytest.mark.parametrize("way", ["released", "released, overlapping", "kept"])
def test_two_engines_one_after_the_other_in_one_graph(way: str) -> None:
    assert POOL.run(against_each_other, 2, 3, WAYS[way]) == POOL.run(against_each_other, 2, 2, {})


# What a step does not pay for ----------------------------------------------------------------------


def calls_no_torch_function(comm: Any, keys: dict[str, Any]) -> None:
    """Two steps, which may not run a released parameter's `__torch_function__`: it costs a microsecond."""
    with host_apart():  # so that also a single rank releases parameters
        engine = zero_full.initialize(model=seeded(Tower), config=keys)[0]
    called = list[str]()
    before = ReleasedTensor.__dict__["__torch_function__"]

    def count(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called.append(str(func))
        return before.__func__(cls, func, types, args, kwargs)

    one_step(engine, 0, comm.rank)
    ReleasedTensor.__torch_function__ = classmethod(count)  # type: ignore[assignment,method-assign]
    try:
        for step in (1, 2):
            one_step(engine, step, comm.rank)
        assert not called, called[:3]
        assert is_released(engine.module.blocks[0].up.weight)
    finally:
        ReleasedTensor.__torch_function__ = before  # type: ignore[method-assign]
    assert called  # by `is_released`: the counter counts


@pytest.mark.parametrize(("world_size", "precision"), [(1, "fp32"), (2, "fp32"), (2, "fp16")])
def test_a_step_never_calls_torch_function_of_a_released_parameter(world_size: int, precision: str) -> None:
    zero = {"offload_param": {"device": "cpu"}} if world_size == 1 else {}
    keys = stage3(**zero) | {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    if precision == "fp16":
        keys["fp16"] = {"enabled": True, "initial_scale_power": 8}
    POOL.run(calls_no_torch_function, world_size, keys)
