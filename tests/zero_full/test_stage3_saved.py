"""Stage 3: runs that fail, stop, are saved and continued, copied, and used to generate; precisions."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import assert_same, config, data
from tests.zero_full.stage3_runs import (
    RELEASED,
    Block,
    Tower,
    assert_stage_3_is_stage_2,
    one_step,
    seeded,
    stage3,
)
from tests.zero_full.test_stage3_calls import GPT, Normalized
from tests.zero_full.test_stage3_modules import LoRA


def engine_of(make: Callable[[], nn.Module], keys: dict[str, Any]) -> zero_full.Engine:
    return zero_full.initialize(model=seeded(make), config=keys)[0]


# What fails --------------------------------------------------------------------------------------


class OnPurposeError(Exception):
    pass


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise OnPurposeError


class FailsInside(Block):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        """The same shape, or an error."""
        if self.fails:
            raise OnPurposeError
        return super().forward(x)


class Fails(Tower):
    where = ""

    def __init__(self) -> None:
        super().__init__(8, FailsInside)

    def forward(self, x: Tensor) -> Tensor:
        """The loss, or an error half way."""
        for number, block in enumerate(self.blocks):
            if number == 4 and self.where == "forward":
                raise OnPurposeError
            block.fails = number == 4 and self.where == "unit"
            x = block(FailsBackward.apply(x) if number == 4 and "backward" in self.where else x)
        return x.square().mean()


def fails_once(engine: zero_full.Engine, step: int, rank: int, where: str) -> float:
    """Before every step there is an attempt that fails."""
    engine.module.where = where
    with pytest.raises(OnPurposeError):
        loss = engine(data(step, 7, rank))
        if where == "plain backward":
            loss.backward()
        engine.backward(loss)
    engine.module.where = ""
    engine.zero_grad()
    return one_step(engine, step, rank)


def lacks_memory_once(engine: zero_full.Engine, step: int, rank: int) -> float:
    """Before every step there is a forward in which the last unit cannot be gathered."""
    flat = engine.optimizer.sharded.flats[-1]
    gathers = flat.gather_slices
    flat.gather_slices = mock.Mock(side_effect=torch.OutOfMemoryError)
    if flat.released_at_rest:
        with pytest.raises(torch.OutOfMemoryError):
            engine(data(step, 7, rank))
        assert not flat.full.untyped_storage().nbytes()
    flat.gather_slices = gathers
    return one_step(engine, step, rank)


def groups_after_a_failed_end(comm: Any) -> int:
    """Process groups that stay open when `destroy(gather=True)` cannot gather."""
    before = len(torch.distributed.distributed_c10d._world.pg_map)
    engine = engine_of(Tower, stage3(overlap_comm=True))
    engine.optimizer.sharded.flats[-1].gather_slices = mock.Mock(side_effect=torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError):
        engine.destroy(gather=True)
    return len(torch.distributed.distributed_c10d._world.pg_map) - before


def test_an_end_that_fails_leaves_no_group_open() -> None:
    assert POOL.run(groups_after_a_failed_end, 2) == [0, 0]


def test_the_step_after_one_without_memory_for_a_unit() -> None:
    assert_stage_3_is_stage_2(Tower, lacks_memory_once, ways=["released", "kept"], units=8)


@pytest.mark.rotates
@pytest.mark.parametrize("where", ["forward", "unit", "backward", "plain backward"])
def test_the_step_after_one_that_has_failed(where: str) -> None:
    assert_stage_3_is_stage_2(Fails, partial(fails_once, where=where), units=8)


def again_on_the_same_model(comm: Any, stage: int, zero: dict[str, Any]) -> tuple[list[float], int]:
    """Two engines, one after the other. (losses, hooks left on the modules)."""
    model, losses = seeded(Tower), []
    for half in range(2):
        engine, _, _, _ = zero_full.initialize(model=model, config=config(stage, zero_optimization=zero))
        losses += [one_step(engine, 2 * half + step, comm.rank) for step in range(2)]
        whole = engine.module_state_dict()
        engine.destroy(gather=True)
        assert_same(model.state_dict(), whole)
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
    return losses, sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def test_a_destroyed_engine_leaves_a_whole_model_that_another_one_takes_over() -> None:
    want = POOL.run(again_on_the_same_model, 2, 2, {})
    assert POOL.run(again_on_the_same_model, 2, 3, RELEASED) == want


def taken_over_released(comm: Any) -> None:
    model = seeded(Tower)
    engine, _, _, _ = zero_full.initialize(model=model, config=stage3())
    engine.destroy()
    with pytest.raises(RuntimeError, match="GatheredParameters"):
        model.state_dict()
    with pytest.raises(ValueError, match=r"was released by an engine.*destroy\(gather=True\)"):
        zero_full.initialize(model=model, config=stage3())


def test_released_parameters_are_not_taken_for_values() -> None:
    POOL.run(taken_over_released, 2)


def hooks_after_destroy(comm: Any) -> int:
    model = seeded(Tower)
    engine, _, _, _ = zero_full.initialize(model=model, config=stage3())
    one_step(engine, 0, comm.rank)
    engine.destroy()
    on_params = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    return on_params + sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a_destroyed_engine_takes_its_hooks_along() -> None:
    assert POOL.run(hooks_after_destroy, 2) == [0, 0]


# Saved and continued -----------------------------------------------------------------------------


def continued(
    comm: Any, make: Callable[[], nn.Module], keys: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(a run of four steps, one that is saved after two and continued by an engine of another model)."""
    whole = engine_of(make, keys)
    for step in range(4):
        one_step(whole, step, comm.rank)
        if step == 1:
            saved = copy.deepcopy(whole.state_dict())
    torch.manual_seed(99)
    later, _, _, _ = zero_full.initialize(model=make(), config=keys)
    one_step(later, 5, comm.rank)
    later.load_state_dict(saved)
    for step in (2, 3):
        one_step(later, step, comm.rank)
    return whole.module_state_dict(), later.module_state_dict()


