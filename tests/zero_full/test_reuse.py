"""Modules that are called several times in a forward, beside a lane that is late, are plain torch's."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest

import zero_full
from tests.worlds import POOL, RankError
from tests.zero_full.reuse import CLOSE, WAYS, Case, Reuse, off_by, random_cases
from zero_full.shard.group.parameter_group import TrainedGroup
from zero_full.shard.passes.gather import Site, UnitState
from zero_full.shard.passes.reduce import GradientReducer

KINDS = [
    Case(way, 3, True, micro, recompute, seed=7)
    for way, micro, recompute in product(WAYS, (1, 2), ("no", "reentrant", "saved"))
]
JOINED = [
    replace(case, joined=4 + 4 * (number % 2), kept=number % 3 == 0) for number, case in enumerate(KINDS)
]


def close(ranks: list[list[float]], cases: list[Case]) -> None:
    assert not [(str(case), offs) for case, *offs in zip(cases, *ranks, strict=True) if max(offs) > CLOSE]


@pytest.mark.rotates
def test_every_way_to_use_a_module_again_at_stage_3() -> None:
    close(POOL.run(off_by, 2, KINDS), KINDS)


@pytest.mark.rotates
def test_every_way_to_use_modules_of_one_unit_again() -> None:
    close(POOL.run(off_by, 2, JOINED), JOINED)


def units_of(comm: Any, joined: int) -> list[int]:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = zero_full.initialize(model=Reuse(Case(joined=joined)), config=config)
    return [len(group.members) for group in engine.optimizer.sharded.trained]


@pytest.mark.parametrize(("joined", "sizes"), [(0, [1] * 8), (4, [1, 4, 4]), (8, [1, 8])])
def test_layers_join_in_the_cases_that_say_so(joined: int, sizes: list[int]) -> None:
    assert POOL.run(units_of, 2, joined) == [sizes, sizes]


@pytest.mark.rotates
def test_random_ones_at_every_stage() -> None:
    cases = random_cases(40, seed=0)
    close(POOL.run(off_by, 3, cases), cases)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 7))
def test_many_random_ones(seed: int) -> None:
    cases = random_cases(50, seed)
    close(POOL.run(off_by, 2, cases, limit=400), cases)


# Not fooled --------------------------------------------------------------------------------------


class Never:
    """An attribute that is 0 whatever is written to it."""

    def __get__(self, site: Any, kind: Any = None) -> int:
        return 0

    def __set__(self, site: Any, value: Any) -> None:
        """Nothing."""


# The first end of a module's backward is taken for the last.
TOO_EARLY = [(Site, "no_grad_calls", Never()), (UnitState, "has_unmarked_use", Never())]


def launch_and_take_later(self: GradientReducer, group: TrainedGroup) -> None:
    """The job takes what is in `param.grad` when it runs; the first rank's has run at once."""
    self._drain(1)
    self.launched.add(group)
    gradients = group.gradients
    at_once = gradients.detach() if group.shard_comm.rank == 0 else None

    def job() -> None:
        taken = gradients.detach() if at_once is None else at_once
        gradients.reduce(taken, self._message_dtype(group), self.backward.is_boundary, True)

    self.pending.append(self.lane.submit(job, [], []))


def reduce_what_came_here(self: GradientReducer) -> None:
    """Each rank decides alone whether a bucket leaves once more."""
    self._drain(0)
    for group in self.groups:
        gradients = group.gradients
        has_more = bool(gradients.arrived) or any(m.param.grad is not None for m in group.members)
        if group not in self.launched or (gradients.slice_is_valid and has_more):
            self._launch(group)
    self._drain(0)
    self.unreduced = False


def with_mistakes(comm: Any, cases: list[Case], mistakes: list[tuple[Any, str, Callable[..., Any]]]) -> Any:
    """The same, while the package makes these mistakes."""
    patches = [mock.patch.object(*mistake, create=True) for mistake in mistakes]
    for patch in patches:
        patch.start()
    try:
        return off_by(comm, cases)
    finally:
        for patch in patches:
            patch.stop()


@pytest.mark.rotates
def test_a_bucket_that_leaves_before_all_uses_are_over_is_reduced_once_more_before_the_step() -> None:
    close(POOL.run(with_mistakes, 2, KINDS, TOO_EARLY), KINDS)


RACE = [*TOO_EARLY, (GradientReducer, "_launch", launch_and_take_later)]


def test_gradients_that_a_job_takes_when_it_runs_do_no_harm_as_ranks_agree_on_what_is_late() -> None:
    close(POOL.run(with_mistakes, 2, KINDS[:6], RACE), KINDS[:6])


def test_a_rank_that_decides_alone_whether_a_bucket_leaves_again_is_found() -> None:
    race = [*RACE, (GradientReducer, "_reduce_rest", reduce_what_came_here)]
    racing = [Case(way, late_by_rank=True) for way in ("pairs", "again", "outside")]
    close(POOL.run(off_by, 2, racing), racing)  # it is not the lateness that does harm
    run = partial(POOL.run, with_mistakes, 2, racing, race, collective=5, limit=60)
    try:
        ranks = run()
    except RankError:
        return  # the ranks made different calls
    with pytest.raises(AssertionError):
        close(ranks, racing)
