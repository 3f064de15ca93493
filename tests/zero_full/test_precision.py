"""Which number has which dtype, and that 16-bit training is the training one would write by hand."""

from typing import Any

import pytest
import torch

import zero_full
from tests.worlds import run_in
from tests.zero_full.runs import Net, assert_close, assert_same, config, data
from tests.zero_full.sixteen_bits import DTYPES, STAGES, Line, Precise, by_hand, pieces, together
from zero_full.precision import Dtypes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ADAM = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}}


@pytest.mark.parametrize(
    "dtypes, model, parameter, master, accumulate, moments",
    [
        (Dtypes(), FP32, FP32, FP32, FP32, FP32),
        (Dtypes(), BF16, BF16, FP32, FP32, FP32),  # a model that is bf16 by itself
        (Dtypes(BF16), FP32, BF16, FP32, FP32, FP32),
        (Dtypes(FP16), FP32, FP16, FP32, FP32, FP32),
        (Dtypes(BF16, low_master=True), FP32, BF16, BF16, BF16, FP32),
        (Dtypes(BF16, low_master=True, low_state=True), FP32, BF16, BF16, BF16, BF16),
        (Dtypes(FP16, low_master=True), FP32, FP16, FP16, FP16, FP16),
        (Dtypes(BF16, accumulate=BF16), FP32, BF16, FP32, BF16, FP32),
        (Dtypes(FP16, accumulate=FP32, low_master=True), FP32, FP16, FP16, FP32, FP16),
        (Dtypes(), torch.float64, torch.float64, torch.float64, torch.float64, torch.float64),
    ],
    ids=str,
)
def test_every_number_of_a_step_has_its_dtype(
    dtypes: Dtypes,
    model: torch.dtype,
    parameter: torch.dtype,
    master: torch.dtype,
    accumulate: torch.dtype,
    moments: torch.dtype,
) -> None:
    assert dtypes.of(model) == parameter
    assert dtypes.master_of(parameter) == master
    assert dtypes.accumulate_of(parameter) == accumulate
    rows = dtypes.table(model)
    named = [str(dtype).removeprefix("torch.") for dtype in (parameter, accumulate, moments, master)]
    assert [rows["parameter"], rows["accumulate"], rows["Adam's moments"]] == named[:3]
    assert rows["master"] == ("the parameters themselves" if master == parameter else named[3])
    assert rows["reduce"] == "as the gradients are"


def test_the_table_names_the_dtype_on_the_wire_and_integers_stay_integers() -> None:
    assert Dtypes(BF16, reduce=FP32).table(FP32)["reduce"] == "float32"
    assert Dtypes(BF16).of(torch.int64) == torch.int64


def trained(comm: Any, precision: str, steps: int, keys: dict[str, Any]) -> dict[int, Precise]:
    """By stage: this rank's parameters and its pieces of the masters."""
    found = {}
    for stage in STAGES:
        more = {precision: {"enabled": True}, "optimizer": ADAM, **keys}
        engine, _, _, _ = zero_full.initialize(model=Net(), config=config(stage, **more))
        for step in range(steps):
            for micro in range(engine.gradient_accumulation_steps()):
                engine.backward(engine(data(step, micro, comm.rank, DTYPES[precision])))
                engine.step()
                assert engine.was_step_applied() == (micro + 1 == engine.gradient_accumulation_steps())
        found[stage] = Precise({n: p.detach().clone() for n, p in engine.named_parameters()}, pieces(engine))
        engine.destroy()
    return found


KINDS: dict[str, tuple[str, list[float], dict[str, Any]]] = {  # precision, scale in each step, config
    "bf16": ("bf16", [1, 1, 1, 1], {}),
    "fp16, dynamic": ("fp16", [2**10] * 4, {"enabled": True, "initial_scale_power": 10}),
    "fp16, static": ("fp16", [256] * 4, {"enabled": True, "loss_scale": 256.0}),
    "fp16, growing": (
        "fp16",
        [256, 256, 512, 1024],
        {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 1},
    ),
}


@pytest.mark.rotates
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sixteen_bit_training_is_what_one_would_write_by_hand(world_size: int, kind: str) -> None:
    precision, scales, section = KINDS[kind]
    ranks = run_in("processes", trained, world_size, precision, 4, {precision: section or {"enabled": True}})
    for stage in STAGES:
        want = by_hand(DTYPES[precision], world_size, scales, rounded=stage == 0 and world_size > 1)
        masters = together(rank[stage].masters for rank in ranks)
        assert_close(masters, {name: m.reshape(-1) for name, m in want.masters.items()}, 1e-6)
        cast = {name: m.to(DTYPES[precision]) for name, m in masters.items()}
        for rank in ranks:
            assert_same({name: p.reshape(-1) for name, p in rank[stage].parameters.items()}, cast)


@pytest.mark.parametrize("world_size", [1, 2])
def test_sixteen_bit_training_over_micro_batches_is_what_one_would_write_by_hand(world_size: int) -> None:
    want = by_hand(BF16, world_size, [1, 1], micro_batches=3)
    ranks = run_in("processes", trained, world_size, "bf16", 2, {"gradient_accumulation_steps": 3})
    for stage in STAGES:
        masters = together(rank[stage].masters for rank in ranks)
        assert_close(masters, {name: m.reshape(-1) for name, m in want.masters.items()}, 1e-6)


