"""Whole runs, as users write them: PyTorch's loop, accumulation, no_sync, and a run that is continued."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import zero_full
from tests.worlds import run_each, run_in
from tests.zero_full.runs import Net, assert_close, assert_same, config, data, reference, run
from tests.zero_full.stage3_runs import RELEASED
from zero_full.comm.lane import LazyLane
from zero_full.shard.step import optimizer as shard_optimizer


def pytorch_loop(comm: Any, stage: int, overlap: bool) -> dict[str, Tensor]:
    """The loop that a PyTorch user has, with one call added."""
    model = Net()
    zero = {"stage": stage, "reduce_bucket_size": 100, "overlap_comm": overlap}
    model, optimizer, _, _ = zero_full.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
        config={"train_micro_batch_size_per_gpu": 5, "gradient_clipping": 0, "zero_optimization": zero},
    )
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(data(step, 0, comm.rank))
        loss.backward()
        optimizer.step()
        scheduler.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.pairwise
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_pytorch_loop_needs_one_call_more(world_size: int, stage: int, overlap: bool) -> None:
    for parameters in run_in("processes", pytorch_loop, world_size, stage, overlap):
        assert_close(parameters, reference(world_size))


def read_right_after_steps(comm: Any, stage: int) -> list[dict[str, Tensor]]:
    """Collectives run when somebody waits for them, at the latest possible moment: what does a reader find?

    In views from before the steps, which no hook sees; in a copy of the module; in its plain state dict.
    """
    keys = config(stage, zero_optimization={"overlap_comm": True})
    with mock.patch.object(shard_optimizer, "lane_for", lambda device, overlap: LazyLane()):
        engine, *_ = zero_full.initialize(model=Net(), config=keys)
    views = {name: p.detach() for name, p in engine.module.named_parameters()}
    for step in range(4):
        engine.backward(engine(data(step, 0, comm.rank)))
        engine.step()
    found = {name: view.clone() for name, view in views.items()}
    copied = {name: p.detach() for name, p in copy.deepcopy(engine.module).named_parameters()}
    saved = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy()
    return [found, copied, saved]


def test_weights_are_whole_and_new_for_whoever_reads_them_right_after_a_step() -> None:
    for of_stage in run_each(read_right_after_steps, 2, [(stage,) for stage in (0, 1, 2, 3)]):
        for readers in of_stage:
            for parameters in readers:
                assert_close(parameters, reference(2))


def plain_accumulation(comm: Any, stage: int) -> dict[str, Tensor]:
    """PyTorch's accumulation: the user divides, and steps when he likes. The config knows nothing of it."""
    model, optimizer, _, _ = zero_full.initialize(model=Net(), config=config(stage))
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(3):
            (model(data(step, micro, comm.rank)) / 3).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_plain_accumulation_adds_up_even_if_the_config_does_not_know_of_it(stage: int) -> None:
    for parameters in run_in("processes", plain_accumulation, 2, stage):
        assert_close(parameters, reference(2, micro_batches=3))


def without_sync(comm: Any, stage: int) -> tuple[dict[str, Tensor], int]:
    """Two micro-batches stay at home, the third sends everything."""
    model, optimizer, _, _ = zero_full.initialize(model=Net(), config=config(stage))
    for step in range(4):
        optimizer.zero_grad()
        model.optimizer.communicators.traffic.clear()
        with model.no_sync():
            for micro in range(2):
                (model(data(step, micro, comm.rank)) / 3).backward()
            assert not model.traffic()
        (model(data(step, 2, comm.rank)) / 3).backward()
        optimizer.step()
    sent = sum(model.traffic().values())
    return {name: p.detach().clone() for name, p in model.named_parameters()}, sent


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_no_sync_keeps_gradients_at_home_at_every_stage(stage: int) -> None:
    outcomes = run_in("processes", without_sync, 2, stage)
    for parameters, sent in outcomes:
        assert_close(parameters, reference(2, micro_batches=3))
        assert sent == outcomes[0][1]
    buckets = [(39 + 3, 13 * 13 + 13), (13 * 16 + 13,)]
    assert outcomes[0][1] >= 4 * sum(map(sum, buckets))  # 2 (N-1)/N of the parameters, and padding


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_accumulation_is_the_configs(world_size: int, stage: int) -> None:
    for outcome in run(world_size, config(stage, gradient_accumulation_steps=3)):
        assert_close(outcome.parameters, reference(world_size, micro_batches=3))


def halfway(comm: Any, stage: int, keys: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A run of six steps, and one that is saved after three and continued in a new engine."""
    finals = []
    saved: Any = None
    for start, stop, source in ((0, 6, None), (0, 3, None), (3, 6, "saved")):
        engine, _, _, _ = zero_full.initialize(model=Net(), config=config(stage, **keys))
        if source is not None:
            engine.load_state_dict(saved)
            assert engine.global_steps == 3
        for step in range(start, stop):
            for micro in range(engine.gradient_accumulation_steps()):
                engine.backward(engine(data(step, micro, comm.rank, next(engine.parameters()).dtype)))
                engine.step()
        if stop == 3:
            saved = engine.state_dict()
        finals.append({name: p.detach().clone() for name, p in engine.named_parameters()})
        engine.destroy()
    return finals[0], finals[2]


WARM = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 5}}


@pytest.mark.pairwise
@pytest.mark.parametrize("keys", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_saved_run_continues_bit_for_bit(world_size: int, stage: int, keys: dict[str, Any]) -> None:
    more = {**keys, "scheduler": WARM, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    for whole, continued in run_in("processes", halfway, world_size, stage, more):
        assert_same(continued, whole)


def evaluated_first(comm: Any, stage: int, what: str) -> None:
    """Before each step something happens in inference mode: torch lets no other code write to its tensors."""
    zero = RELEASED if stage == 3 else {}
    engine, _, _, _ = zero_full.initialize(model=Net(), config=config(stage, zero_optimization=zero))
    for step in range(2):
        with torch.inference_mode():
            if what == "forward":
                engine(data(9, 0, comm.rank))
            elif what == "gathered":
                with zero_full.GatheredParameters(list(engine.module.parameters())):
                    assert all(bool(param.isfinite().all()) for param in engine.module.parameters())
            elif what == "values":
                zero_full.safe_get_full_fp32_param(engine.module.layers[2].weight)
            else:
                engine.load_state_dict(engine.state_dict())
        engine.backward(engine(data(step, 0, comm.rank)))
        engine.step()
    engine.destroy()


def test_training_goes_on_after_a_first_evaluation_in_inference_mode() -> None:
    ways = ("forward", "gathered", "values", "state")
    run_each(evaluated_first, 2, [(stage, what) for stage in (1, 3) for what in ways])
