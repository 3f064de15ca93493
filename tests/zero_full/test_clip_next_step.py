"""Clipping that a loop chooses in each step: `clip_next_step`, and the norm before a step."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_full
from tests.slow_copies import slow_copies
from tests.worlds import run_each
from tests.zero_full.runs import Net, config, data

CLIPS = (0.05, None, 0.02, 0.0, 1e6)  # by step; None: the loop says nothing


def trained(
    rank: int, ranks: int, stage: int, usual: float, fp16: bool
) -> tuple[list[float], list[float], float]:
    """The norms before steps, those of the steps, and the sum of the weights."""
    scale = {"fp16": {"enabled": True, "initial_scale_power": 3}} if fp16 else {}
    keys = config(stage, **scale) | {"gradient_clipping": usual}
    keys["optimizer"] = {"type": "SGD", "params": {"lr": 1.0}}
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=keys)
    before, after = [], []
    for step, clip in enumerate(CLIPS):
        engine.backward(engine(data(step, 0, rank, next(engine.parameters()).dtype)))
        if clip is not None:
            optimizer.clip_next_step(clip)
        before.append(optimizer.grad_norm())
        optimizer.step()
        after.append(optimizer.last.grad_norm)  # type: ignore[union-attr]
        optimizer.zero_grad()
    total = float(sum(value.double().sum() for value in engine.module_state_dict().values()))
    engine.destroy()
    return before, after, total


def plain(ranks: int, usual: float) -> tuple[list[float], float]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    norms = []
    for step, clip in enumerate(CLIPS):
        for rank in range(ranks):
            (model(data(step, 0, rank, torch.float32)) / ranks).backward()
        limit = usual if clip is None else clip
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit or 1e9)
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms, float(sum(value.double().sum() for value in model.state_dict().values()))


def case(comm: Any, stage: int, usual: float, fp16: bool) -> Any:
    return trained(comm.rank, comm.world_size, stage, usual, fp16)


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_step_is_clipped_as_the_loop_says_and_others_as_configured(ranks: int) -> None:
    cases = [(stage, usual, fp16) for stage in (0, 2, 3) for usual in (0.0, 0.1) for fp16 in (False, True)]
    for (stage, usual, fp16), by_rank in zip(cases, run_each(case, ranks, cases), strict=True):
        wanted, total = plain(ranks, usual)
        for before, after, got in by_rank:
            close = 2e-2 if fp16 else 1e-5
            assert before == pytest.approx(wanted, rel=close)
            clipped = [
                norm for norm, clip in zip(after, CLIPS, strict=True) if clip or (clip is None and usual)
            ]
            assert clipped == pytest.approx(
                [norm for norm, clip in zip(wanted, CLIPS, strict=True) if clip or (clip is None and usual)],
                rel=close,
            )
            assert got == pytest.approx(total, rel=close), (stage, usual, fp16)


def differing(comm: Any) -> str:
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=config(2))
    engine.backward(engine(data(0, 0, comm.rank, torch.float32)))
    optimizer.clip_next_step(1.0 + comm.rank)
    with pytest.raises(zero_full.DisagreementError) as error:
        optimizer.step()
    optimizer.zero_grad()
    engine.destroy()
    return str(error.value)


def test_ranks_that_would_clip_differently_raise() -> None:
    for told in run_each(differing, 2, [()])[0]:
        assert "gradient clipping: 1.0 (rank 0), 2.0 (rank 1)" in told


@pytest.mark.parametrize("plain_loop", [False, True])
def test_cleared_gradients_take_the_norm_with_them_on_one_rank_too(plain_loop: bool) -> None:
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=config(1))
    for step in range(2):
        loss = engine(data(step, 0, 0))
        loss.backward() if plain_loop else engine.backward(loss)
        if step == 0:
            optimizer.clip_next_step(0.01)
            engine.module.zero_grad()
    optimizer.step()
    assert optimizer.last is not None and optimizer.last.clip == 0.0
    optimizer.zero_grad()
    engine.backward(engine(data(2, 0, 0)))
    engine.module.zero_grad()
    optimizer.step()
    assert optimizer.last is None and engine.global_steps == 1  # as with several ranks, no step
    engine.destroy()


def test_a_norm_that_is_none_is_refused() -> None:
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=config(2))
    assert optimizer.grad_norm() == 0.0
    with pytest.raises(ValueError, match="max_norm must be a finite norm"):
        optimizer.clip_next_step(-1.0)
    engine.destroy()


def test_a_clipped_step_with_inf_is_skipped_also_in_fp32() -> None:
    keys = config(2) | {"gradient_clipping": 0.0}
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=keys)
    inputs = data(0, 0, 0, torch.float32)
    inputs[0, 0] = float("inf")
    engine.backward(engine(inputs))
    optimizer.clip_next_step(1.0)
    optimizer.step()
    assert optimizer.last is not None and not optimizer.last.applied
    engine.destroy()


def norms_inside_a_step(comm: Any, stage: int) -> tuple[list[float], int]:
    engine, optimizer, _, _ = zero_full.initialize(
        model=Net(), config=config(stage, gradient_accumulation_steps=2)
    )
    hooked = list[int]()
    optimizer.register_step_pre_hook(lambda *_: hooked.append(1))
    norms = []
    for micro in range(2):
        engine.backward(engine(data(0, micro, comm.rank)))
        norms.append(optimizer.grad_norm())
        engine.step()
    norms.append(optimizer.last.grad_norm or 0.0)  # type: ignore[union-attr]
    engine.destroy()
    return norms, len(hooked)


def test_the_norm_between_micro_batches_is_that_of_the_gradients_so_far_and_runs_no_hook_of_steps() -> None:
    model, wanted = Net(), []
    for micro in range(2):
        for rank in range(2):
            (model(data(0, micro, rank)) / 4).backward()
        norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
        wanted.append(float(norms.norm()))
    for by_rank in run_each(norms_inside_a_step, 2, [(stage,) for stage in (0, 1, 2, 3)]):
        for norms, hooked in by_rank:
            assert norms[:2] == pytest.approx(wanted, rel=1e-5) and hooked == 1


def test_the_norm_may_be_asked_while_a_loop_listens_to_signals(tmp_path: Path) -> None:
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=config(2))
    engine.on_signal(tmp_path)
    engine.backward(engine(data(0, 0, 0)))
    assert optimizer.grad_norm() > 0
    engine.step()
    engine.destroy()


def test_steps_on_the_host_are_clipped_as_the_loop_says() -> None:
    sums = []
    for section in ({}, {"offload_optimizer": {"device": "cpu"}}):
        with slow_copies(1e7) if section else nullcontext():
            engine, optimizer, _, _ = zero_full.initialize(
                model=Net(), config=config(2, zero_optimization=section)
            )
            for step in range(4):
                engine.backward(engine(data(step, 0, 0)))
                optimizer.clip_next_step(0.02 if step % 2 else 0.0)
                engine.step()
                clipped = engine.metrics()["clipped_norm"]
                assert (clipped == pytest.approx(0.02, rel=1e-3)) if step % 2 else (clipped is None)
            sums.append(float(sum(v.double().sum() for v in engine.module_state_dict().values())))
            engine.destroy()
    assert sums[0] == pytest.approx(sums[1], rel=1e-6)