@pytest.mark.rotates
@pytest.mark.parametrize("keys", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}], ids=str)
@pytest.mark.parametrize("make", [LoRA, GPT])
def test_a_saved_run_continues_bit_for_bit(make: Callable[[], nn.Module], keys: dict[str, Any]) -> None:
    for whole, later in POOL.run(continued, 2, make, {**stage3(overlap_comm=True), **keys}):
        assert_same(later, whole)


def outputs_of_second_slices(comm: Any) -> None:
    """What a node has kept of frozen parameters is forgotten when others are loaded."""
    keys = stage3(zero_hpz_partition_size=2)
    first = engine_of(LoRA, keys)
    torch.manual_seed(99)
    second, _, _, _ = zero_full.initialize(model=LoRA(), config=keys)
    one_step(second, 0, comm.rank)
    second.load_state_dict(first.state_dict())
    x = data(1, 0, comm.rank)
    assert torch.equal(first(x), second(x))


def test_loaded_frozen_parameters_replace_second_slices() -> None:
    POOL.run(outputs_of_second_slices, 4)


def round_trip(comm: Any, make: Callable[[], nn.Module], zero: dict[str, Any]) -> None:
    """A whole state dict has plain torch's keys and values, and another engine takes it."""
    plain = seeded(make).state_dict()
    first = engine_of(make, stage3(**zero))
    assert_same(first.module_state_dict(), plain)
    one_step(first, 0, comm.rank)
    state = first.module_state_dict()
    torch.manual_seed(99)
    second, _, _, _ = zero_full.initialize(model=make(), config=stage3(**zero))
    second.load_module_state_dict(state)
    assert_same(second.module_state_dict(), state)
    fresh = seeded(make)
    fresh.load_state_dict(state)
    for engine in (first, second):
        engine.eval()
    x = data(1, 0, comm.rank)
    assert torch.equal(first(x), second(x)) and torch.equal(first(x), fresh.eval()(x))
    for engine in (first, second):
        engine.zero_grad()
    for param in (p for p in second.module.parameters() if p.requires_grad):
        zero_full.safe_get_full_fp32_param(param)


@pytest.mark.rotates
@pytest.mark.parametrize("zero", [{}, {"stage3_param_persistence_threshold": 300}], ids=str)
@pytest.mark.parametrize("make", [GPT, LoRA, Normalized])
def test_a_whole_state_dict_goes_round(make: Callable[[], nn.Module], zero: dict[str, Any]) -> None:
    POOL.run(round_trip, 2, make, zero)


