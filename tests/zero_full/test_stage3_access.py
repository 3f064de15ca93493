"""Stage 3: parameters that are released, and what is done to them from outside."""

import copy
import io
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import assert_same
from tests.zero_full.stage3_runs import Block, Tower, assert_stage_3_is_stage_2, one_step, seeded, stage3
from tests.zero_full.test_stage3_modules import LoRA
from zero_full.shard.access.gathered_parameters import guard, names_and_values
from zero_full.shard.group.parameters import is_released, placeholder_scalar


def engine_of(make: Callable[[], nn.Module] = Tower) -> zero_full.Engine:
    return zero_full.initialize(model=seeded(make), config=stage3())[0]


# Released parameters -----------------------------------------------------------------------------


class WithGain(Tower):
    """One parameter has one element."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return super().forward(x * self.gain)


USES: list[Callable[[Tensor], Any]] = [
    lambda p: p + 1,
    lambda p: p.data.sum(),
    lambda p: p.detach(),
    lambda p: torch.cat([torch.ones(2), p.reshape(-1)]),
    lambda p: nn.functional.linear(torch.ones(1, p.shape[-1]), p),
    lambda p: p.double().mean(),
    lambda p: p.tolist(),
    lambda p: copy.deepcopy(p),
    lambda p: nn.init.zeros_(p),
    lambda p: p.data.zero_(),
    lambda p: nn.utils.parameters_to_vector([p]),
    lambda p: torch.save(p, io.BytesIO()),
]


def looks_at_released(comm: Any) -> None:
    plain, engine = seeded(WithGain), engine_of(WithGain)
    for step in range(2):
        for (name, want), (same, got) in zip(
            plain.named_parameters(), engine.module.named_parameters(), strict=True
        ):
            assert name == same and got.shape == want.shape and got.numel() == want.numel()
            assert got.dtype == want.dtype and got.requires_grad
            assert is_released(got) and isinstance(got, nn.Parameter)
            assert torch.zeros_like(got).eq(0).all() and got.new_ones(3).sum() == 3
            for use in USES:
                with pytest.raises(RuntimeError, match=f"{name} is sharded and has no values"):
                    use(got)
        one_step(engine, step, comm.rank)


def test_a_released_parameter_has_its_shape_and_whoever_uses_it_hears_so() -> None:
    POOL.run(looks_at_released, 2)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "memory": lambda p: p.untyped_storage().fill_(0),
    "mul_": lambda p: p.mul_(2),
    "copy_": lambda p: p.copy_(torch.ones(p.shape)),
    "fill_": lambda p: p.fill_(1),
    "zero_": lambda p: p.data.zero_(),
    "item": lambda p: p.__setitem__(0, 1.0),
}


def writes_released(comm: Any, name: str, how: str) -> tuple[str, float]:
    """(the error of the write or of the next step, the loss of a step after it)."""
    engine = engine_of(WithGain)
    said = ""
    try:
        with torch.no_grad():
            WRITES[how](engine.module.get_parameter(name))
        one_step(engine, 0, comm.rank)
    except RuntimeError as error:
        said = str(error)
    engine.zero_grad()
    assert is_released(engine.module.blocks[7].up.weight)
    return said, one_step(engine, 0, comm.rank)


@pytest.mark.parametrize("how", ["mul_", "copy_", "fill_", "zero_"])
def test_a_write_to_a_released_parameter_is_an_error_and_not_lost(how: str) -> None:
    for said, loss in POOL.run(writes_released, 2, "blocks.2.up.weight", how):
        assert "GatheredParameters" in said or "single memory location" in said
        assert 0 < loss < 100


def test_a_write_that_python_does_not_see_is_noticed_at_the_step() -> None:
    for said, loss in POOL.run(writes_released, 2, "blocks.2.up.weight", "memory"):
        assert "a parameter was written while it was sharded" in said
        assert 0 < loss < 100


@pytest.mark.parametrize("how", ["fill_", "item"])
def test_a_write_to_a_released_parameter_of_one_element_is_an_error_too(how: str) -> None:
    for said, loss in POOL.run(writes_released, 2, "gain", how):
        assert "zero_full.GatheredParameters(parameters, modifier_rank=0)" in said
        assert 0 < loss < 100


def plain_state_dicts(comm: Any) -> list[str]:
    engine = engine_of()
    state, said = engine.module_state_dict(), []
    for call in (
        engine.module.state_dict,
        partial(engine.module.load_state_dict, state),
        engine.module.blocks[1].state_dict,
    ):
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))
    with zero_full.GatheredParameters(list(engine.module.parameters())):
        assert_same(engine.module.state_dict(), state)
    return said


def test_plain_state_dicts_of_sharded_models_name_the_remedy() -> None:
    for said in POOL.run(plain_state_dicts, 2):
        assert ["engine.module_state_dict()" in text for text in said] == [True, False, True]
        assert "engine.load_module_state_dict(...)" in said[1]


# GatheredParameters ------------------------------------------------------------------------------


def edits(comm: Any, modifier_rank: int, name: str, bf16: bool) -> None:
    """One rank's values become everyone's, in the masters, too."""
    keys = {**stage3(), "bf16": {"enabled": bf16}}
    engine, _, _, _ = zero_full.initialize(model=seeded(LoRA), config=keys)
    before = engine.module_state_dict()
    param = engine.module.get_parameter(name)
    with zero_full.GatheredParameters([param], modifier_rank=modifier_rank), torch.no_grad():
        assert torch.equal(param, before[name])
        with zero_full.GatheredParameters(param):
            assert param.isfinite().all()
        assert param.isfinite().all()  # still
        param.fill_(10 + comm.rank)
    want = torch.full(param.shape, 10 + modifier_rank, dtype=before[name].dtype)
    assert_same(engine.module_state_dict(), {**before, name: want})
    if param.requires_grad:
        assert torch.equal(zero_full.safe_get_full_fp32_param(param), want.float())
    assert is_released(param) and engine.optimizer.gatherer.live == 0
    with zero_full.GatheredParameters(param):  # what is set on every rank is no change of one rank
        with zero_full.GatheredParameters([param], modifier_rank=modifier_rank), torch.no_grad():
            param.fill_(20 + comm.rank)
        assert bool((param == 20 + modifier_rank).all())
        if param.requires_grad:
            zero_full.safe_set_full_fp32_param(param, torch.full(param.shape, 20.0 + modifier_rank))
    assert_same(engine.module_state_dict(), {**before, name: want + 10})


@pytest.mark.parametrize("name", ["blocks.5.up.weight", "blocks.3.base.bias"])
@pytest.mark.parametrize(("modifier_rank", "bf16"), [(0, False), (1, True)])
def test_one_ranks_changes_become_everyones(modifier_rank: int, bf16: bool, name: str) -> None:
    POOL.run(edits, 2, modifier_rank, name, bf16)


def refused(comm: Any, modifier_rank: int | None) -> tuple[str, bool]:
    engine = engine_of()
    before, param, said = engine.module_state_dict(), engine.module.blocks[3].up.weight, ""
    try:
        with zero_full.GatheredParameters([param], modifier_rank=modifier_rank), torch.no_grad():
            if comm.rank:
                param.data[0] = 7
    except RuntimeError as error:
        said = str(error)
    assert_same(engine.module_state_dict(), before)
    return said, bool(one_step(engine, 0, comm.rank) < 100)


def test_changes_that_are_nobodys_are_refused_and_undone() -> None:
    for said, trains in POOL.run(refused, 2, None):
        assert "blocks.3.up.weight changed" in said and "modifier_rank" in said and trains


def not_entered(comm: Any) -> None:
    engine, other = engine_of(), engine_of()
    other.offload_states()
    both = [engine.module.blocks[3].up.weight, other.module.blocks[3].up.weight]
    with (
        pytest.raises(RuntimeError, match="states are offloaded"),
        zero_full.GatheredParameters(both),
    ):
        pass
    assert is_released(both[0]) and engine.optimizer.gatherer.live == 0


def test_a_block_that_cannot_be_entered_leaves_nothing_gathered() -> None:
    POOL.run(not_entered, 2)


def test_a_modifier_rank_that_does_not_exist_is_refused() -> None:
    for said, trains in POOL.run(refused, 2, 7):
        assert "modifier_rank 7" in said and trains


class Peeks(Block):
    """Looks at another block's weight in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        other = self.other[0]  # type: ignore[attr-defined]
        with zero_full.GatheredParameters([other.up.weight]):
            size = other.up.weight.detach().norm()
        return super().forward(x) * (1 + 0.01 * size)


