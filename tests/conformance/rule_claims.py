"""What every rule of zero_full must establish at every stage it serves. Cheats are tried on these, too."""

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

import zero_full
from tests.cases import Case, backward
from tests.conformance.oracles import LEARN_AS, LR, of_whole_batch, wanted
from tests.rules import Rule
from tests.trainers import FullTrainer, Subject, full_config
from tests.worlds import POOL, run_each
from tests.zero_full.one_bit_runs import everything
from zero_full.plan import plan

CPU = torch.device("cpu")
UNTRAINED = 99  # a step that must leave no trace


def by(rule: Rule, case: Case) -> Case:
    """The same case, stepped by this rule. Those at one bit take no fp64."""
    dtype = torch.float32 if rule.name in LEARN_AS else torch.float64
    return replace(case, rule=rule, steps=rule.steps, dtype=dtype)


@dataclass
class Seen:
    """What one rank has after each step, and what it has sent in it."""

    parameters: list[dict[str, Tensor]]
    sent: list[int]
    applied: list[bool]


def trainer_of(
    comm: Any, subject: Subject, case: Case, device: torch.device = CPU
) -> tuple[FullTrainer, Any]:
    """Before the first step."""
    model = case.model().to(device)
    trainer = subject.build(model, comm, case.groups(model), **subject.options(case))
    assert isinstance(trainer, FullTrainer)
    return trainer, model


def one_step(trainer: FullTrainer, model: Any, case: Case, rank: int, step: int, bad: bool = False) -> bool:
    """Whether it was applied."""
    backward(trainer, model, case, step, rank, float("inf") if bad else None)
    return trainer.step().applied


def seen(comm: Any, subject: Subject, case: Case, device: torch.device = CPU) -> Seen:
    """The whole run."""
    trainer, model = trainer_of(comm, subject, case, device)
    found = Seen([], [], [])
    for step in range(case.steps):
        found.applied.append(one_step(trainer, model, case, comm.rank, step))
        found.sent.append(trainer.ledger().total_sent())
        with zero_full.GatheredParameters(list(model.parameters())) if subject.stage == 3 else nullcontext():
            named = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
            found.parameters.append({name: p.detach().clone() for name, p in named})
    trainer.engine.destroy()
    return found


@dataclass
class Ends:
    """All that decides how this rank goes on, at the end of runs that should be the same."""

    whole: dict[str, Tensor]
    resumed: list[dict[str, Tensor]]  # from what was saved after so many steps
    retried: dict[str, Tensor]  # with steps in between in which the last rank's data have an inf
    changed: list[str]  # by those steps


def ends(comm: Any, subject: Subject, case: Case) -> Ends:
    """The whole run, and two ways to the same end."""
    assert case.rule is not None
    stops, states, changed = case.rule.stops, [], []
    trainer, model = trainer_of(comm, subject, case)
    for step in range(case.steps):
        if step in stops:
            states.append(deepcopy(trainer.state_dict()))
        one_step(trainer, model, case, comm.rank, step)
    found = Ends(everything(trainer.engine), [], {}, changed)
    trainer.engine.destroy()
    for first, state in zip(stops, states, strict=True):
        trainer, model = trainer_of(comm, subject, case)
        one_step(trainer, model, case, comm.rank, UNTRAINED)
        trainer.load_state_dict(state)
        for step in range(first, case.steps):
            one_step(trainer, model, case, comm.rank, step)
        found.resumed.append(everything(trainer.engine))
        trainer.engine.destroy()
    trainer, model = trainer_of(comm, subject, case)
    for step in range(case.steps):
        if step in stops:
            before = everything(trainer.engine)
            is_last = comm.rank == comm.world_size - 1
            if one_step(trainer, model, case, comm.rank, step, bad=is_last):
                changed.append(f"a bad step was applied after {step} steps")
            now = everything(trainer.engine)
            changed += [f"{name} after {step} steps" for name in differing(before, now)]
        one_step(trainer, model, case, comm.rank, step)
    found.retried = everything(trainer.engine)
    trainer.engine.destroy()
    return found


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names of what has not the same bits."""
    return [
        name
        for name in {**one, **other}
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]


@cache
def runs_of(subject: Subject, cases: tuple[Case, ...], world_size: int) -> list[list[Seen]]:
    """By case, then by rank. Several claims look at the same run, which they may not change."""
    return run_each(seen, world_size, [(subject, case) for case in cases])


@cache
def ends_of(subject: Subject, case: Case, world_size: int) -> list[Ends]:
    """By rank."""
    return POOL.run(ends, world_size, subject, case)


# The claims --------------------------------------------------------------------------------------


def parity(subject: Subject, case: Case, ranks: Sequence[Seen]) -> None:
    """After each step every rank is where the oracle is; and has the others' bits where it says so."""
    assert case.rule is not None
    tolerance = case.rule.allowed(subject.stage)
    for step, want in enumerate(wanted(case, len(ranks), subject.stage)):
        for rank, run in enumerate(ranks):
            got, where = run.parameters[step], f"{case}, step {step}, rank {rank}"
            assert run.applied[step], f"{where}: it was not applied"
            for name, value in want[rank].items():
                worst = float(((got[name] - value).abs() / (1 + value.abs())).max()) if value.numel() else 0.0
                assert worst <= tolerance, f"{where}, {name}: off by {worst:.3g} from {case.rule}"
        together = not any(differing(want[0], each) for each in want)
        for rank, run in enumerate(ranks[1:], 1):
            other = differing(ranks[0].parameters[step], run.parameters[step])
            assert bool(other) != together, f"{case}, step {step}: ranks 0 and {rank} differ in {other}"


