"""1-bit LAMB in 16 bits, with steps that are skipped, and from a file with DeepSpeed's names."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL, run_each
from tests.zero_full.one_bit_runs import (
    Run,
    engine_of,
    everything,
    modelled,
    one_step,
)
from tests.zero_full.runs import Net, config, data
from tests.zero_full.test_one_bit import assert_alike, trained
from zero_full.optim import OneBitLamb, build_optimizer

STEPS = 14
LEARNED = 4  # steps, by the schedule in `one_bit_runs.py`
KIND = "OneBitLamb"


FAR = {"fp16": 1e-3, "bf16": 0.1, "bf16 masters": 0.2}  # where a sign flips, an element differs by a scale


def test_in_16_bits_ranks_have_the_same_bits_and_stay_near_fp32() -> None:
    """How far off they are in all, as a part of the way they have gone."""
    runs = [Run(KIND, precision) for precision in FAR]
    for run, ranks in zip(runs, run_each(trained, 2, [(run, STEPS) for run in runs]), strict=True):
        model = modelled(2, run)
        start = {name: value.clone() for name, value in model.x[0].items()}
        for step in range(STEPS):
            model.step(step)
            assert_alike([each["values"][step] for each in ranks], f"{run}, step {step}")
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
            assert_alike([before, everything(engine)], f"a step that was skipped, {at}")
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
            assert_alike([theirs, mine], str(run))


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
    assert_alike([ranks[0][1], ranks[1][1]], "ranks")
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