def peeking() -> nn.Module:
    model = Tower(8, Peeks)
    for number, block in enumerate(model.blocks):
        block.other = [model.blocks[-number]]
    return model


def test_parameters_can_be_gathered_inside_forward() -> None:
    assert_stage_3_is_stage_2(peeking, units=8)


def gathers_in_inference_mode(comm: Any, gathers: bool) -> list[float]:
    engine, losses = engine_of(), list[float]()
    for step in range(2):
        with torch.inference_mode(gathers):
            if gathers:
                with zero_full.GatheredParameters(list(engine.module.parameters())):
                    pass
        losses.append(one_step(engine, step, comm.rank))
    engine.destroy()
    return losses


def test_parameters_that_were_gathered_in_inference_mode_can_be_trained() -> None:
    assert POOL.run(gathers_in_inference_mode, 2, True) == POOL.run(gathers_in_inference_mode, 2, False)


def test_while_a_rank_saves_another_one_that_is_a_thread_is_still_guarded() -> None:
    released, saved = nn.Linear(2, 2), nn.Linear(2, 2)
    released.weight.data = placeholder_scalar(torch.float32, torch.device("cpu")).expand(2, 2)
    guard(released)
    inside, done = threading.Event(), threading.Event()
    saved.register_state_dict_pre_hook(lambda *_: (inside.set(), done.wait(60)))
    other = threading.Thread(target=names_and_values, args=(saved,))
    other.start()
    assert inside.wait(60)
    try:
        with pytest.raises(RuntimeError, match="weight is sharded"):
            released.state_dict()
    finally:
        done.set()
        other.join()
