"""Gradients that are inf, NaN, zero or merely huge: which step is skipped, and that it leaves no trace."""

from functools import cache
from math import isnan
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import run_each, run_in
from tests.zero_full.runs import Net, assert_same, config, data
from tests.zero_full.sixteen_bits import STAGES, Line, snapshot

SGD = {"type": "SGD", "params": {"lr": 1.0}}
WARM = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 5}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"gradient_clipping": 1.0},  # which brings the check
    "bf16": {"bf16": {"enabled": True}},
    "fp16 static": {"fp16": {"enabled": True, "loss_scale": 256.0}},
    "fp16 dynamic": {"fp16": {"enabled": True, "initial_scale_power": 10}},
}


class History(NamedTuple):
    """Of one rank, by step."""

    applied: list[bool]
    touched: list[list[str]]  # what differs after the step
    rates: list[float]
    scales: list[float]
    norms: list[float | None]
    skipped: int
    final: dict[str, Tensor]


def history(comm: Any, stage: int, keys: dict[str, Any], inputs: list[int | None]) -> History:
    """Train on the data of these steps; None: the last rank's has an inf."""
    engine, _, _, _ = zero_full.initialize(model=Net(), config=config(stage, scheduler=WARM, **keys))
    seen = History([], [], [], [], [], 0, {})
    for number in inputs:
        x = data(number or 0, 0, comm.rank, next(engine.parameters()).dtype)
        if number is None and comm.rank == comm.world_size - 1:
            x[0, 0] = float("inf")
        seen.rates.append(engine.get_lr()[0])
        seen.scales.append(engine.loss_scale())
        before = snapshot(engine)
        engine.backward(engine(x))
        engine.step()
        after = snapshot(engine)
        seen.touched.append([name for name in after if not torch.equal(after[name], before.get(name, x))])
        seen.applied.append(engine.was_step_applied())
        seen.norms.append(engine.get_global_grad_norm())
    assert engine.global_steps == len(inputs)
    seen = seen._replace(skipped=engine.skipped_steps, final=snapshot(engine))
    engine.destroy()
    return seen


@cache
def recorded(world_size: int, stage: int, precision: str) -> list[History]:
    """One history for all tests that can do with it, by rank. They may not change it."""
    inputs = [0, 1, None, 2, None, None, 3]
    return run_in("processes", history, world_size, stage, PRECISIONS[precision], inputs)


@pytest.mark.pairwise
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_inf_on_one_rank_skips_the_step_on_all_and_touches_nothing(
    world_size: int, stage: int, precision: str
) -> None:
    ranks = recorded(world_size, stage, precision)
    for seen in ranks:
        assert seen.applied == [True, True, False, True, False, False, True] and seen.skipped == 3
        assert [bool(names) for names in seen.touched] == seen.applied
        assert seen.rates[2] == seen.rates[3] and seen.rates[4] == seen.rates[5] == seen.rates[6]
        assert seen.rates[1] < seen.rates[3] < seen.rates[4]
        assert [norm is not None and norm < 100 for norm in seen.norms] == seen.applied
        assert seen.scales == ranks[0].scales
        assert_same(
            {k: v for k, v in seen.final.items() if k.startswith("parameter")},
            {k: v for k, v in ranks[0].final.items() if k.startswith("parameter")},
        )
    trace = {"fp32": [1.0] * 7, "bf16": [1.0] * 7, "fp16 static": [256.0] * 7}
    dynamic = [1024.0] * 5 + [512.0, 256.0]  # the first overflow is forgiven
    assert ranks[0].scales == trace.get(precision, dynamic)


@pytest.mark.rotates
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_with_skipped_steps_ends_where_one_without_them_ends(stage: int, precision: str) -> None:
    keys = PRECISIONS[precision]
    inputs = ([0, 1, None, 2, 3], [0, 1, 2, 3])
    with_skips, without = run_each(history, 2, [(stage, keys, each) for each in inputs])
    for rank in range(2):
        assert_same(with_skips[rank].final, without[rank].final)


def steps_of(comm: Any, stage: int, keys: dict[str, Any], rows: list[list[float]]) -> list[Any]:
    """One step for each row, which is every rank's gradient: (applied, norm, how far the weights moved)."""
    engine, _, _, _ = zero_full.initialize(model=Line(), config=config(stage, optimizer=SGD, **keys))
    found = []
    for row in rows:
        before = engine.module.weight.detach().clone()
        engine.backward(engine(torch.tensor(row)))
        engine.step()
        moved = (engine.module.weight.detach() - before).double()
        found.append((engine.was_step_applied(), engine.get_global_grad_norm(), moved.tolist()))
    engine.destroy()
    return found


