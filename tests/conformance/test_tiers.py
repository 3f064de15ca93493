"""The contract wherever state waits: rules x stages x tiers, bit for bit as without a tier, in fp32."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.cases import Case
from tests.conformance.rule_claims import differing, one_step
from tests.conformance.test_rules import HEAVY
from tests.pairwise import pairwise
from tests.rules import RULES, Rule
from tests.slow_copies import slow_copies
from tests.trainers import FullTrainer, Subject, full_config
from tests.worlds import run_each
from tests.zero_full.one_bit_runs import everything
from zero_full.offload import BlockTier

WORLD = 3
ADAM = None  # what a case is stepped by if it names no rule
BY = [ADAM, *(rule for rule in RULES if rule.name in ("Lamb", "Lion", "Muon"))]
CASES = [HEAVY, Case("small", weight_decay=0.1)]  # in the second one some rank owns nothing
STEPS, BAD = 4, 2  # before which step a step is tried in which the last rank's data have an inf
TIERS: dict[str, dict[str, Any]] = {
    "device": {"device": "none"},
    "host": {"device": "cpu"},
    "host, by copies": {"device": "cpu"},
    "disk": {"device": "nvme", "max_in_cpu": 20},  # two parts
}
AT_STAGE_3 = ("parameters on a disk", "disk, parameters on a disk")  # all of them
FOR_ADAM: dict[str, dict[str, Any]] = {"disk, by copies": {"device": "nvme"}}


def end(comm: Any, stage: int, case: Case, tier: str, path: str) -> dict[str, Tensor]:
    """All that decides how this rank goes on after a run, one step of which is skipped."""
    keys = full_config(stage, **Subject("full", stage).options(case))
    place = {**TIERS, **FOR_ADAM}.get(tier.partition(", parameters")[0], TIERS["device"])
    nvme = {"nvme_path": path} if place["device"] == "nvme" else {}
    keys["zero_optimization"]["offload_optimizer"] = {**place, **nvme}
    if tier in AT_STAGE_3:
        keys["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": path, "max_in_cpu": 0}
    model, small_parts = case.model(), partial(BlockTier, part_numel=10)
    with (
        mock.patch("zero_full.start.from_config.BlockTier", small_parts),
        mock.patch("zero_full.start.from_config.PARTS_IN_MEMORY", 2),  # else the buckets were smaller, too
        slow_copies(1e7) if "copies" in tier else nullcontext(),
    ):
        trainer = FullTrainer(model, case.groups(model), keys)
    for step in range(STEPS):
        if step == BAD and case.max_grad_norm is not None:  # else nobody looks
            assert not one_step(trainer, model, case, comm.rank, step, bad=comm.rank == WORLD - 1)
        assert one_step(trainer, model, case, comm.rank, step)
    if tier in AT_STAGE_3:
        assert trainer.engine.moved()["parameters written"] > 0
    found = everything(trainer.engine)
    trainer.engine.destroy()
    return found


Row = tuple[int, Rule | None, Case, str]


def rows() -> Iterator[Row]:
    """Stages, rules, cases and the tiers that each may have."""
    for stage, rule, case in product([1, 2, 3], BY, CASES):
        for tier in [*TIERS, *(FOR_ADAM if rule is ADAM else ()), *(AT_STAGE_3 if stage == 3 else ())]:
            if tier != "device":
                yield stage, rule, case, tier


ROWS = list(rows())
SOON = set(pairwise(ROWS))


@pytest.mark.rotates
@pytest.mark.parametrize("soon", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["pairs", "rest"])
@pytest.mark.parametrize("rule", BY, ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_tier_changes_no_bit(stage: int, rule: Rule | None, soon: bool, tmp_path: Any) -> None:
    here = [row for row in ROWS if row[:2] == (stage, rule) and (row in SOON) is soon]
    for case in dict.fromkeys(case for _, _, case, _ in here):
        tiers = ["device", *(tier for _, _, which, tier in here if which == case)]
        run = replace(case, rule=rule, dtype=torch.float32, steps=STEPS)
        wanted, *others = run_each(end, WORLD, [(stage, run, tier, str(tmp_path)) for tier in tiers])
        for tier, found in zip(tiers[1:], others, strict=True):
            for rank, (want, got) in enumerate(zip(wanted, found, strict=True)):
                wrong = differing(want, got)
                assert not wrong, f"{run}, {tier}, rank {rank}: {wrong} differ"
    assert not list(tmp_path.iterdir())
