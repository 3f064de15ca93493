"""A plan of 1-bit rules: each phase's state and traffic are what ranks have and send, to the byte."""

from typing import Any

import pytest
import torch

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import Net, config, data
from zero_full.checkpoint.save import SaveContents
from zero_full.comm.chunks import Chunks
from zero_full.errors import ConfigError
from zero_full.plan import plan, plan_stages
from zero_min.ledger import held

PARAMS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 3},
    "OneBitLamb": {"freeze_step": 3},
    "ZeroOneAdam": {
        **{"var_freeze_step": 7, "var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 4},
    },
}
STEPS = {  # numbered from 0; the second of a kind, because the first makes what all keep
    "OneBitAdam": {"warm-up": 1, "momentum at one bit": 5},
    "OneBitLamb": {"warm-up": 1, "momentum at one bit": 5},
    "ZeroOneAdam": {
        **{"exact gradients": 1, "gradients at one bit": 4, "local step": 12, "synchronization": 15},
    },
}
NUMEL = sum(p.numel() for p in Net().parameters())


def keys_of(kind: str, more: dict[str, Any], stage: int = 0, **params: Any) -> dict[str, Any]:
    return config(stage, optimizer={"type": kind, "params": {**PARAMS[kind], **params}}, **more)


def measured(comm: Any, keys: dict[str, Any]) -> list[dict[str, int]]:
    """What this rank keeps behind each step, and sends in it."""
    engine, *_ = zero_full.initialize(model=Net(), config=keys)
    found = []
    dtype = next(engine.module.parameters()).dtype
    for step in range(16):
        before = sum(engine.traffic().values())
        engine.backward(engine(data(step, 0, comm.rank, dtype)))
        engine.step()
        sent = sum(engine.traffic().values()) - before
        masters = held(
            [group.master.values for group in engine.optimizer.trained if group.master.is_separate]
        )
        moments = held(engine.optimizer.holdings()["optimizer"]) - masters
        saved = sum(c.values.nbytes for c in SaveContents(engine.module, engine.optimizer, False).shares())
        found.append({"moments": moments, "sent": sent, "saved": saved, "master": masters})
    engine.destroy()
    return found


@pytest.mark.pairwise
@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}], ids=str)
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(
    ("kind", "stage"), [("OneBitAdam", 0), ("OneBitLamb", 0), ("ZeroOneAdam", 0), ("ZeroOneAdam", 1)]
)
def test_each_phase_is_planned_to_the_byte(kind: str, stage: int, world: int, more: dict[str, Any]) -> None:
    keys = keys_of(kind, more, stage)
    planned = plan(Net(), keys, world, device="cpu")
    (found, *_) = POOL.run(measured, world, keys)  # the first rank serves the largest chunk
    assert [phase.name for phase in planned.phases] == list(STEPS[kind])
    for phase in planned.phases:
        step = found[STEPS[kind][phase.name]]
        told = {"moments": phase.moments, "sent": phase.sent, "saved": phase.saved}
        assert told | {"master": planned.master} == step, phase
    assert planned.moments == max(each["moments"] for each in found)
    assert planned.sent == max(each["sent"] for each in found)
    lines = planned.table().splitlines()
    first = lines.index("by kind of step; the rows above show the largest") + 1
    assert [line.strip() for line in lines[first::4]] == [phase.name for phase in planned.phases]
    assert [int(line.split()[-1].replace(",", "")) for line in lines[first + 3 :: 4]] == [
        phase.sent for phase in planned.phases
    ]
    assert planned.saved == max(each["saved"] for each in found)


def test_the_formula_of_its_memory() -> None:
    world = 4
    chunks = Chunks(
        tuple(torch.tensor([p.numel() for _, p in sorted(Net().named_parameters())]).cumsum(0)), world
    )
    low, high = chunks.range_of(0)
    one = plan(Net(), keys_of("OneBitAdam", {}), world)
    zero_one = plan(Net(), keys_of("ZeroOneAdam", {}), world)
    errors = 4 * NUMEL + 4 * (high - low)
    assert [phase.moments for phase in one.phases] == [8 * NUMEL, 8 * NUMEL + errors]
    lamb = plan(Net(), keys_of("OneBitLamb", {}), world)
    assert [phase.moments for phase in lamb.phases] == [8 * NUMEL, 12 * NUMEL + errors]
    assert lamb.master == 0  # parameters in fp32 are their own; what appears in a later phase is no master
    together, alone = 8 * NUMEL + errors, 16 * NUMEL + errors
    assert [phase.moments for phase in zero_one.phases] == [8 * NUMEL, together, alone, together]
    rare = plan(Net(), keys_of("ZeroOneAdam", {}, var_update_scaler=9, local_step_clipper=1), world)
    assert [phase.name for phase in rare.phases] == ["exact gradients", "synchronization"]


@pytest.mark.parametrize("world", [1, 4, 7])
def test_the_formula_of_stage_1(world: int) -> None:
    """A part of the variance in fp32 and the whole of its root in bf16 in the place of the whole in fp32."""
    whole, cut = (plan(Net(), keys_of("ZeroOneAdam", {}, stage), world) for stage in (0, 1))
    part = -(-NUMEL // world)
    for before, after in zip(whole.phases, cut.phases, strict=True):
        assert before.moments - after.moments == 4 * NUMEL - 4 * part - 2 * part * world
        told = 2 * part * (world - 1) if after.name == "exact gradients" else 0
        assert after.sent - before.sent == told


def test_side_by_side_are_the_stages_that_it_serves() -> None:
    for kind, stages in (("OneBitAdam", [0]), ("ZeroOneAdam", [0, 1]), ("AdamW", [0, 1, 2, 3])):
        keys = config(0, optimizer={"type": kind, "params": {}})
        assert [each.stage for each in plan_stages(Net(), keys, 2)] == stages
    with pytest.raises(ConfigError, match="no optimizer is named 'OneBitAdams'; did you mean OneBitAdam"):
        plan_stages(Net(), config(0, optimizer={"type": "OneBitAdams", "params": {}}), 2)