def at_every_stage(world_size: int, keys: dict[str, Any], rows: list[list[float]]) -> list[Any]:
    """`steps_of` these rows, on every rank at every stage."""
    by_stage = run_each(steps_of, world_size, [(stage, keys, rows) for stage in STAGES])
    return [found for by_rank in by_stage for found in by_rank]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_of_zero_are_a_step_like_any_other(world_size: int, precision: str) -> None:
    for found in at_every_stage(world_size, PRECISIONS[precision], [[0.0] * 3]):
        assert found == [(True, 0.0, [0.0] * 3)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_nan_norm_is_reported_as_nan_and_the_next_step_is_fine(world_size: int, precision: str) -> None:
    rows = [[0.0, float("nan"), 0.0], [0.0, 0.5, 0.0]]
    for (applied, norm, moved), after in at_every_stage(world_size, PRECISIONS[precision], rows):
        assert not applied and isnan(norm) and moved == [0.0] * 3
        assert after == (True, 0.5, [0.0, -0.5, 0.0])


@pytest.mark.pairwise
@pytest.mark.parametrize("huge", [1e25, 1e37])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_huge_finite_gradients_are_no_overflow(world_size: int, precision: str, huge: float) -> None:
    keys = {**PRECISIONS[precision], "gradient_clipping": 1.0}
    for ((applied, norm, moved),) in at_every_stage(world_size, keys, [[huge, 0.0, -huge]]):
        assert applied and norm == pytest.approx(huge * 2**0.5, rel=0.01)
        assert moved == pytest.approx([-(0.5**0.5), 0.0, 0.5**0.5], rel=0.01)


def as_on_an_accelerator(comm: Any, *given: Any) -> list[Any]:
    """`steps_of`, where squares are summed by torch and nobody but the reader of the norm looks at sums."""
    norms, agreement = "zero_full.precision.norms", "zero_full.shard.step.agreement"
    with (
        mock.patch(f"{norms}.compiled_for", return_value=False),
        mock.patch(f"{norms}.leaves_overflow", return_value=True),
        mock.patch(f"{agreement}.leaves_overflow", return_value=True),
    ):
        return steps_of(comm, *given)


def test_sums_in_fp32_that_overflow_are_made_once_more_exactly() -> None:
    rows = [[1e25, 0.0, -1e25], [0.0, float("inf"), 0.0], [0.5, 0.0, 0.0]]
    cases = [(stage, {"gradient_clipping": 1.0}, rows) for stage in STAGES]
    for by_rank in run_each(as_on_an_accelerator, 2, cases):
        for huge, infinite, small in by_rank:
            assert huge[0] and huge[1] == pytest.approx(1e25 * 2**0.5)
            assert not infinite[0] and infinite[2] == [0.0] * 3
            assert small[:2] == (True, 0.5)


@pytest.mark.rotates
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_norm_is_torchs_of_the_averaged_gradients_unscaled_and_before_clipping(
    world_size: int, precision: str
) -> None:
    model = Net()
    for rank in range(world_size):
        (model(data(0, 0, rank)) / world_size).backward()
    want = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    keys = {**PRECISIONS[precision], "gradient_clipping": 0.01}
    clipped = run_each(history, world_size, [(stage, keys, [0]) for stage in STAGES])
    as_usual = [recorded(world_size, stage, precision) for stage in STAGES]
    for seen in (seen for by_rank in (*clipped, *as_usual) for seen in by_rank):
        assert seen.norms[0] == pytest.approx(want, rel=1e-6 if precision == "fp32" else 0.02)


def test_without_the_check_a_bf16_step_is_applied_nevertheless_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for stage in STAGES:
        for check in (True, False):
            section = {"enabled": True, "check_grad_overflow": check}
            keys = config(stage, optimizer=SGD, bf16=section, gradient_clipping=1.0)
            engine, _, _, _ = zero_full.initialize(model=Line(), config=keys)
            caplog.clear()
            engine.backward(engine(torch.tensor([1.0, float("nan"), 1.0])))
            engine.step()
            assert engine.was_step_applied() != check
            assert bool(engine.module.weight.isnan().any()) != check
            assert ("step skipped" if check else "step applied nevertheless") in caplog.text


@pytest.mark.parametrize("check", [True, False])
def test_with_and_without_the_check_all_ranks_do_the_same(check: bool) -> None:
    keys = {"bf16": {"enabled": True, "check_grad_overflow": check}}
    for by_rank in run_each(history, 2, [(stage, keys, [0, None]) for stage in STAGES]):
        for seen in by_rank:
            assert seen.applied == [True, not check] and seen.skipped == check
