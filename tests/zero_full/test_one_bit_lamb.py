"""1-bit LAMB: the algorithm in fp64, the same bits on every rank, in each phase and after a resume."""

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL, run_each
from tests.zero_full.one_bit_runs import (
    CLASSES,
    Run,
    engine_of,
    everything,
    modelled,
    one_step,
    values_of,
)
from tests.zero_full.runs import Net, config, data
from zero_full.optim import OneBitLamb, build_optimizer

STEPS = 14
LEARNED = 4  # steps, by the schedule in `one_bit_runs.py`
KIND = "OneBitLamb"


def trained(comm: Any, run: Run, steps: int) -> dict[str, Any]:
    """Parameters, coefficients and norms after each step; bytes at one bit."""
    engine = engine_of(run)
    names = {p: name for name, p in engine.module.parts.items()}
    found: dict[str, Any] = {"values": [], "coeffs": [], "norms": [], "sent": []}
    for step in range(steps):
        before = dict(engine.traffic())
        one_step(engine, comm.rank, step)
        lamb = engine.basic_optimizer
        assert isinstance(lamb, OneBitLamb)
        found["values"].append(values_of(engine))
        found["coeffs"].append({names[p]: c for p, c in lamb.lamb_coeffs.items() if p.numel()})
        found["norms"].append(engine.get_global_grad_norm())
        kinds = ("all_to_all", "all_gather")
        found["sent"].append(sum(engine.traffic().get(kind, 0) - before.get(kind, 0) for kind in kinds))
    found["an average"] = engine.optimizer.contents.stepper.by.sent  # type: ignore[attr-defined]
    engine.destroy()
    return found


