"""Dtypes that meet in one model and on the wire: mixed layers, frozen ones, buffers, bytes sent."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL, RankError, run_in
from tests.zero_full.runs import Net, assert_close, config, data, train
from tests.zero_full.sixteen_bits import DTYPES, STAGES
from zero_full.comm.transport import Native

BF16, FP32 = torch.bfloat16, torch.float32


def bytes_sent(comm: Any, stage: int, keys: dict[str, Any]) -> tuple[dict[str, int], int]:
    """What one step sends, and the elements of all buckets, padding included."""
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=config(stage, **keys))
    for micro in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(data(0, micro, comm.rank, BF16)))
        engine.step()
    return engine.traffic(), sum(group.layout.total for group in optimizer.trained)


def wire_keys(wire: str | None, micro_batches: int) -> dict[str, Any]:
    keys = {"bf16": {"enabled": True}, "gradient_accumulation_steps": micro_batches}
    return {**keys, "communication_data_type": wire}


@pytest.mark.pairwise
@pytest.mark.parametrize("wire", [None, "bf16", "fp32"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_bf16_models_gradients_travel_in_the_dtype_that_is_asked_for(
    world_size: int, stage: int, micro_batches: int, wire: str | None
) -> None:
    added_up = stage == 1 and micro_batches > 1  # in fp32, and sent as they are unless told otherwise
    size = 4 if wire == "fp32" or (wire is None and added_up) else 2
    reductions = micro_batches if stage == 2 else 1
    ranks = run_in("processes", bytes_sent, world_size, stage, wire_keys(wire, micro_batches))
    for sent, elements in ranks:
        part = elements * (world_size - 1) // world_size
        assert sent == {"reduce_scatter": reductions * part * size, "all_gather": part * 2}


@pytest.mark.parametrize("wire", [None, "bf16", "fp32"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_at_stage_0_too_gradients_travel_in_the_dtype_that_is_asked_for(
    world_size: int, wire: str | None
) -> None:
    size = 4 if wire == "fp32" else 2
    for sent, elements in run_in("processes", bytes_sent, world_size, 0, wire_keys(wire, 1)):
        assert sent == {"all_reduce": 2 * elements * (world_size - 1) // world_size * size}


class Mixed(nn.Module):
    """A bf16 layer between two in fp32, whose gradients must not meet in one buffer."""

    def __init__(self) -> None:
        super().__init__()
        plain = Net().layers
        self.before, self.inside, self.after = plain[0], plain[2].to(BF16), plain[4]

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        h = torch.tanh(self.before(x))
        h = torch.tanh(self.inside(h.to(BF16))).to(FP32)
        return self.after(h).square().mean()


def mixed_by_hand(world_size: int, steps: int) -> dict[str, Tensor]:
    """Masters in fp32 for what is bf16, the parameters themselves for the rest."""
    model = Mixed()
    masters = {name: p.detach().clone().float() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=0.01, weight_decay=0.1)
    for step in range(steps):
        for master in masters.values():
            master.grad = torch.zeros_like(master)
        for rank in range(world_size):
            model.zero_grad()
            model(data(step, 0, rank)).backward()
            for name, p in model.named_parameters():
                masters[name].grad += p.grad.float()
        for master in masters.values():
            master.grad /= world_size
        optimizer.step()
        for name, p in model.named_parameters():
            p.data.copy_(masters[name])
    return {name: p.detach() for name, p in model.named_parameters()}


def mixed(comm: Any, bucket: int) -> list[dict[str, Tensor]]:
    """By stage: what a model of two dtypes becomes without a precision in the config."""
    finals = []
    for stage in STAGES:
        keys = config(stage, zero_optimization={"reduce_bucket_size": bucket})
        engine, _, _, _ = zero_full.initialize(model=Mixed(), config=keys)
        for step in range(3):
            engine.backward(engine(data(step, 0, comm.rank)))
            engine.step()
        finals.append({name: p.detach().clone() for name, p in engine.named_parameters()})
        engine.destroy()
    return finals


@pytest.mark.parametrize("bucket", [1, 100, 10**6])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_of_two_dtypes_keeps_and_trains_both(world_size: int, bucket: int) -> None:
    want = mixed_by_hand(world_size, 3)
    for rank in run_in("processes", mixed, world_size, bucket):
        for final in rank:
            assert [p.dtype for p in final.values()] == [FP32, FP32, BF16, BF16, FP32, FP32]
            for name, tensor in want.items():
                assert_close({name: final[name]}, {name: tensor}, 1e-6 if tensor.dtype == FP32 else 0.004)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_with_a_precision_all_layers_have_it(stage: int, precision: str) -> None:
    keys = config(stage, **{precision: {"enabled": True}})
    engine, _, _, _ = zero_full.initialize(model=Mixed(), config=keys)
    assert {p.dtype for p in engine.parameters()} == {DTYPES[precision]}


class Frozen(nn.Module):
    """Something to train, something frozen and buffers; random, so that ranks begin differently."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.trained, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(4))
        self.norm = nn.BatchNorm1d(4)  # whose statistics must be of its weight's type
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        for name, tensor in self.state_dict().items():
            numbers = torch.randn(tensor.shape, generator=generator) * 10
            tensor.copy_(numbers.abs() if "var" in name else numbers)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return (self.norm(self.frozen(self.trained(x))) + self.mean).float().square().mean()


