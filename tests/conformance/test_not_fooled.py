"""Cheats that the contract must catch. A suite that passes these is not a suite."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases import Case
from tests.conformance import claims, rule_claims
from tests.conformance.rule_cheats import RuleCheat
from tests.conformance.rule_claims import by as rule_case
from tests.rules import RULES
from tests.trainers import MinTrainer, Subject, Trainer, noting
from zero_min import Stage0, Stage1, Stage2, Stage3
from zero_min.comm import Comm
from zero_min.stage1 import flatten_dense_tensors_aligned

CASE = Case(dtype=torch.float32, micro_batches=2)


class KeepsForeignState(Stage1):
    """Shards on paper, but also keeps averages for everyone else's slices, and does not say so."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hidden = [torch.zeros_like(f.flat) for f in self.flats]


class KeepsForeignGradients(Stage2):
    """Reduces to the owner but remembers the whole gradients, and admits it."""

    def _reduce(self, bucket: Any) -> None:
        kept = [window.param.grad for window in bucket.windows]
        super()._reduce(bucket)
        self.kept = [*getattr(self, "kept", []), *kept]

    def zero_grad(self) -> None:
        self.kept: list[Tensor | None] = []
        super().zero_grad()

    def holdings(self) -> dict[str, list[Tensor | None]]:
        holdings = super().holdings()
        holdings["gradients"] += self.kept
        return holdings


class SkipsAveraging(Stage1):
    """Steps on its own gradients only."""

    def reduce_gradients(self) -> None:
        for f in self.flats:
            flat = flatten_dense_tensors_aligned([p.grad for p in f.params], self.comm.world_size)
            f.master.grad = flat.chunk(self.comm.world_size)[self.comm.rank].clone()


class SumsInsteadOfAveraging(Stage1):
    """Forgets to divide by the world size."""

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        for f in self.flats:
            f.master.grad *= self.comm.world_size


class KeepsAView(Stage1):
    """The own gradient is a view of everybody's, so that the whole is alive until Adam is done."""

    def reduce_gradients(self) -> None:
        for f in self.flats:
            flat = flatten_dense_tensors_aligned([p.grad for p in f.params], self.comm.world_size)
            parts = flat.chunk(self.comm.world_size)
            f.master.grad = parts[self.comm.rank]
            f.master.grad.copy_(self.comm.reduce_scatter(parts) / self.comm.world_size)


class BroadcastsEverySlice(Stage1):
    """The bytes of one all-gather, in as many calls as there are ranks."""

    def gather_parameters(self) -> None:
        for f in self.flats:
            for rank, part in enumerate(f.flat.chunk(self.comm.world_size)):
                self.comm.broadcast(part, rank)
            f.master.grad = None


class NeverReleases(Stage3):
    """Computes right, but keeps all parameters whole between steps, and admits it."""

    def update(self) -> None:
        super().update()
        for s in self.sliced.values():
            s.release()
            s.gather()


CHEATS: dict[str, type] = {
    "never_releases": NeverReleases,
    "unsharded": Stage0,
    "foreign_state": KeepsForeignState,
    "foreign_gradients": KeepsForeignGradients,
    "skips_averaging": SkipsAveraging,
    "sums": SumsInsteadOfAveraging,
    "a_view": KeepsAView,
    "broadcasts": BroadcastsEverySlice,
}


@dataclass(frozen=True)
class Cheat(Subject):
    """A cheat that claims to be a stage."""

    name: str = ""

    def build(
        self, model: nn.Module, comm: Comm, groups: Sequence[Any] | None = None, **options: Any
    ) -> Trainer:
        """The cheat behind the usual protocol."""
        if not issubclass(CHEATS[self.name], Stage2):
            options.pop("bucket_size", None)
        options["optimizer"] = noting(options["optimizer"], comm)
        return MinTrainer(CHEATS[self.name](model, comm, groups, **options), comm)


def cheat(name: str, stage: int) -> Cheat:
    return Cheat("cheat", stage, name)


