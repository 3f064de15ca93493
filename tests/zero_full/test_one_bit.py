"""1-bit and 0/1 Adam: the algorithm in fp64, the same bits on every rank, and every phase's bytes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worlds import run_each
from tests.zero_full.one_bit_model import Model
from tests.zero_full.one_bit_runs import Run, engine_of, one_step, values_of

STEPS = 22
TOGETHER = ("exact", "one bit", "meeting")  # kinds of steps after which all ranks have the same


def trained(comm: Any, run: Run, steps: int) -> dict[str, Any]:
    """Parameters, norms and bytes after each step."""
    engine = engine_of(run)
    found: dict[str, Any] = {"values": [], "norms": [], "sent": []}
    for step in range(steps):
        before = dict(engine.traffic())
        one_step(engine, comm.rank, step)
        found["values"].append(values_of(engine))
        found["norms"].append(engine.get_global_grad_norm())
        now = engine.traffic()
        found["sent"].append({k: now[k] - before.get(k, 0) for k in now if now[k] != before.get(k, 0)})
    by = engine.optimizer.contents.stepper.by  # type: ignore[attr-defined]
    found["an average"] = by.sent
    engine.destroy()
    return found


KINDS = ("OneBitAdam", "ZeroOneAdam")
RUNS = [
    *(Run(kind) for kind in KINDS),
    *(Run(kind, micro_batches=2, clip=0.5) for kind in KINDS),
    *(Run(kind, options={"bias_correction": False, "eps_inside_sqrt": True}) for kind in KINDS),
    *(Run(kind, options={"per_tensor_scales": False}, masked=True) for kind in KINDS),
    *(
        Run(kind, keys={"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 40}})
        for kind in KINDS
    ),
    Run("OneBitAdam", options={"freeze_step": 1}),
    Run("ZeroOneAdam", options={"local_step_clipper": 1, "local_step_scaler": 1}),
    Run("ZeroOneAdam", options={"var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 3}),
]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_step_is_the_algorithms(world: int) -> None:
    for run, ranks in zip(RUNS, run_each(trained, world, [(run, STEPS) for run in RUNS]), strict=True):
        model = Model(world, run)
        for step in range(STEPS):
            model.step(step)
            for rank, each in enumerate(ranks):
                for name, want in model.x[rank].items():
                    got = each["values"][step][f"parts.{name}"].double()
                    worst = float(((got - want).abs() / (1 + want.abs())).max())
                    assert worst < 2e-5, f"{run}, step {step} ({model.kinds[-1]}), {name}: off by {worst:.3g}"
                if each["norms"][step] is not None:
                    assert each["norms"][step] == pytest.approx(model.norms[step], rel=1e-5)
            if model.kinds[-1] in TOGETHER:
                assert_alike([each["values"][step] for each in ranks], f"{run}, step {step}")
            elif world > 1:
                with pytest.raises(AssertionError):
                    assert_alike([each["values"][step] for each in ranks], "")
        untouched = Model(1, run).x[0]["unused"].float()
        assert all(torch.equal(each["values"][-1]["parts.unused"], untouched) for each in ranks)


def assert_alike(ranks: list[dict[str, Tensor]], where: str) -> None:
    for name, want in ranks[0].items():
        for rank, each in enumerate(ranks):
            assert torch.equal(each[name], want), f"{where}: {name} differs on rank {rank}"
