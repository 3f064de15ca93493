"""Compressed averages of what is not finite, with errors of somebody else, and of what does not fit."""

from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.worlds import POOL
from tests.zero_full.compressed_cases import CASES, GAPS, MASKS, Case, given, reduce_of, tensors_of
from zero_full.comm.communicator import Communicator
from zero_full.comm.compressed import CompressedReduce, Errors
from zero_full.comm.fake_ranks import FakeGroup
from zero_full.errors import CommunicationError, DisagreementError, NotFiniteError

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")
WORLDS = [2, 3, 4]
GUARD = 7.0


# What is not finite ------------------------------------------------------------------------------

BUFFER = Case(100, GAPS, "some")  # 31: in no tensor; 34 and 99: left out by the mask or padding
PLACES = {3: [0], 32: [1], 78: [2], 31: [], 34: [], 99: []}


class Seen(NamedTuple):
    tensors: list[int] | None  # None: nothing was raised
    has_changed: bool
    goes_on: bool  # as if nothing had been


def poisoned(comm: Any, case: Case, place: int, bad: float, who: int) -> Seen:
    """One good round, one in which `who` has this number, and another good one."""
    by = Communicator(dist.group.WORLD if comm else None, CPU)
    reduce = reduce_of(by, case)
    errors, untroubled = reduce.new_errors(), reduce.new_errors()
    outs = [torch.full((case.numel,), GUARD) for _ in range(4)]
    for each in (errors, untroubled):
        reduce.average(given(case, by.rank, 0), outs[3], each, "momentum")
    x = given(case, by.rank, 1)
    if by.rank == who:
        x[place] = bad
    tensors = None
    try:
        reduce.average(x, outs[0], errors, "momentum")
    except NotFiniteError as error:
        tensors = error.tensors
    changed = not (is_like(errors, untroubled) and bool((outs[0] == GUARD).all()))
    for out, each in zip(outs[1:3], (errors, untroubled), strict=True):
        reduce.average(given(case, by.rank, 2), out, each, "momentum")
    return Seen(tensors, changed, is_like(errors, untroubled) and torch.equal(outs[1], outs[2]))


def is_like(one: Errors, other: Errors) -> bool:
    return torch.equal(one.worker, other.worker) and torch.equal(one.server, other.server)


def all_poisons(comm: Any, size: int) -> list[tuple[int, Seen]]:
    bad = list(product(PLACES, (NAN, INF, -INF)))
    return [(place, poisoned(comm, BUFFER, place, number, i % size)) for i, (place, number) in enumerate(bad)]


@pytest.mark.parametrize("world", [1, 3])
def test_what_is_not_finite_anywhere_is_seen_by_all_in_the_same_call_and_changes_nothing(world: int) -> None:
    ranks = POOL.run(all_poisons, world, world) if world > 1 else [all_poisons(None, 1)]
    for seen in ranks:
        assert seen == [(place, Seen(PLACES[place], False, True)) for place, _ in seen]


def sums_overflow(comm: Any) -> tuple[str, bool]:
    """Numbers that fp32 holds and whose sum it does not; and ranks that fail half way."""
    by = Communicator(dist.group.WORLD, CPU)
    reduce = CompressedReduce(by, 20, [(0, 10), (10, 20)])
    errors, out = reduce.new_errors(), torch.full((20,), GUARD)
    x = torch.ones(20)
    x[:10] = 3e38
    said = ""
    try:
        reduce.average(x, out, errors, "momentum")
    except NotFiniteError as error:
        said = str(error)
    with (
        mock.patch.object(by, "all_gather", side_effect=CommunicationError("gone")),
        pytest.raises(CommunicationError),
    ):
        reduce.average(torch.randn(20), out, errors, "momentum")
    changed = bool(errors.worker.any()) or bool(errors.server.any()) or not bool((out == GUARD).all())
    return said, changed


def test_a_server_whose_sum_overflows_tells_all_and_a_call_that_fails_half_way_changes_nothing() -> None:
    said = "compressed average of momentum: inf or NaN on some rank, in tensor 0. Nothing was changed"
    assert POOL.run(sums_overflow, 2) == [(said, False)] * 2


# Errors that are kept ----------------------------------------------------------------------------


def errors_of(case: Case, world: int, rank: int) -> Errors:
    return reduce_of(Communicator(FakeGroup(range(world), global_rank=rank), CPU), case).new_errors()


