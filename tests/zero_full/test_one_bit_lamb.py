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
from tests.zero_full.one_bit_model import NAMES, By, Model
from tests.zero_full.one_bit_runs import CLASSES, Run, engine_of, everything, one_step, values_of
from tests.zero_full.runs import Net, config, data
from zero_full.optim import OneBitLamb, build_optimizer

STEPS = 14
LEARNED = 4  # steps, by the schedule in `one_bit_runs.py`
KIND = "OneBitLamb"


class LambModel(Model):
    """All ranks."""

    def __init__(self, world: int, run: Run) -> None:
        super().__init__(world, run)
        defaults = {"min_coeff": 0.01, "max_coeff": 10.0, "coeff_beta": 0.9}
        factors = {"factor_max": 4.0, "factor_min": 0.5, "factor_threshold": 0.1}
        self.o = {"bias_correction": True, "eps_inside_sqrt": False, **defaults, **factors, **self.o}
        self.fresh, self.sizes = dict[str, Tensor](), dict[str, float]()
        self.learned: dict[str, tuple[float, float]] = {}
        self.last = dict.fromkeys(NAMES, 1.0)
        self.coeffs: dict[str, float] = {}

    def root(self, v: Tensor, name: str) -> Tensor:
        eps = self.group(name)["eps"]
        return (v + eps).sqrt() if self.o["eps_inside_sqrt"] else v.sqrt() + eps

    def go(self, name: str, coeff: float) -> None:
        (b1, b2), lr = self.group(name)["betas"], self.group(name)["lr"]
        if self.o["bias_correction"]:
            lr *= math.sqrt(1 - b2 ** self.k[name]) / (1 - b1 ** self.n[name])
        self.coeffs[name] = coeff
        for x, m in zip(self.x, self.m, strict=True):
            x[name] = x[name] - lr * coeff * self.update(name, x, m)

    def update(self, name: str, x: By, m: By) -> Tensor:
        return m[name] / self.root(self.v[name], name) + self.group(name)["weight_decay"] * x[name]

    def step(self, step: int) -> None:
        """The next one, with the gradients of this number."""
        self.t += 1
        self.coeffs = {}
        if self.t <= self.o["freeze_step"]:
            self.kinds.append("exact")
            self.learn(step)
        else:
            self.kinds.append("one bit")
            self.at_one_bit(step)

    def learn(self, step: int) -> None:
        for name, g in self.averaged(step).items():
            self.n[name] += 1
            self.k[name] += 1
            b1, b2 = self.group(name)["betas"]
            self.v[name] = b2 * self.v[name] + (1 - b2) * g * g
            for m in self.m:
                m[name] = b1 * m[name] + (1 - b1) * g
            weight, change = self.x[0][name].norm(), self.update(name, self.x[0], self.m[0]).norm()
            coeff = 1.0
            if weight > 0 and change > 0:
                coeff = min(max(float(weight / change), self.o["min_coeff"]), self.o["max_coeff"])
                total, count = self.learned.get(name, (0.0, 0.0))
                beta = self.o["coeff_beta"]
                self.learned[name] = beta * total + (1 - beta) * coeff, beta * count + 1 - beta
            self.go(name, coeff)

    def at_one_bit(self, step: int) -> None:
        if not self.fresh:
            self.fresh = {name: self.v[name].clone() for name in self.known()}
            rms = {name: float(self.m[0][name].square().mean().sqrt()) for name in self.known()}
            usual = sum(rms.values()) / len(rms)
            self.sizes = {name: usual / rms[name] if self.flat else 1.0 for name in rms}
        wanted = self.remembered(step)
        mean = self.c([{n: w[n] * self.sizes.get(n, 1.0) for n in NAMES} for w in wanted])
        for name in self.known():
            self.n[name] += 1
            b1, b2 = self.group(name)["betas"]
            new = mean[name] / self.sizes[name] * (self.v[name] > 0)
            g = (new - b1 * self.m[0][name]) / (1 - b1)
            self.fresh[name] = b2 * self.fresh[name] + (1 - b2) * g * g
            for m in self.m:
                m[name] = new
            self.go(name, self.coefficient(name))

    def coefficient(self, name: str) -> float:
        fresh, b2 = self.fresh[name], self.group(name)["betas"][1]
        if self.o["bias_correction"]:
            fresh = fresh * (1 - b2 ** self.k[name]) / (1 - b2 ** self.n[name])
        moves = self.v[name] > 0
        factor = (
            float((self.root(self.v[name], name) / self.root(fresh, name))[moves].max())
            if moves.any()
            else 1.0
        )
        along = float((self.m[0][name] / self.root(self.v[name], name)).norm())
        whole = float(self.update(name, self.x[0], self.m[0]).norm())
        if self.group(name)["weight_decay"] and whole:
            part = min(1.0, along / whole)
            factor = factor * part + 1 - part
        factor = min(max(factor, self.o["factor_min"]), self.o["factor_max"])
        change, last = self.o["factor_threshold"], self.last[name]
        self.last[name] = min(max(factor, last * (1 - change)), last * (1 + change))
        total, count = self.learned.get(name, (1.0, 1.0))
        return total / count * self.last[name]


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
    Run(KIND),
    Run(KIND, micro_batches=2, clip=0.5),
    Run(KIND, options={"bias_correction": False, "eps_inside_sqrt": True}),
    Run(KIND, options={"per_tensor_scales": False}, masked=True),
    Run(KIND, options={"min_coeff": 0.5, "max_coeff": 2.0, "coeff_beta": 0.5}),
    Run(KIND, options={"factor_max": 1.05, "factor_min": 0.9, "factor_threshold": 0.02, "freeze_step": 1}),
    Run(KIND, options={"factor_threshold": 0.0}),
    Run(KIND, keys={"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 40}}),
]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_step_is_the_algorithms(world: int) -> None:
    """Parameters and coefficients; and all ranks have the same bits of both."""
    for run, ranks in zip(RUNS, run_each(trained, world, [(run, STEPS) for run in RUNS]), strict=True):
        model = LambModel(world, run)
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
        untouched = LambModel(1, run).x[0]["unused"].float()
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
        model = LambModel(2, run)
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


def test_what_is_not_finite_on_one_rank_skips_the_step_and_changes_nothing() -> None:
    for run in (Run(KIND, clip=100.0), Run(KIND, clip=100.0, options={"per_tensor_scales": False})):
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
