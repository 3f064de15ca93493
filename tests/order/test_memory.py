"""How much memory is alive follows from the order of calls, not from how far the host is ahead."""

from unittest import mock

import pytest

from tests.order.runs import Case, recorded
from tests.order.trace import Recorder
from zero_full.shard.passes.reduce import GradientReducer

DRAIN = GradientReducer._drain
WAYS: dict[str, dict[str, object]] = {
    "plain": {},
    "adding up": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": {"enabled": True}},
}


def most_alive(record: Recorder, made_in: str) -> int:
    """The most blocks at a time, of those made in this function, that nothing else may be given yet."""
    alive = most = 0
    for item in record.items:
        if item.kind in ("make", "free") and record.blocks[item.accesses[0].block].made.endswith(made_in):
            alive += 1 if item.kind == "make" else -1
            most = max(most, alive)
    return most


@pytest.mark.rotates
@pytest.mark.parametrize("keys", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("stage", [2, 3])
def test_two_gradient_buffers_are_enough_for_any_number_of_buckets(
    stage: int, keys: dict[str, object]
) -> None:
    for depth in (4, 12):
        record = recorded(Case(stage, keys=keys, steps=2, depth=depth))
        assert most_alive(record, " _open") == 2


def test_buffers_pile_up_if_nobody_waits() -> None:
    def drain_at_the_end(self: GradientReducer, leave: int) -> None:
        if leave == 0:
            DRAIN(self, leave)

    with mock.patch.object(GradientReducer, "_drain", drain_at_the_end):
        assert most_alive(recorded(Case(2, steps=2, depth=12)), " _open") == 12


def test_two_units_are_gathered_at_a_time_and_the_third_takes_the_place_of_the_first() -> None:
    one_ahead = {"stage3_prefetch_bucket_size": 48}  # elements: a layer and its padding
    for depth in (4, 12):
        assert most_alive(recorded(Case(3, zero=one_ahead, depth=depth)), " begin_gather") == 2