@pytest.mark.parametrize("world", WORLDS)
def test_errors_have_the_size_that_is_stated(world: int) -> None:
    for case in CASES:
        sizes = [
            (e.worker.numel(), e.server.numel()) for e in (errors_of(case, world, r) for r in range(world))
        ]
        numel = int((tensors_of(case) >= 0).sum())
        assert [worker for worker, _ in sizes] == [numel] * world
        assert sum(server for _, server in sizes) == numel


def test_errors_can_be_forgotten() -> None:
    errors = errors_of(CASES[9], 2, 0)
    errors.worker.fill_(1)
    errors.server.fill_(1)
    errors.zero_()
    assert not errors.worker.any() and not errors.server.any()


@pytest.mark.parametrize(
    ("case", "world", "rank", "theirs"),
    [
        (Case(8), 4, 1, "rank 1 of 2, 8 elements,"),  # as large there
        (Case(8), 2, 0, "rank 1 of 2, 8 elements,"),
        (Case(9), 2, 1, "rank 1 of 2, 8 elements,"),
        (Case(12, None, "some"), 2, 1, "rank 1 of 2, 8 elements,"),
    ],
)
def test_errors_of_somebody_else_are_refused(case: Case, world: int, rank: int, theirs: str) -> None:
    saved, mine = errors_of(Case(8), 2, 1), errors_of(case, world, rank)
    with pytest.raises(ValueError, match=f"saved by {theirs} cannot be used by rank {rank} of {world}"):
        mine.load_state_dict(saved.state_dict())
    alone = CompressedReduce(Communicator(None, CPU), 8)
    with pytest.raises(ValueError, match="these errors belong to rank 1 of 2"):
        alone.average(torch.ones(8), torch.ones(8), saved, "momentum")


# Mistakes ----------------------------------------------------------------------------------------


def disagrees(comm: Any, *different: Any) -> str:
    arguments = different if comm.rank == 1 else (10, [(0, 10)], None, False)
    try:
        CompressedReduce(Communicator(dist.group.WORLD, CPU), *arguments)
    except DisagreementError as error:
        return str(error)
    return ""


def all_disagreements(comm: Any) -> list[str]:
    some = MASKS["some"](10)
    others = [(9, None, None), (10, [(0, 5), (5, 10)], None), (10, None, some), (10, None, None, True)]
    return [disagrees(comm, *each) for each in others]


def test_ranks_that_would_average_different_things_are_told_so() -> None:
    one, other = POOL.run(all_disagreements, 2)
    assert one == other and all(
        text.startswith("the ranks average buffers of different layouts:") for text in one
    )
    assert "rank 0: 10 elements, 1 tensors, 10 elements sent" in one[0]
    assert "rank 1: 9 elements, 1 tensors, 9 elements sent" in one[0]
    assert "rank 1: 10 elements, 2 tensors" in one[1]
    assert "rank 1: 10 elements, 1 tensors, 7 elements sent" in one[2]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"x": torch.ones(9)}, r"x must be .* 10 elements, not of shape \(9,\)"),
        ({"x": torch.ones(20)[::2]}, r"x must be a contiguous tensor of 10 elements.* strides \(2,\)"),
        (
            {"x": torch.ones(10).double()},
            "x is torch.float64: it can be torch.float32, torch.bfloat16, torch",
        ),
        ({"out": torch.ones(2, 5)}, r"out must be .* 10 elements, not of shape \(2, 5\)"),
        ({"out": torch.ones(10).half()}, "out is torch.float16: it can be torch.float32"),
    ],
)
def test_what_cannot_be_averaged_is_refused(changes: dict[str, Tensor], complaint: str) -> None:
    reduce = CompressedReduce(Communicator(None, CPU), 10)
    right = {"x": torch.ones(10), "out": torch.ones(10)}
    with pytest.raises(ValueError, match=complaint):
        reduce.average(**{**right, **changes}, errors=reduce.new_errors(), what="momentum")


@pytest.mark.parametrize(
    ("tensors", "mask", "complaint"),
    [
        ([(0, 11)], None, "ranges within 10 elements"),
        ([(0, 5), (4, 10)], None, "ascending and without overlap"),
        ([(5, 4)], None, "ascending and without overlap"),
        ([(-1, 4)], None, "ascending and without overlap"),
        (None, torch.ones(10), "a bool tensor of 10 elements, not torch.float32"),
        (None, torch.ones(9, dtype=torch.bool), r"not torch.bool of shape \(9,\)"),
    ],
)
def test_tensors_and_masks_must_fit(tensors: Any, mask: Tensor | None, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        CompressedReduce(Communicator(None, CPU), 10, tensors, mask)