MICRO_BATCHES = 256


def a_large_gradient_and_many_small_ones(comm: Any, keys: dict[str, Any]) -> list[tuple[float, float]]:
    """By stage: the norm with accumulation by the engine, and with plain backward under no_sync."""
    norms = []
    inputs = [1.0] + [2.0**-9] * (MICRO_BATCHES - 1)  # 1 + 2^-9 is 1 in bf16
    for stage in STAGES:
        zero = {"stage": stage, **keys.get("zero_optimization", {})}
        more = {
            "bf16": {"enabled": True},
            **keys,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "plain_backward_divides": False,
            "zero_optimization": zero,
        }
        engine, _, _, _ = zero_full.initialize(model=Line(), config=config(stage, **more))
        for x in inputs:
            engine.backward(engine(torch.full((3,), x)), scale_wrt_gas=False)
            engine.step()
        counted = engine.get_global_grad_norm()
        with engine.no_sync():
            for x in inputs[:-1]:
                engine(torch.full((3,), x)).backward()
        engine(torch.full((3,), inputs[-1])).backward()
        engine.optimizer.step()
        norms.append((counted, engine.get_global_grad_norm()))
        engine.destroy()
    return norms


@pytest.mark.rotates
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_micro_batches_add_up_in_fp32_so_that_small_gradients_count(
    world_size: int, contiguous: bool
) -> None:
    keys = {"zero_optimization": {"contiguous_gradients": contiguous}}
    want = (1 + (MICRO_BATCHES - 1) * 2.0**-9) * 3**0.5
    for rank in run_in("processes", a_large_gradient_and_many_small_ones, world_size, keys):
        assert rank == [(pytest.approx(want), pytest.approx(want))] * len(STAGES)


def test_bf16_accumulation_by_name_loses_them() -> None:
    keys = {"data_types": {"grad_accum_dtype": "bf16"}}
    for rank in run_in("processes", a_large_gradient_and_many_small_ones, 2, keys):
        assert rank == [(pytest.approx(3**0.5), pytest.approx(3**0.5))] * len(STAGES)


def test_masters_are_cut_from_the_original_weights_not_from_rounded_ones() -> None:
    original = {name: p.detach().reshape(-1) for name, p in Net().named_parameters()}
    ranks = run_in("processes", trained, 2, "bf16", 0, {})
    for stage in STAGES:
        assert_same(together(rank[stage].masters for rank in ranks), original)
        rounded = {name: p.reshape(-1) for name, p in ranks[0][stage].parameters.items()}
        assert_same(rounded, {name: p.bfloat16() for name, p in original.items()})
        assert any(not torch.equal(p.float(), original[name]) for name, p in rounded.items())


def held(comm: Any, keys: dict[str, Any]) -> list[dict[str, set[torch.dtype]]]:
    """By stage: the dtypes of everything that is held when a step's gradients have been averaged."""
    found = []
    for stage in STAGES:
        engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=config(stage, **keys))
        dtype = next(engine.parameters()).dtype
        for step in range(2):
            engine.backward(engine(data(step, 0, comm.rank, dtype)))
            kinds = {
                k: {t.dtype for t in held} for k, held in optimizer.holdings().items() if k != "counters"
            }
            engine.step()
            kinds["optimizer"] = {t.dtype for t in optimizer.holdings()["optimizer"]}
        found.append(kinds)
        engine.destroy()
    return found


LOW = {
    "bf16": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
    "fp16": {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True, "initial_scale_power": 8}},
}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_with_low_masters_nothing_is_held_in_fp32(world_size: int, precision: str) -> None:
    low = {DTYPES[precision]}
    for rank in run_in("processes", held, world_size, LOW[precision]):
        assert rank == [{"parameters": low, "gradients": low, "optimizer": low}] * len(STAGES)


def test_with_bf16_masters_the_moments_of_adam_stay_in_fp32_unless_asked_otherwise() -> None:
    keys = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
    for rank in run_in("processes", held, 2, keys):
        for kinds in rank:
            assert kinds["parameters"] == kinds["gradients"] == {BF16}
            assert kinds["optimizer"] == {FP32}  # the masters are the parameters


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_with_fp32_masters_only_the_parameters_and_unreduced_gradients_are_low(precision: str) -> None:
    low = DTYPES[precision]
    for rank in run_in("processes", held, 2, {precision: {"enabled": True}}):
        for stage, kinds in zip(STAGES, rank, strict=True):
            assert kinds["parameters"] == {low} and kinds["optimizer"] == {FP32}
            assert kinds["gradients"] == ({FP32} if stage == 2 else {FP32, low})


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_are_kept_in_the_accumulation_dtype_that_is_asked_for(dtype: str) -> None:
    keys = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": dtype}}
    for rank in run_in("processes", held, 2, keys):
        assert rank[2]["gradients"] == {FP32 if dtype == "fp32" else BF16}
        assert rank[2]["optimizer"] == {FP32}
