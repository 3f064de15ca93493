"""1-bit and 0/1 Adam, and 1-bit LAMB: the algorithm in fp64, the same bits on every rank, and the bytes."""

import logging
import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worlds import run_each
from tests.zero_full.one_bit_runs import (
    NAMES,
    SHAPES,
    Run,
    engine_of,
    everything,
    modelled,
    one_step,
    values_of,
)
from zero_full.comm.chunks import Chunks
from zero_full.optim import Lamb

STEPS = 22
# A step of each kind, numbered from 0, by the schedules in `one_bit_runs.py`.
PHASES = {
    "OneBitAdam": {"learning": 2, "first at one bit": 4, "at one bit": 9},
    "OneBitLamb": {"learning": 2, "first at one bit": 4, "at one bit": 9},
    "ZeroOneAdam": {"exact": 3, "at one bit": 4, "alone": 9, "meeting": 11, "first meeting": 7, "silent": 12},
}
TOGETHER = ("exact", "one bit", "meeting")  # kinds of steps after which all ranks have the same


def trained(comm: Any, run: Run, steps: int) -> dict[str, Any]:
    """Parameters, norms and bytes after each step, and LAMB's coefficients."""
    engine = engine_of(run)
    names = {p: name for name, p in engine.module.parts.items()}
    found: dict[str, Any] = {"values": [], "coeffs": [], "norms": [], "sent": []}
    for step in range(steps):
        before = dict(engine.traffic())
        one_step(engine, comm.rank, step)
        found["values"].append(values_of(engine))
        coeffs = getattr(engine.basic_optimizer, "lamb_coeffs", {})
        found["coeffs"].append({names[p]: coeff for p, coeff in coeffs.items() if p.numel()})
        found["norms"].append(engine.get_global_grad_norm())
        now = engine.traffic()
        found["sent"].append({k: now[k] - before.get(k, 0) for k in now if now[k] != before.get(k, 0)})
    found["an average"] = engine.optimizer.contents.stepper.all_reduce.sent  # type: ignore[attr-defined]
    found["padded"] = sum(bucket.layout.total for bucket in engine.optimizer.awake)
    engine.destroy()
    return found