@pytest.mark.pairwise
@pytest.mark.parametrize("buffers", [None, "fp16"])
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_follow_the_dtype_and_buffers_do_if_asked_to_or_if_a_norm_needs_it(
    stage: int, precision: str | None, buffers: str | None
) -> None:
    sections = {"fp16": {"fp16": {"enabled": True, "loss_scale": 8.0}}, "bf16": {"bf16": {"enabled": True}}}
    keys = {**(sections[precision] if precision else {}), "data_types": {"buffer_dtype": buffers}}
    engine, _, _, _ = zero_full.initialize(model=Frozen(0), config=config(stage, **keys))
    assert {p.dtype for p in engine.parameters()} == {DTYPES[precision] if precision else FP32}
    of_parameters = DTYPES[precision] if precision else FP32
    statistics = {engine.module.norm.running_mean.dtype, engine.module.norm.running_var.dtype}
    assert statistics == {DTYPES["fp16"] if buffers else of_parameters}
    assert engine.module.mean.dtype == (DTYPES["fp16"] if buffers else FP32)
    assert engine.module.count.dtype == engine.module.norm.num_batches_tracked.dtype == torch.int64
    if buffers and precision != "fp16":
        return  # torch has no batch norm of such a mixture
    before = engine.module.frozen.weight.clone()
    engine.backward(engine(torch.ones(2, 4, dtype=before.dtype)))
    engine.step()
    assert engine.was_step_applied() and torch.equal(engine.module.frozen.weight, before)


def started(comm: Any, stage: int, precision: str | None) -> dict[str, Tensor]:
    keys = {precision: {"enabled": True}} if precision else {}
    engine, _, _, _ = zero_full.initialize(model=Frozen(comm.rank), config=config(stage, **keys))
    return {name: t.clone() for name, t in engine.module_state_dict().items()}


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_rank_starts_with_the_first_ranks_values_frozen_ones_and_buffers_too(
    stage: int, precision: str | None
) -> None:
    first, second = run_in("processes", started, 2, stage, precision)
    want = Frozen(0).state_dict()
    if precision:
        stays = {"mean", "count"}
        want = {n: t.to(BF16) if t.is_floating_point() and n not in stays else t for n, t in want.items()}
    for rank in (first, second):
        assert [name for name, tensor in want.items() if not torch.equal(rank[name], tensor)] == []


def thirds(comm: Any, dtype: torch.dtype, value: float) -> list[float]:
    """The mean of the same number on three ranks, by the backend's own sum."""
    whole, out = torch.full((3,), value, dtype=dtype), torch.empty(1)
    native = Native(dist.group.WORLD)
    native.reduce_scatter(whole.clone(), out, 3)
    native.all_reduce(whole, 3)
    return [float(out), *whole.tolist()]


def test_only_what_could_overflow_is_divided_before_the_sum() -> None:
    total = float(torch.tensor(3 * 1.0078125).bfloat16())
    for reduced, *_ in POOL.run(thirds, 3, torch.bfloat16, 1.0078125):
        assert reduced == pytest.approx(total / 3, rel=1e-6)  # which no number of bf16 is as close to
    for means in POOL.run(thirds, 3, torch.float16, 60_000.0):
        assert means == pytest.approx([60_000.0] * 4, rel=2e-3)


def without_fp64(comm: Any) -> tuple[list[float | None], dict[str, Tensor]]:
    """Norms and parameters of a run on a device that has no 64-bit floats."""
    rooms = ("precision.norms", "shard.step.agreement", "shard.group.process_groups")
    with ExitStack() as patches:
        for room in rooms:
            patches.enter_context(mock.patch(f"zero_full.{room}.has_fp64", return_value=False))
        patches.enter_context(mock.patch("zero_full.precision.norms.compiled_for", return_value=False))
        outcome = train(comm, config(1, gradient_clipping=0.1))
    return outcome.norms, outcome.parameters


def test_a_device_without_fp64_trains_alone_and_refuses_company() -> None:
    [(norms, parameters)] = POOL.run(without_fp64, 1)
    plain = train(SimpleNamespace(rank=0), config(1, gradient_clipping=0.1))
    assert norms == pytest.approx(plain.norms, rel=1e-5)
    assert_close(parameters, plain.parameters)
    with pytest.raises(RankError, match="has no 64-bit floats"):
        POOL.run(without_fp64, 2)
