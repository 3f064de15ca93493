"""All ranks launch the same collectives in the same order, over all communicators taken together.

Where resources are short, a backend runs what a rank has launched one after the other. So two ranks that
launch two calls in different orders may wait for each other, even if the calls are of different
communicators.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest

from tests.order.runs import Case, recorded
from tests.zero_full.test_reuse import RACE, reduce_what_came_here
from zero_full.comm.lane import Lane, LazyLane
from zero_full.shard.passes.reduce import GradientReducer

CASES = [
    *(Case(stage, "uneven", {"gradient_accumulation_steps": 2}) for stage in range(3)),
    Case(3, "changing", ranks=4, zero={"zero_hpz_partition_size": 2}),
    Case(2, "uneven", ranks=4, zero={"mics_shard_size": 2}),
    Case(2, "uneven", zero={"contiguous_gradients": False}),
]
AS_THEY_ARE = {"contiguous_gradients": False}  # gradients stay in `param.grad` until their bucket leaves


def order_of(case: Case, me: int, lane: Callable[[Any], Lane] = lambda made: made) -> list[tuple[Any, ...]]:
    """The calls of one rank. Communicators are numbered as they are first used."""
    numbers: dict[Any, int] = {}
    calls = recorded(Case(**{**vars(case), "me": me}), lane=lane).order
    return [(numbers.setdefault(group, len(numbers)), kind, numel) for group, kind, numel in calls]


@pytest.mark.rotates
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rank_has_the_order_of_the_first(case: Case) -> None:
    first, *others = (order_of(case, me) for me in range(case.ranks))
    assert len(first) >= 10 and all(order == first for order in others)


def test_a_bucket_that_leaves_when_it_is_full_is_found() -> None:
    def launch_full(self: GradientReducer) -> None:
        for group in self.groups:
            if group not in self.launched and not self.missing[group]:
                self._launch(group)

    with mock.patch.object(GradientReducer, "_launch_complete", launch_full):
        case = Case(1, "uneven", zero={"reduce_bucket_size": 13})
        assert order_of(case, 0) != order_of(case, 1)


def on_each_communicator(case: Case, late: bool) -> dict[Any, list[tuple[Any, ...]]]:
    """The calls of a rank whose lanes run their jobs at once, or only when they are waited for."""
    calls: dict[Any, list[tuple[Any, ...]]] = {}
    for number, *call in order_of(case, 1, lambda made: LazyLane() if late else made):
        calls.setdefault(number, []).append(tuple(call))
    return calls


@pytest.mark.parametrize("stage", range(4))
def test_the_order_does_not_depend_on_when_a_lane_runs_its_jobs(stage: int) -> None:
    case = Case(stage, "again", zero=AS_THEY_ARE)
    assert on_each_communicator(case, late=False) == on_each_communicator(case, late=True)


def test_a_rank_that_decides_alone_whether_a_bucket_leaves_again_is_found() -> None:
    with ExitStack() as planted:
        for mistake in (*RACE, (GradientReducer, "_reduce_rest", reduce_what_came_here)):
            planted.enter_context(mock.patch.object(*mistake, create=True))
        case = Case(3, "again", zero=AS_THEY_ARE)
        assert on_each_communicator(case, late=False) != on_each_communicator(case, late=True)