KINDS, LAMB = ("OneBitAdam", "ZeroOneAdam"), "OneBitLamb"
RUNS = [
    *(Run(kind, options={"bias_correction": False, "eps_inside_sqrt": True}) for kind in KINDS),
    *(Run(kind, options={"per_tensor_scales": False}, masked=True) for kind in KINDS),
    *(
        Run(kind, keys={"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 40}})
        for kind in KINDS
    ),
    *(
        Run("ZeroOneAdam", stage=1, options={"bias_correction": c, "eps_inside_sqrt": not c})
        for c in (True, False)
    ),
    Run("ZeroOneAdam", stage=1, micro_batches=2, clip=0.5, masked=True),
    Run("OneBitAdam", options={"freeze_step": 1}),
    Run("ZeroOneAdam", options={"local_step_clipper": 1, "local_step_scaler": 1}),
    Run("ZeroOneAdam", options={"var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 3}),
    Run(LAMB, options={"bias_correction": False, "eps_inside_sqrt": True}),
    Run(LAMB, options={"per_tensor_scales": False}, masked=True),
    Run(LAMB, options={"min_coeff": 0.5, "max_coeff": 2.0, "coeff_beta": 0.5}),
    Run(LAMB, options={"factor_max": 1.05, "factor_min": 0.9, "factor_threshold": 0.02, "freeze_step": 1}),
    Run(LAMB, options={"factor_threshold": 0.0}),
    Run(LAMB, keys={"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 40}}),
]


@pytest.mark.rotates
@pytest.mark.parametrize("world", [1, 3])
def test_every_step_is_the_algorithms(world: int) -> None:
    for run, ranks in zip(RUNS, run_each(trained, world, [(run, STEPS) for run in RUNS]), strict=True):
        model = modelled(world, run)
        for step in range(STEPS):
            model.step(step)
            for rank, each in enumerate(ranks):
                for name, want in model.x[rank].items():
                    got = each["values"][step][f"parts.{name}"].double()
                    worst = float(((got - want).abs() / (1 + want.abs())).max())
                    near = 2e-3 if run.stage else 2e-5  # a root that is rounded up here, and down there
                    assert worst < near, f"{run}, step {step} ({model.kinds[-1]}), {name}: off by {worst:.3g}"
                assert each["norms"][step] in (None, pytest.approx(model.norms[step], rel=1e-5))
                assert each["coeffs"][step] == ranks[0]["coeffs"][step]
                if model.kinds[-1] == "one bit":
                    sent = sum(each["sent"][step].get(kind, 0) for kind in ("all_to_all", "all_gather"))
                    assert sent == (each["an average"] if world > 1 else 0)
            if run.kind == LAMB:
                coeffs = pytest.approx(model.coeffs, rel=1e-3)  # type: ignore[attr-defined]
                assert ranks[0]["coeffs"][step] == coeffs, f"{run}, step {step}"
            if model.kinds[-1] in TOGETHER:
                assert_alike([each["values"][step] for each in ranks], f"{run}, step {step}")
            elif world > 1:
                with pytest.raises(AssertionError):
                    assert_alike([each["values"][step] for each in ranks], "")
        untouched = modelled(1, run).x[0]["unused"].float()
        assert all(torch.equal(each["values"][-1]["parts.unused"], untouched) for each in ranks)


def assert_alike(ranks: list[dict[str, Tensor]], where: str) -> None:
    for name, want in ranks[0].items():
        for rank, each in enumerate(ranks):
            assert torch.equal(each[name], want), f"{where}: {name} differs on rank {rank}"


def _mean_size(tensors: list[Tensor]) -> float:
    return float(torch.cat([tensor.reshape(-1) for tensor in tensors]).abs().mean())


# Precisions, bytes and what is not finite --------------------------------------------------------

PRECISE = [
    Run(kind, precision, stage=stage)
    for kind, stage in (("OneBitAdam", 0), ("ZeroOneAdam", 0), ("ZeroOneAdam", 1))
    for precision in ("bf16", "bf16 masters", "fp16")
]


@pytest.mark.rotates
def test_in_16_bits_ranks_have_the_same_bits_after_every_meeting_and_stay_near_fp32() -> None:
    for run, ranks in zip(PRECISE, run_each(trained, 2, [(run, STEPS) for run in PRECISE]), strict=True):
        model = modelled(2, run)
        for step in range(STEPS):
            model.step(step)
            if model.kinds[-1] in TOGETHER:
                assert_alike([each["values"][step] for each in ranks], f"{run}, step {step}")
        near = 0.02 if run.precision == "bf16 masters" else 0.005  # some signs are other ones
        off = [ranks[0]["values"][-1][f"parts.{name}"].double() - want for name, want in model.x[0].items()]
        moved = [want - modelled(1, run).x[0][name] for name, want in model.x[0].items()]
        assert _mean_size(off) < near < 0.2 * _mean_size(moved), f"{run}: off by {_mean_size(off):.3g}"


def with_plain(comm: Any, run: Run, is_ours: bool) -> list[dict[str, Tensor]]:
    """Parameters after each of four steps of warm-up; or of the plain optimizer's."""
    plain = torch.optim.AdamW if run.kind == "OneBitAdam" else Lamb
    engine = engine_of(run, by=None if is_ours else plain)
    found = []
    for step in range(4):
        one_step(engine, comm.rank, step)
        found.append(values_of(engine))
    engine.destroy()
    return found


@pytest.mark.rotates
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 masters", "fp16"])
def test_while_the_variance_is_learned_they_are_adam_and_lamb_bit_for_bit(precision: str) -> None:
    runs = [Run(kind, precision, micro_batches=2, clip=0.5) for kind in ("OneBitAdam", LAMB)]
    runs.append(Run("OneBitAdam", precision))
    found = run_each(with_plain, 2, [(run, is_ours) for run in runs for is_ours in (True, False)])
    for ours, plains in zip(found[::2], found[1::2], strict=True):
        for mine, theirs in zip(ours[0], plains[0], strict=True):
            assert_alike([mine, theirs], precision)


@pytest.mark.rotates
def test_each_kind_of_step_sends_what_the_formula_says() -> None:
    world = 3
    flat_scale, shared = {"per_tensor_scales": False}, Run("ZeroOneAdam", stage=1)
    for run in (Run("ZeroOneAdam"), Run("OneBitAdam"), Run("ZeroOneAdam", options=flat_scale), shared):
        (ranks,) = run_each(trained, world, [(run, STEPS)])
        model = modelled(world, run)
        flat = run.options.get("per_tensor_scales") is False
        ends = list(accumulate(math.prod(SHAPES[name]) for name in NAMES))
        sent = Chunks((ends[-1],) if flat else tuple(ends), world).sent
        for step in range(STEPS):
            model.step(step)
            for each in ranks:
                traffic = dict(each["sent"][step])
                told = traffic.pop("sum_numbers", 0)  # norm, and which parameters are in use: in every step
                assert told < 1000 and each["an average"] == sent
                roots = (
                    2 * -(-ends[-1] // world) * (world - 1) if run.stage and model.kinds[-1] == "exact" else 0
                )
                at_one_bit = traffic.pop("all_to_all", 0) + traffic.pop("all_gather", 0) - roots
                assert at_one_bit == (sent if model.kinds[-1] in ("one bit", "meeting") else 0)
                if model.kinds[-1] == "exact":
                    padded = each["padded"]  # elements of all buckets
                    assert sum(traffic.values()) == 2 * (world - 1) * (4 * padded // world)
                else:
                    assert not traffic or set(traffic) == {"gather_objects"}, traffic


def too_large(comm: Any) -> tuple[list[bool], bool, list[str]]:
    """Gradients that are finite, and what one bit says of them is not."""
    engine = engine_of(Run("ZeroOneAdam"))
    stepper, applied, records = engine.optimizer.contents.stepper, [], list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero_full").addHandler(handler)
    before: dict[str, Tensor] = {}
    for step in range(6):
        if step == 4:
            assert not stepper.averages
            if comm.rank == 1:
                stepper.errors.worker.fill_(3e38)  # type: ignore[attr-defined]
            before = everything(engine)
        one_step(engine, comm.rank, step, poison=3e38 if step == 4 and comm.rank == 1 else None)
        applied.append(engine.was_step_applied())
        if step == 4:
            assert_alike([before, everything(engine)], "an average that was not finite")
    logging.getLogger("zero_full").removeHandler(handler)
    engine.destroy()
    return applied, stepper.averages, records


def test_an_average_that_is_not_finite_is_an_overflow() -> None:
    for rank, (applied, _, said) in enumerate(run_each(too_large, 2, [()])[0]):
        assert applied == [True] * 4 + [False, True]
        assert any("step skipped: compressed average of gradients" in each for each in said) == (rank == 0)