RUNS = [
    Run(KIND, options={"bias_correction": False, "eps_inside_sqrt": True}),
    Run(KIND, options={"per_tensor_scales": False}, masked=True),
    Run(KIND, options={"min_coeff": 0.5, "max_coeff": 2.0, "coeff_beta": 0.5}),
    Run(KIND, options={"factor_max": 1.05, "factor_min": 0.9, "factor_threshold": 0.02, "freeze_step": 1}),
    Run(KIND, options={"factor_threshold": 0.0}),
    Run(KIND, keys={"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 40}}),
]


@pytest.mark.parametrize("world", [1, 3])
def test_every_step_is_the_algorithms(world: int) -> None:
    """Parameters and coefficients; and all ranks have the same bits of both."""
    for run, ranks in zip(RUNS, run_each(trained, world, [(run, STEPS) for run in RUNS]), strict=True):
        model = modelled(world, run)
        for step in range(STEPS):
            model.step(step)
            where = f"{run}, step {step} ({model.kinds[-1]})"
            for each in ranks:
                assert_alike(ranks[0]["values"][step], each["values"][step], where)
                assert each["coeffs"][step] == ranks[0]["coeffs"][step]
                assert each["norms"][step] in (None, pytest.approx(model.norms[step], rel=1e-5))
                if model.kinds[-1] == "one bit":
                    assert each["sent"][step] == (each["an average"] if world > 1 else 0)
            assert ranks[0]["coeffs"][step] == pytest.approx(model.coeffs, rel=1e-3), where
            for name, want in model.x[0].items():
                got = ranks[0]["values"][step][f"parts.{name}"].double()
                worst = float(((got - want).abs() / (1 + want.abs())).max())
                assert worst < 2e-5, f"{where}, {name}: off by {worst:.3g}"
        untouched = modelled(1, run).x[0]["unused"].float()
        assert all(torch.equal(each["values"][-1]["parts.unused"], untouched) for each in ranks)


def assert_alike(one: dict[str, Tensor], other: dict[str, Tensor], where: str) -> None:
    assert one.keys() == other.keys()
    for name, want in one.items():
        assert torch.equal(other[name], want), f"{where}: {name} differs"


def with_lamb(comm: Any, run: Run, is_ours: bool) -> list[dict[str, Tensor]]:
    """Parameters after each step of warm-up; or of Lamb's."""
    by = OneBitLamb if is_ours else lambda groups, **_: zero_full.Lamb(groups)
    with mock.patch.dict(CLASSES, {KIND: by}):
        engine = engine_of(run)
    found = []
    for step in range(LEARNED):
        one_step(engine, comm.rank, step)
        found.append(values_of(engine))
    engine.destroy()
    return found


PRECISIONS = ("fp32", "bf16", "bf16 masters", "fp16")


def test_while_the_variance_is_learned_it_is_lamb_bit_for_bit() -> None:
    runs = [Run(KIND, precision, micro_batches=2, clip=0.5) for precision in PRECISIONS]
    found = run_each(with_lamb, 2, [(run, is_ours) for run in runs for is_ours in (True, False)])
    for ours, lambs in zip(found[::2], found[1::2], strict=True):
        for mine, theirs in zip(ours[0], lambs[0], strict=True):
            assert_alike(mine, theirs, "warm-up")


FAR = {"fp16": 1e-3, "bf16": 0.1, "bf16 masters": 0.2}  # where a sign flips, an element differs by a scale


def test_in_16_bits_ranks_have_the_same_bits_and_stay_near_fp32() -> None:
    """How far off they are in all, as a part of the way they have gone."""
    runs = [Run(KIND, precision) for precision in FAR]
    for run, ranks in zip(runs, run_each(trained, 2, [(run, STEPS) for run in runs]), strict=True):
        model = modelled(2, run)
        start = {name: value.clone() for name, value in model.x[0].items()}
        for step in range(STEPS):
            model.step(step)
            assert_alike(ranks[0]["values"][step], ranks[1]["values"][step], f"{run}, step {step}")
        got = {name: ranks[0]["values"][-1][f"parts.{name}"].double() for name in start}
        off, way = (
            math.sqrt(sum(float((model.x[0][name] - each[name]).square().sum()) for name in start))
            for each in (got, start)
        )
        assert off < FAR[run.precision] * way, f"{run}: {off:.3g} of {way:.3g}"


def poisoned(comm: Any, run: Run, at: int | None) -> dict[str, Tensor]:
    """Everything at the end. In a step before rank 1 has a gradient that is inf, and it is tried again."""
    engine = engine_of(run)
    for step in range(8):
        if step == at:
            before = everything(engine)
            one_step(engine, comm.rank, step, poison=float("inf") if comm.rank == 1 else None)
            assert not engine.was_step_applied()
            assert_alike(before, everything(engine), f"a step that was skipped, {at}")
        one_step(engine, comm.rank, step)
        assert engine.was_step_applied()
    found = everything(engine)
    engine.destroy()
    return found


def test_with_one_scale_for_all_too_a_step_that_is_skipped_changes_nothing() -> None:
    run = Run(KIND, clip=100.0, options={"per_tensor_scales": False})
    cases = [(run, at) for at in (None, 2, LEARNED, LEARNED + 1)]  # learning, the first at one bit, later
    plain, *others = run_each(poisoned, 2, cases)
    for each in others:
        for mine, theirs in zip(each, plain, strict=True):
            assert_alike(theirs, mine, str(run))


# Going on ----------------------------------------------------------------------------------------


def stopped(comm: Any, run: Run, folder: str, at: int) -> list[dict[str, Tensor]]:
    """Everything after eight steps: never stopped, from a checkpoint, and from what a rank keeps."""
    whole, found = engine_of(run), []
    for step in range(8):
        if step == at:
            whole.save_checkpoint(f"{folder}/{run.precision}/{at}/{comm.world_size}")
            kept = whole.state_dict()
        one_step(whole, comm.rank, step)
    found.append(everything(whole))
    whole.destroy()
    for source in ("checkpoint", "own part"):
        engine = engine_of(run)
        if source == "checkpoint":
            engine.load_checkpoint(f"{folder}/{run.precision}/{at}/{comm.world_size}")
        else:
            engine.load_state_dict(kept)
        for step in range(at, 8):
            one_step(engine, comm.rank, step)
        found.append(everything(engine))
        engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_with_one_scale_for_all_each_phase_is_resumed_bit_for_bit(tmp_path: Path, world: int) -> None:
    run = Run(KIND, "bf16", options={"per_tensor_scales": False})
    cases = [(run, str(tmp_path), at) for at in (2, LEARNED, LEARNED + 2)]
    for case, ranks in zip(cases, run_each(stopped, world, cases), strict=True):
        for whole, *others in ranks:
            for each in others:
                assert_alike(whole, each, str(case))


# From a file, and what is refused ----------------------------------------------------------------

EVERYTHING: dict[str, Any] = {  # that DeepSpeed's has arguments for
    **{"lr": 0.01, "freeze_step": 3, "bias_correction": False, "betas": [0.9, 0.95], "eps": 1e-6},
    **{"eps_inside_sqrt": True, "weight_decay": 0.1, "max_coeff": 5.0, "min_coeff": 0.1, "amsgrad": False},
    **{"cuda_aware": False, "comm_backend_name": "gloo", "coeff_beta": 0.8, "factor_max": 3.0},
    **{"factor_min": 0.4, "factor_threshold": 0.2},
}


def from_file(comm: Any, path: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses on one batch, and parameters at the end."""
    engine, *_ = zero_full.initialize(model=Net(), config=path)
    losses = []
    for _ in range(30):
        loss = engine(data(0, 0, comm.rank))
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    found = engine.module_state_dict()
    engine.destroy()
    return losses, found


def test_a_run_from_a_file_with_deepspeeds_names_learns(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(0, optimizer={"type": "OneBitLamb", "params": EVERYTHING})))
    ranks = POOL.run(from_file, 2, str(path))
    assert_alike(ranks[0][1], ranks[1][1], "ranks")
    for losses, _ in ranks:
        assert losses[-1] < losses[5] < losses[0]


WRONG: dict[str, Any] = {
    **{"amsgrad": True, "cuda_aware": True, "min_coeff": 11.0, "coeff_beta": 1.0, "factor_min": 5.0},
    **{
        "factor_max": -1.0,
        "factor_threshold": -0.1,
        "freeze_step": 0,
        "betas": [0.9, 1.0],
        "max_grad_norm": 1.0,
    },
    **{"comm_backend_name": 3, "per_tensor_scales": "yes"},
}


@pytest.mark.parametrize("name", WRONG)
def test_an_option_that_cannot_be_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        build_optimizer("OneBitLamb", {name: WRONG[name]}, [{"params": [nn.Parameter(torch.ones(2))]}])
    with pytest.raises(ValueError, match=name):
        OneBitLamb([nn.Parameter(torch.ones(2))], **{name: WRONG[name]})