def test_a_cheat_is_not_judged_by_the_run_of_another() -> None:
    honest, cheats = Subject("min", 1), [cheat("skips_averaging", 1), cheat("sums", 1)]
    kept = [claims.runs_of(subject, CASE, 3) for subject in (honest, *cheats)]
    assert len({id(runs) for runs in kept}) == 3 and claims.runs_of(honest, CASE, 3) is kept[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_plain_adam_on_every_rank_is_not_a_sharded_stage(stage: int) -> None:
    claims.parity(cheat("unsharded", stage), CASE, 3)  # its numbers are right: parity alone proves nothing
    with pytest.raises(AssertionError, match="the formula says"):
        claims.memory(cheat("unsharded", stage), CASE, 3)


def test_plain_adam_on_every_rank_sends_other_bytes_than_stage_2() -> None:
    with pytest.raises(AssertionError, match="the formula says"):
        claims.traffic(cheat("unsharded", 2), CASE, 3)


def test_hidden_state_of_other_ranks_is_found() -> None:
    with pytest.raises(AssertionError, match="live bytes but admits to"):
        claims.memory(cheat("foreign_state", 1), CASE, 3)


def test_gradients_of_other_ranks_are_found() -> None:
    with pytest.raises(AssertionError, match="the formula says"):
        claims.memory(cheat("foreign_gradients", 2), CASE, 3)


def test_parameters_that_are_never_released_are_found() -> None:
    claims.parity(cheat("never_releases", 3), CASE, 3)
    with pytest.raises(AssertionError, match="the formula says"):
        claims.memory(cheat("never_releases", 3), CASE, 3)


@pytest.mark.parametrize("name", ["skips_averaging", "sums"])
def test_gradients_that_are_not_averaged_are_found(name: str) -> None:
    with pytest.raises(AssertionError, match="off by"):
        claims.parity(cheat(name, 1), Case(max_grad_norm=0.1), 3)


def test_skipping_the_average_is_also_missing_traffic() -> None:
    with pytest.raises(AssertionError, match="the formula says"):
        claims.traffic(cheat("skips_averaging", 1), CASE, 3)


def test_a_view_that_keeps_the_whole_gradient_alive_is_found() -> None:
    subject = cheat("a_view", 1)
    for honest in (claims.parity, claims.memory, claims.traffic, claims.calls):
        honest(subject, CASE, 3)  # after the step it is gone
    with pytest.raises(AssertionError, match="live bytes when Adam begins"):
        claims.working_set(subject, CASE, 3)


def test_the_same_bytes_in_more_calls_are_found() -> None:
    subject = cheat("broadcasts", 1)
    for honest in (claims.parity, claims.memory, claims.traffic, claims.working_set):
        honest(subject, CASE, 3)
    with pytest.raises(AssertionError, match=r"'broadcast': 3.*it needs"):
        claims.calls(subject, CASE, 3)


# Rules -------------------------------------------------------------------------------------------

RULE_OF = {str(rule): rule for rule in RULES}


def cheating(name: str, stage: int) -> tuple[RuleCheat, Case]:
    """Who claims to be the rule that its name begins with, and what it is asked to train."""
    rule = max((each for each in RULE_OF if name.startswith(each)), key=len)
    return RuleCheat("full", stage, name), rule_case(RULE_OF[rule], Case())


@pytest.mark.parametrize("name", ["LambOfSlices", "MuonOfSlices"])
def test_rules_that_take_slices_for_the_whole_are_found(name: str) -> None:
    subject, case = cheating(name, 2)
    rule_claims.parity(replace(subject, stage=0), case, rule_runs(replace(subject, stage=0), case, 2))
    with pytest.raises(AssertionError, match="off by"):
        rule_claims.parity(subject, case, rule_runs(subject, case, 2))


@pytest.mark.parametrize("name", ["OneBitAdamThatForgets", "OneBitLambThatForgets", "ZeroOneAdamThatForgets"])
def test_averages_without_error_feedback_are_found(name: str) -> None:
    subject, case = cheating(name, 0)
    with pytest.raises(AssertionError, match="off by"):
        rule_claims.parity(subject, case, rule_runs(subject, case, 2))


def test_ranks_that_do_not_meet_are_found() -> None:
    subject, case = cheating("ZeroOneAdamThatStaysApart", 0)
    with pytest.raises(AssertionError, match=r"off by|differ in"):
        rule_claims.parity(subject, case, rule_runs(subject, case, 2))


def test_what_travels_beside_what_must_is_found() -> None:
    subject, case = cheating("MuonThatTellsMore", 2)
    runs = rule_runs(subject, case, 3)
    rule_claims.parity(subject, case, runs)
    with pytest.raises(AssertionError, match="the plan says"):
        rule_claims.traffic(subject, case, runs)


def test_errors_that_are_not_resumed_are_found() -> None:
    subject, case = cheating("OneBitAdamThatLosesErrors", 0)
    with pytest.raises(AssertionError, match="resumed after 5 steps"):
        rule_claims.resume(case, rule_claims.ends_of(subject, case, 2))


def test_a_bad_step_that_is_not_skipped_is_found() -> None:
    """Without clipping nobody looks for what is not finite."""
    case = rule_case(RULE_OF["Lamb"], Case())
    with pytest.raises(AssertionError, match="by a step that was to be skipped"):
        rule_claims.skipping(rule_claims.ends_of(Subject("full", 1), case, 2))


def rule_runs(subject: Subject, case: Case, world_size: int) -> list[rule_claims.Seen]:
    return rule_claims.runs_of(subject, (case,), world_size)[0]
