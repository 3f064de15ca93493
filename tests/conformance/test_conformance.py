"""The contract: implementations x cases x world sizes. The claims themselves are in `claims.py`."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from tests.cases import Case
from tests.conformance import claims
from tests.trainers import Subject

CASES = [  # at worlds 1 and 3
    Case(),
    Case(dtype=torch.float32),
    Case("small"),
    Case("scalar"),
    Case("tied"),
    Case("frozen"),
    Case("unused"),
    Case("unused", weight_decay=0.1),
    Case("empty"),
    Case("twice"),
    Case("uneven"),
    Case("transposed"),
    Case("checkpoint"),
    Case("reentrant"),
    Case(two_groups=True),
    Case("tied", two_groups=True, decoupled=True, weight_decay=0.1),
    Case(weight_decay=0.1),
    Case(micro_batches=3),
    Case("uneven", micro_batches=2),
    Case(max_grad_norm=0.1),
    Case("frozen", max_grad_norm=0.1, micro_batches=2),
]
AT_2_AND_4 = [
    Case(),
    Case("small"),
    Case("uneven"),
    Case("tied", two_groups=True, decoupled=True, weight_decay=0.1),
    Case("frozen", max_grad_norm=0.1, micro_batches=2),
]
PROCESS_CASES = [Case(), Case("tied", two_groups=True, micro_batches=2, max_grad_norm=0.1), Case("uneven")]
BYTES = [
    Case(dtype=torch.float32),
    Case("small", dtype=torch.float32),
    Case("empty", dtype=torch.float32),
    Case("frozen", dtype=torch.float32),
    Case("tied", dtype=torch.float32, two_groups=True),
    Case(dtype=torch.float32, micro_batches=3),
]
WORLDS = [1, 2, 3, 4]
SOON = [(case, world_size) for case in CASES for world_size in WORLDS if world_size % 2 or case in AT_2_AND_4]
LATER = [(case, world_size) for case in CASES for world_size in WORLDS if (case, world_size) not in SOON]


# `python -m lessons check` leaves out what is `thorough`; what is left refuses every mistake of the museum.
CORE = [
    (Case(), 1),
    (Case("unused"), 3),
    (Case("uneven"), 3),
    (Case("transposed"), 3),
    (Case(two_groups=True), 3),
    (Case(micro_batches=3), 3),
    (Case("small"), 4),
    (Case("tied", two_groups=True, decoupled=True, weight_decay=0.1), 2),
    (Case("frozen", max_grad_norm=0.1, micro_batches=2), 4),
]
CORE_BYTES = [(case, 3) for case in BYTES] + [(Case("small", dtype=torch.float32), 4)]
thorough = pytest.mark.thorough


def beside(core: list[tuple[Case, int]], pairs: list[tuple[Case, int]]) -> list[Any]:
    """The pairs of a case and a world size, marked if they are not among the core."""
    return [pair if pair in core else pytest.param(*pair, marks=thorough) for pair in pairs]


def ranks_differ(subject: Subject, case: Case, **others: Any) -> bool:
    return subject.stage == 3 and case.kind == "uneven"


def skip_if_ranks_differ(subject: Subject, case: Case) -> None:
    if ranks_differ(subject, case):
        pytest.skip("at stage 3 a module that one rank skips is an error: see test_stage3.py")


@pytest.mark.pairwise(skips=ranks_differ)
@pytest.mark.parametrize(
    "case, world_size",
    [*beside(CORE, SOON), *(pytest.param(*each, marks=pytest.mark.slow) for each in LATER)],
    ids=str,
)
def test_ends_where_plain_adam_ends(subject: Subject, case: Case, world_size: int) -> None:
    skip_if_ranks_differ(subject, case)
    claims.parity(subject, case, world_size)


@pytest.mark.pairwise
@pytest.mark.parametrize("case, world_size", beside(CORE_BYTES, [*product(BYTES, WORLDS)]), ids=str)
def test_holds_exactly_the_formula(subject: Subject, case: Case, world_size: int) -> None:
    claims.memory(subject, case, world_size)
    if subject.keeps_a_diary:
        claims.working_set(subject, case, world_size)


def uses_decide(subject: Subject, case: Case, **others: Any) -> bool:
    return subject.stage == 3 and case.kind in ("small", "tied", "unused")


@pytest.mark.pairwise(skips=uses_decide)
@pytest.mark.parametrize(
    "case, world_size",
    beside(CORE_BYTES, [*product([*BYTES, Case("unused", dtype=torch.float32)], WORLDS)]),
    ids=str,
)
def test_sends_exactly_the_formula(subject: Subject, case: Case, world_size: int) -> None:
    if uses_decide(subject, case):
        pytest.skip("stage 3 sends what the modules use: see test_stage3.py for these models")
    claims.traffic(subject, case, world_size)
    if subject.keeps_a_diary:
        claims.calls(subject, case, world_size)


@pytest.mark.pairwise
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=thorough), 3])
@pytest.mark.parametrize(
    "case", [Case(steps=4), Case("tied", steps=4, two_groups=True, micro_batches=2)], ids=str
)
def test_resumes_bit_for_bit(subject: Subject, case: Case, world_size: int) -> None:
    claims.resume(subject, case, world_size)


@pytest.mark.rotates
@pytest.mark.pairwise(skips=ranks_differ)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("case", PROCESS_CASES, ids=str)
def test_real_processes_end_where_plain_adam_ends(subject: Subject, case: Case, world_size: int) -> None:
    skip_if_ranks_differ(subject, case)
    claims.parity(subject, case, world_size, "processes")


@pytest.mark.rotates
def test_real_processes_hold_and_send_exactly_the_formula(subject: Subject) -> None:
    case = Case(dtype=torch.float32, micro_batches=2)
    claims.memory(subject, case, 3, "processes")
    claims.traffic(subject, case, 3, "processes")


def no_messages(subject: Subject, case: Case, **others: Any) -> bool:
    return subject.impl != "full" or ranks_differ(subject, case)


@pytest.mark.rotates
@pytest.mark.pairwise(skips=no_messages)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", [*PROCESS_CASES, Case(dtype=torch.float32, micro_batches=3)], ids=str)
def test_ranks_of_one_host_may_send_messages(subject: Subject, case: Case, world_size: int) -> None:
    if subject.impl != "full":
        pytest.skip("only zero_full's ranks share memory")
    skip_if_ranks_differ(subject, case)
    sender = replace(subject, by_messages=True)
    by_messages, shared = claims.parity(sender, case, world_size), claims.runs_of(subject, case, world_size)
    for mine, theirs in zip(by_messages, shared, strict=True):
        assert mine.sent == theirs.sent
        for name, want in theirs.parameters.items():
            assert torch.equal(mine.parameters[name], want), name


@pytest.mark.parametrize("case", [Case("tied", two_groups=True), Case(dtype=torch.float32)], ids=str)
def test_ranks_of_one_device_may_go_through_the_host(subject: Subject, case: Case) -> None:
    if subject.impl != "full":
        pytest.skip("only zero_full's ranks can be staged")
    staged = claims.parity(replace(subject, by_staged=True), case, 2)
    for mine, theirs in zip(staged, claims.runs_of(subject, case, 2), strict=True):
        assert mine.sent == theirs.sent
        for name, want in theirs.parameters.items():
            assert torch.equal(mine.parameters[name], want), name


@pytest.mark.parametrize("bucket_size", [pytest.param(1, marks=thorough), 13, 1000])
def test_the_bucket_size_changes_no_bit(subject: Subject, bucket_size: int) -> None:
    if subject.impl != "full" and subject.stage != 2:
        pytest.skip("only stage 2 has buckets")
    usual = claims.runs_of(subject, Case(micro_batches=2), 3)
    other = claims.runs_of(subject, Case(micro_batches=2, bucket_size=bucket_size), 3)
    for name, want in usual[0].parameters.items():
        assert torch.equal(other[0].parameters[name], want), name


def test_the_stage_changes_no_bit(subject: Subject) -> None:
    if subject.stage == 0:
        pytest.skip("the other stages are compared with this one")
    unsharded = claims.runs_of(Subject(subject.impl, 0), Case("tied", two_groups=True), 3)
    sharded = claims.runs_of(subject, Case("tied", two_groups=True), 3)
    for name, want in unsharded[0].parameters.items():
        assert torch.equal(sharded[0].parameters[name], want), name


def test_a_run_repeats_bit_for_bit(subject: Subject) -> None:
    first = claims.runs_of(subject, Case(micro_batches=2), 3)  # many claims have looked at it
    second = claims.fresh_runs_of(subject, Case(micro_batches=2), 3)
    for rank, run in enumerate(first):
        for name, want in run.parameters.items():
            assert torch.equal(second[rank].parameters[name], want), f"rank {rank}: {name}"


def test_the_reported_norm_is_the_norm_before_clipping(subject: Subject) -> None:
    case = Case(max_grad_norm=0.1, steps=1)
    runs = claims.runs_of(subject, case, 3)
    model = case.model()
    sum(model(case.data(0, 0, rank)) / 3 for rank in range(3)).backward()
    want = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    for run in runs:
        assert run.reports[0].grad_norm == pytest.approx(float(want), rel=1e-12)
        assert run.reports[0].grad_norm > case.max_grad_norm  # it was clipped, so the case says something


def test_every_rank_trains_on_its_own_data(subject: Subject) -> None:
    losses = [run.losses for run in claims.runs_of(subject, Case(), 4)]
    assert len({tuple(loss) for loss in losses}) == 4