def exactness(subject: Subject, case: Case, ranks: Sequence[Seen]) -> None:
    """While a one-bit rule learns its variance it is Adam, or LAMB, of the whole batch."""
    assert case.rule is not None
    plain = LEARN_AS[case.rule.name]
    for step, want in enumerate(of_whole_batch(case, len(ranks), plain)[: case.rule.exact]):
        for name, value in want.items():
            worst = float((ranks[0].parameters[step][name] - value).abs().max()) if value.numel() else 0.0
            assert worst <= case.rule.allowed(subject.stage), (
                f"{name}, step {step}: off by {worst} from {plain}"
            )


def traffic(subject: Subject, case: Case, ranks: Sequence[Seen]) -> None:
    """In a step of each kind the rank that sends most sends what a plan says."""
    assert case.rule is not None
    keys = full_config(subject.stage, **{**subject.options(case), "lr": LR})
    planned = plan(case.model(), keys, len(ranks), device="cpu")
    phases = {phase.name: phase.sent for phase in planned.phases} or {"every step": planned.sent}
    steps = case.rule.phases or {"every step": case.steps - 1}
    assert phases.keys() == steps.keys()
    for phase, want in phases.items():
        sent = [run.sent[steps[phase]] for run in ranks]
        assert max(sent) == want, f"{phase}: the ranks sent {sent} bytes, the plan says {want}"


def resume(case: Case, ends: Sequence[Ends]) -> None:
    """Saved in the middle, in each phase, and continued, a run ends in the same bits."""
    assert case.rule is not None
    for rank, end in enumerate(ends):
        for stop, resumed in zip(case.rule.stops, end.resumed, strict=True):
            wrong = differing(end.whole, resumed)
            assert not wrong, f"rank {rank}, resumed after {stop} steps: {wrong} differ"


def skipping(ends: Sequence[Ends]) -> None:
    """What is not finite on one rank skips the step on all, and changes nothing."""
    for rank, end in enumerate(ends):
        assert not end.changed, f"rank {rank}, by a step that was to be skipped: {end.changed}"
        wrong = differing(end.whole, end.retried)
        assert not wrong, f"rank {rank}, after steps that were skipped: {wrong} differ"


def stages_agree(whole: Sequence[Seen], cut: Sequence[Seen]) -> None:
    """The parameters of two stages are the same, to the order of sums."""
    for step, parameters in enumerate(whole[0].parameters):
        for name, want in parameters.items():
            got = cut[0].parameters[step][name]
            assert torch.allclose(got, want, rtol=1e-14, atol=1e-15), f"{name}, step {step}"
