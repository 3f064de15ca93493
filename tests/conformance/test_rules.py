"""The contract for zero_full's own rules: rules x the stages they serve x worlds. See `rule_claims.py`."""

import pytest

from tests.cases import Case
from tests.conformance import rule_claims as claims
from tests.conformance.oracles import LEARN_AS
from tests.rules import RULES, Rule
from tests.trainers import Subject

WORLDS = [1, pytest.param(2, marks=pytest.mark.slow), 3]
# With these numbers nothing that is said at one bit is nearer to zero than 1e-5 of its scale: no machine's
# rounding decides on a sign.
HEAVY = Case("tied", two_groups=True, micro_batches=2, max_grad_norm=0.1, weight_decay=0.05)
CASES = [Case(), HEAVY]
AT_3 = [Case("small"), Case("uneven"), Case("empty", weight_decay=0.1), Case("frozen", max_grad_norm=0.1)]
SERVED = [pytest.param(rule, stage, id=f"{rule}-stage{stage}") for rule in RULES for stage in rule.stages]
ONE_BIT = [each for each in SERVED if each.values[0].name in LEARN_AS]
CUT = [each for each in SERVED if each.values[1] and each not in ONE_BIT]
at_every_stage = pytest.mark.parametrize(("rule", "stage"), SERVED)
in_worlds = pytest.mark.parametrize("world_size", WORLDS)
pytestmark = pytest.mark.pairwise


def cases_of(rule: Rule, stage: int, world_size: int) -> tuple[Case, ...]:
    """What is trained."""
    # At stage 3 a module that one rank skips is an error.
    cases = [*CASES, *(AT_3 if world_size == 3 else [])]
    return tuple(claims.by(rule, case) for case in cases if stage < 3 or case.kind != "uneven")


def runs_of(rule: Rule, stage: int, case: Case, world_size: int) -> list[claims.Seen]:
    """By rank."""
    cases = cases_of(rule, stage, world_size)
    return claims.runs_of(Subject("full", stage), cases, world_size)[cases.index(claims.by(rule, case))]


def ends_of(rule: Rule, stage: int, world_size: int) -> list[claims.Ends]:
    """By rank, of a case that is clipped: what is not finite is looked for."""
    return claims.ends_of(Subject("full", stage), claims.by(rule, HEAVY), world_size)


@pytest.mark.rotates
@in_worlds
@at_every_stage
def test_every_step_is_the_oracles(rule: Rule, stage: int, world_size: int) -> None:
    cases = cases_of(rule, stage, world_size)
    subject = Subject("full", stage)
    for case, runs in zip(cases, claims.runs_of(subject, cases, world_size), strict=True):
        claims.parity(subject, case, runs)


@in_worlds
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("rule", "stage"), ONE_BIT)
def test_exact_steps_are_plain(rule: Rule, stage: int, case: Case, world_size: int) -> None:
    claims.exactness(Subject("full", stage), claims.by(rule, case), runs_of(rule, stage, case, world_size))


@in_worlds
@at_every_stage
def test_sends_what_the_plan_says(rule: Rule, stage: int, world_size: int) -> None:
    claims.traffic(Subject("full", stage), claims.by(rule, Case()), runs_of(rule, stage, Case(), world_size))


@pytest.mark.rotates
@in_worlds
@at_every_stage
def test_resumes_bit_for_bit_in_every_phase(rule: Rule, stage: int, world_size: int) -> None:
    claims.resume(claims.by(rule, HEAVY), ends_of(rule, stage, world_size))


@in_worlds
@at_every_stage
def test_what_is_not_finite_on_one_rank_skips_the_step(rule: Rule, stage: int, world_size: int) -> None:
    claims.skipping(ends_of(rule, stage, world_size))


@pytest.mark.rotates
@in_worlds
@pytest.mark.parametrize(("rule", "stage"), CUT)
def test_the_stage_changes_nothing(rule: Rule, stage: int, world_size: int) -> None:
    whole, cut = (runs_of(rule, each, Case(), world_size) for each in (0, stage))
    claims.stages_agree(whole, cut)