def copied(comm: Any) -> None:
    """A copy made while all is gathered is a model of its own."""
    engine = engine_of(Tower, stage3())
    one_step(engine, 0, comm.rank)
    with zero_full.GatheredParameters(list(engine.module.parameters())):
        twin = copy.deepcopy(engine.module)
    x, sent = data(1, 0, comm.rank), engine.traffic()
    loss = twin(x)
    loss.backward()
    assert engine.traffic() == sent
    assert torch.equal(loss, engine(x))
    assert all(p.grad is not None for p in twin.parameters())
    assert_same(twin.state_dict(), engine.module_state_dict())


def test_a_gathered_model_can_be_copied() -> None:
    POOL.run(copied, 2)


# Generation --------------------------------------------------------------------------------------


def generates(
    comm: Any, gathered: bool, overlap: bool
) -> tuple[list[float], dict[str, int], list[float], int]:
    """Forwards of growing length between steps. (outputs, traffic meanwhile, losses, gathered after it)."""
    engine = engine_of(Tower, stage3(overlap_comm=overlap))
    losses, outputs = [one_step(engine, 0, comm.rank)], []
    engine.optimizer.communicators.traffic.clear()
    engine.eval()
    with (
        zero_full.GatheredParameters(list(engine.module.parameters()), enabled=gathered),
        torch.inference_mode(),
    ):
        for length in range(1, 6):
            outputs.append(float(engine(torch.ones(length, 16))))
    live, traffic = engine.optimizer.gatherer.live, engine.traffic()
    engine.train()
    losses += [one_step(engine, step, comm.rank) for step in (1, 2)]
    return outputs, traffic, losses, live


@pytest.mark.parametrize("overlap", [False, True])
def test_generation_gathers_each_time_or_once_and_changes_nothing(overlap: bool) -> None:
    one_gather = 4 * sum(p.numel() for p in Tower().parameters()) // 2
    each, once = POOL.run(generates, 2, False, overlap), POOL.run(generates, 2, True, overlap)
    for (outputs, traffic, losses, live), (same, less, equal, nothing) in zip(each, once, strict=True):
        assert outputs == same and losses == equal and live == nothing == 0
        assert traffic == {"all_gather": 5 * one_gather} and less == {"all_gather": one_gather}


# Precisions --------------------------------------------------------------------------------------


def poisoned(engine: zero_full.Engine, step: int, rank: int) -> float:
    """In the second step the last rank's data has an inf: nobody steps."""
    x = data(step, 0, rank, engine.optimizer.sharded.flats[0].dtype)
    if step == 1 and rank == 1:
        x[0, 0] = float("inf")
    loss = engine(x)
    engine.backward(loss)
    engine.step()
    assert engine.was_step_applied() == (step != 1)
    return float(loss.detach()) + engine.loss_scale() + float(engine.get_global_grad_norm() or 0)


FP16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}


@pytest.mark.rotates
@pytest.mark.parametrize(
    "keys", [{"bf16": {"enabled": True}}, {"fp16": FP16}, {"gradient_clipping": 0.1}], ids=str
)
def test_an_overflow_on_one_rank_is_skipped_by_all(keys: dict[str, Any]) -> None:
    for world_size in (2, 3):
        assert_stage_3_is_stage_2(
            Tower, poisoned, world_size, ways=["released, overlapping", "kept"], tolerance=1e-6, **keys
        )


SIXTEEN = [
    ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, 0.0),
    # torch rounds the last elements of a 16-bit tensor otherwise than those that fill a vector register.
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, 0.02),
    ({"fp16": FP16, "gradient_accumulation_steps": 2}, 0.0),
]


@pytest.mark.rotates
@pytest.mark.parametrize(("keys", "tolerance"), SIXTEEN, ids=str)
def test_sixteen_bits(keys: dict[str, Any], tolerance: float) -> None:
    assert_stage_3_is_stage_2(Tower, tolerance=tolerance, **keys)


def autocast_step(engine: zero_full.Engine, step: int, rank: int) -> float:
    """The user's own autocast, over two forwards."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = engine(data(step, 0, rank)) + engine(data(step, 1, rank))
    engine.backward(loss)
    engine.step()
    return float(loss)


def test_autocast() -> None:
    assert_stage_3_is_stage_2(Tower, autocast_step)


class KeepsBuffer(Tower):
    """A buffer that is fp32 whatever the model's dtype, as rotary embeddings have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(16) / 3, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return super().forward(x * torch.cos(self.angles.float()).to(x.dtype))


def test_buffers_are_those_of_stage_2() -> None:
    assert_stage_3_is_stage_2(KeepsBuffer, bf16={"enabled": True})
