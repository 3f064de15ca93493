"""A frozen parameter is to be trained, or a trained one frozen, under 1-bit and 0/1 Adam, and what helps."""

from pathlib import Path
from typing import Any

import pytest
import torch

import zero_full
from tests.worlds import run_each
from tests.zero_full.one_bit_runs import SCHEDULES, Run, engine_of, everything, numbers, one_step, values_of
from tests.zero_full.runs import said_by
from tests.zero_full.test_one_bit import assert_alike

NAME = "parts.frozen"
# An optimizer, a stage, after how many steps, and what the remedy asks a load for.
LATE = [
    ("OneBitAdam", 0, 6, "load_optimizer_states=False"),
    ("OneBitLamb", 0, 6, "load_optimizer_states=False"),
    ("ZeroOneAdam", 0, 9, "load_optimizer_states=False"),
    ("ZeroOneAdam", 1, 9, "load_optimizer_states=False"),
    ("ZeroOneAdam", 0, 6, "drop_errors=True"),
    ("ZeroOneAdam", 1, 1, "drop_errors=True"),
    ("ZeroOneAdam", 1, 6, "drop_errors=True"),
]


def with_frozen(engine: zero_full.Engine, rank: int, step: int) -> None:
    """A step with a gradient of what was frozen."""
    frozen = engine.module.parts["frozen"]
    own = torch.randn(frozen.shape, generator=torch.Generator().manual_seed(100 * step + rank))
    engine.backward(engine(numbers(step, 0, rank)) + (frozen * own).sum())
    engine.step()


def refused(comm: Any, kind: str, stage: int, at: int, remedy: str, folder: Path) -> dict[str, Any]:
    """What is said, twice; what has changed; how the run goes on; and how one does that the remedy begins."""
    engine, other = (engine_of(Run(kind, stage=stage)) for _ in range(2))
    for step in range(at):
        one_step(engine, comm.rank, step)
        one_step(other, comm.rank, step)
    engine.save_checkpoint(folder / f"{kind} {stage} {at}")
    frozen, before = engine.module.parts["frozen"], everything(engine)
    said = []
    for step in range(at, at + 2):
        frozen.requires_grad_(True)
        said.append(said_by(lambda step=step: with_frozen(engine, comm.rank, step)))
        frozen.requires_grad_(False)
        engine.optimizer.zero_grad()
        assert_alike([before, everything(engine)], "a refusal")
        for each in (engine, other):
            one_step(each, comm.rank, step)
        before = everything(engine)
        assert_alike([before, everything(other)], "who has tried and who has not")
    key, _, value = remedy.partition("=")
    later = {"var_freeze_step": 12} if key == "drop_errors" else {}
    new = engine_of(Run(kind, stage=stage, trains_all=True, options=later))
    new.load_checkpoint(folder / f"{kind} {stage} {at}", **{key: value == "True"})
    start = new.module.parts["frozen"].detach().clone()
    for step in range(at, at + sum(SCHEDULES[kind].values())):
        with_frozen(new, comm.rank, step)
    new.optimizer.meet()
    moved = (new.module.parts["frozen"].detach() - start).abs().max()
    found = {"said": said, "moved": float(moved), "values": values_of(new)}
    for each in (engine, other, new):
        each.destroy()
    return found


@pytest.mark.rotates
def test_who_thaws_too_late_loses_nothing_and_the_remedy_works(tmp_path: Path) -> None:
    cases = [(*case, tmp_path) for case in LATE]
    for (kind, stage, at, remedy, _), ranks in zip(cases, run_each(refused, 2, cases), strict=True):
        for found in ranks:
            assert all(f"{NAME} was frozen until now, and" in said for said in found["said"]), at
            assert remedy in found["said"][0], (kind, stage, at)
            assert 0 < found["moved"] < 1, (kind, stage, at)
            assert_alike([ranks[0]["values"], found["values"]], "ranks after the remedy")


def without_frozen(comm: Any, kind: str, at: int, folder: Path) -> bool:
    """A trained parameter is to be frozen: whether it stays what it is when one does what the error says."""
    engine = engine_of(Run(kind, trains_all=True))
    for step in range(at):
        with_frozen(engine, comm.rank, step)
    engine.module.parts["frozen"].requires_grad_(False)
    said = said_by(lambda: one_step(engine, comm.rank, at))
    assert "was frozen after it was trained" in said and "drop_errors=True" in said
    engine.optimizer.zero_grad()
    engine.save_checkpoint(folder / f"{kind} {at}")
    new = engine_of(Run(kind, lists_frozen=False))
    new.load_checkpoint(folder / f"{kind} {at}", drop_errors=True)
    before = new.module.parts["frozen"].clone()
    for step in range(at, at + 4):
        one_step(new, comm.rank, step)
    for each in (engine, new):
        each.destroy()
    return torch.equal(before, new.module.parts["frozen"])


def test_who_freezes_what_was_trained_can_go_on_without_it(tmp_path: Path) -> None:
    cases = [("OneBitAdam", 2, tmp_path), ("OneBitAdam", 6, tmp_path), ("OneBitLamb", 6, tmp_path)]
    cases += [("ZeroOneAdam", at, tmp_path) for at in (2, 6, 9)]
    assert run_each(without_frozen, 2, cases) == [[True, True]] * len(cases)


SLOW = {
    "OneBitAdam": {"freeze_step": 12},
    "OneBitLamb": {"freeze_step": 12},
    "ZeroOneAdam": {"var_freeze_step": 20, "var_update_scaler": 12},
}


@pytest.mark.parametrize("kind", SLOW)
def test_a_variance_of_few_gradients_is_told_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(Run(kind, options=SLOW[kind]))
    for step in range(16):
        with_frozen(engine, 0, step) if step == 11 else one_step(engine, 0, step)
        if step == 10:
            engine.module.parts["frozen"].requires_grad_(True)
        assert ("begins one-bit averages" in caplog.text) == (step >= 12), step
    with_frozen(engine, 0, 16)
    told = [record.message for record in caplog.records if "begins one-bit averages" in record.message]
    assert len(told) == 1 and "less than 8 gradients: parts.frozen (from 1), parts.rare (from 4)." in told[0]
    engine.destroy()
