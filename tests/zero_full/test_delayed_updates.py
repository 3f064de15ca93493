"""Delayed updates: bit for bit the rule that the guide tells, beside the next passes, and nothing lost."""

import gc
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import zero_full
from tests.slow_copies import slow_copies
from tests.worlds import POOL, run_each
from tests.zero_full.delaying import (
    AFTER,
    KEYS,
    LR,
    SKIPPED,
    STEPS,
    engine_of,
    of_engine,
    one_step,
)
from tests.zero_full.runs import Net, data
from zero_full.optim.fused_adam import FusedAdamStep
from zero_full.optim.step import Peers, Piece
from zero_full.precision.dtypes import Dtypes


def _sum(lists: list[list[Tensor]]) -> list[Tensor]:
    """Tensor by tensor, in this order."""
    total = [tensor.clone() for tensor in lists[0]]
    for more in lists[1:]:
        total = [a + b for a, b in zip(total, more, strict=True)]
    return total


# The rule ----------------------------------------------------------------------------------------


@dataclass
class Referee:
    """The rule in plain PyTorch, in one process, with everybody's data."""

    stage: int
    ranks: int
    micros: int
    clip: float
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.model = Net()
        self.masters = [p.detach().clone() for p in self.model.parameters()]
        self.params = list(self.model.to(self.dtype).parameters())
        self.base = torch.optim.AdamW(self.masters, lr=LR, weight_decay=0.1)
        self.stepper = FusedAdamStep(self.base, self.base.step, Dtypes())
        self.states: list[dict[str, Any]] = [{} for _ in self.params]
        self.is_behind, self.taken = False, 0

    def gradients(self, step: int, skips: bool) -> list[Tensor]:
        """The average of everybody's, in fp32; added up as it is at this stage."""
        pairs = [(micro, rank) for micro in range(self.micros) for rank in range(self.ranks)]
        found = {(micro, rank): self._gradients(step, micro, rank, skips) for micro, rank in pairs}
        micros, ranks = range(self.micros), range(self.ranks)
        if self.stage == 1:
            own = [_sum([found[micro, rank] for micro in micros]) for rank in ranks]
            return [total / self.ranks for total in _sum(own)]
        averages = [
            [t / self.ranks for t in _sum([found[micro, rank] for rank in ranks])] for micro in micros
        ]
        return _sum(averages)

    def _gradients(self, step: int, micro: int, rank: int, skips: bool) -> list[Tensor]:
        inf = float("inf") if skips and step in SKIPPED and micro == 0 and rank == 0 else 1.0
        loss = self.model(data(step, micro, rank, self.dtype)) * inf / self.micros
        return [gradient.float() for gradient in torch.autograd.grad(loss, self.params)]

    def step(self, step: int, after: int, skips: bool) -> None:
        """Gradients of the parameters as they are; then the last update counts; then the next is made."""
        gradients = self.gradients(step, skips)
        if self.is_behind:
            self.publish()
        norm = float(torch.cat([g.reshape(-1) for g in gradients]).double().norm())
        if norm != norm or norm == float("inf"):
            return
        factor = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
        self.base.param_groups[0]["lr"] = LR * 0.9**step
        pieces = [
            Piece("", m.shape, (0, m.numel()), 0, m, g, state=state)
            for m, g, state in zip(self.masters, gradients, self.states, strict=True)
        ]
        self.stepper.step(pieces, factor, Peers())
        self.taken += 1
        self.is_behind = self.taken > after
        if not self.is_behind:
            self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Parameters follow their masters."""
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)
        self.is_behind = False


def run(
    comm: Any, stage: int, name: str, after: int, copies: bool
) -> tuple[list[Tensor], list[Tensor], bool]:
    """Whole parameters, masters and state at the end; parameters before they were asked for."""
    keys, skips = KEYS[name], name != "fp32"
    with slow_copies(1e7) if copies else nullcontext():
        engine = engine_of(stage, after, **keys)
        for step in range(STEPS):
            one_step(engine, step, comm.rank, skips)
            engine.optimizer.zero_grad(set_to_none=bool(step % 2))  # what the update needs it has
        with zero_full.GatheredParameters(list(engine.parameters())):
            behind = [p.detach().float().clone() for p in engine.parameters()]
        delayed = engine.optimizer.delayed
        was_behind = delayed is not None and delayed.current is not None
        found = of_engine(engine)
        engine.destroy()
    return found, behind, was_behind


def refereed(world: int, stage: int, name: str, after: int) -> tuple[list[Tensor], list[Tensor]]:
    """The same by the referee."""
    keys, skips = KEYS[name], name != "fp32"
    micros, clip = keys.get("gradient_accumulation_steps", 1), keys.get("gradient_clipping", 0.0)
    referee = Referee(stage, world, micros, clip, torch.bfloat16 if "bf16" in keys else torch.float32)
    for step in range(STEPS):
        referee.step(step, after, skips)
    behind = [p.detach().float().clone() for p in referee.params]
    referee.publish()
    moments = [state["exp_avg_sq"] for state in referee.states]
    return [*(p.detach() for p in referee.params), *referee.masters, *moments], behind


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("world", "stage"),
    [
        *((1, 2), (2, 1), (3, 2), (2, 3)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 1), (1, 3), (3, 1), (3, 3))),
    ],
)
def test_the_rule(world: int, stage: int) -> None:
    cases = [
        (stage, name, after, copies) for name in KEYS for after in (0, AFTER) for copies in (False, True)
    ]
    for (_, name, after, copies), by_rank in zip(cases, run_each(run, world, cases), strict=True):
        expected, expected_behind = refereed(world, stage, name, after)
        assert any(not torch.equal(a, b.float()) for a, b in zip(expected_behind, expected, strict=False))
        for found, behind, was_behind in by_rank:
            assert was_behind
            for ours, theirs in zip([*behind, *found], [*expected_behind, *expected], strict=True):
                assert torch.equal(ours, theirs), (name, after, copies)


def test_without_a_number_of_updates_every_step_is_ordinary() -> None:
    plain, delayed = POOL.run(compared, 1, None)[0], POOL.run(compared, 1, STEPS)[0]
    assert all(map(torch.equal, plain, delayed)), "none of so many updates is late"
    late = POOL.run(compared, 1, STEPS - 1)[0]
    assert all(map(torch.equal, plain, late)), "only the last one is, and nothing was computed with that"
    later = POOL.run(compared, 1, STEPS - 2)[0]
    assert not all(map(torch.equal, plain, later))


def compared(comm: Any, after: int | None) -> list[Tensor]:
    engine = engine_of(2, after)
    for step in range(STEPS):
        one_step(engine, step, comm.rank)
    found = of_engine(engine)
    engine.destroy()
    return found


# Beside ------------------------------------------------------------------------------------------


def times(comm: Any, stage: int, copies: bool) -> list[str]:
    """What happened, in order, with steps and passes that take their time."""
    told: list[str] = []
    plain = FusedAdamStep.step

    def slow(stepper: FusedAdamStep, *args: Any) -> None:
        told.append("step")
        time.sleep(0.15)
        plain(stepper, *args)
        told.append("stepped")

    with mock.patch.object(FusedAdamStep, "step", slow), slow_copies(1e9) if copies else nullcontext():
        engine = engine_of(stage, 1)
        for step in range(3):
            loss = engine(data(step, 0, comm.rank))
            told.append("forward")
            engine.backward(loss)
            told.append("backward")
            engine.step()
            told.append("returned")
        engine.optimizer.finish_update()
        engine.destroy()
    return told


@pytest.mark.parametrize(("world", "stage", "copies"), [(1, 2, False), (2, 3, False), (2, 2, True)])
def test_the_host_steps_beside_the_next_passes(world: int, stage: int, copies: bool) -> None:
    for told in POOL.run(times, world, stage, copies):
        first = told.index("returned")
        assert "step" in told[:first] and told[first - 1] == "stepped"
        assert [what for what in told[first:] if what in ("forward", "backward", "stepped")] == [
            *("forward", "backward", "forward", "backward", "stepped", "stepped")
        ]


def grown(comm: Any) -> list[tuple[Any, ...]]:
    """Memory and threads after few and after many steps."""
    told = []
    with slow_copies():
        engine = engine_of(2, 2)
        for step in range(200):
            one_step(engine, step % 5, comm.rank)
            if step in (4, 199):
                held = engine.optimizer.holdings()
                copies = [tensor.data_ptr() for tensor in engine.optimizer.delayed.gradient_copies.values()]
                sizes = {kind: sum(t.nbytes for t in tensors) for kind, tensors in held.items()}
                gc.collect()
                tensors = sum(isinstance(each, Tensor) for each in gc.get_objects())
                told.append((sizes, copies, threading.active_count(), tensors))
        engine.destroy()
    return [*told, (threading.active_count(),)]


def test_nothing_grows() -> None:
    few, many, _ = POOL.run(grown, 1)[0]
    assert few == many and few[1]
