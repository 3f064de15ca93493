"""All ranks launch the same collectives in the same order, over all communicators taken together.

Where resources are short, a backend runs what a rank has launched one after the other. So two ranks that
launch two calls in different orders may wait for each other, even if the calls are of different
communicators.
"""

from typing import Any
from unittest import mock

import pytest

from tests.order.runs import Case, recorded
from zero_full.shard.passes.reduce import GradientReducer

CASES = [
    *(Case(stage, "uneven", {"gradient_accumulation_steps": 2}) for stage in range(3)),
    Case(3, "changing", ranks=4, zero={"zero_hpz_partition_size": 2}),
    Case(2, "uneven", ranks=4, zero={"mics_shard_size": 2}),
    Case(2, "uneven", zero={"contiguous_gradients": False}),
]


def order_of(case: Case, me: int) -> list[tuple[Any, ...]]:
    """The calls of one rank. Communicators are numbered as they are first used."""
    numbers: dict[Any, int] = {}
    calls = recorded(Case(**{**vars(case), "me": me})).order
    return [(numbers.setdefault(group, len(numbers)), kind, numel) for group, kind, numel in calls]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rank_has_the_order_of_the_first(case: Case) -> None:
    first, *others = (order_of(case, me) for me in range(case.ranks))
    assert len(first) > 10 and all(order == first for order in others)


def test_a_bucket_that_leaves_when_it_is_full_is_found() -> None:
    def launch_full(self: GradientReducer) -> None:
        for bucket in self.buckets:
            if bucket not in self.launched and not self.missing[bucket]:
                self._launch(bucket)

    with mock.patch.object(GradientReducer, "_launch_complete", launch_full):
        case = Case(1, "uneven", zero={"reduce_bucket_size": 13})
        assert order_of(case, 0) != order_of(case, 1)
