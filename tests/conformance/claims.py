"""What every implementation must establish. A claim is a function, so that cheats can be tried on it."""

from collections import Counter
from copy import deepcopy
from functools import cache
from typing import Any

import torch

from tests.cases import Case, Run, reference, tensors_in, train
from tests.conformance import expected
from tests.trainers import ADAM, Subject
from tests.worlds import run_in
from zero_min.ledger import held

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def fresh_runs_of(
    subject: Subject,
    case: Case,
    world_size: int,
    place: str = "threads",
    watched: bool = False,
    resume: Any = None,
) -> list[Run]:
    """What every rank has to show after the case. `watched`: its live bytes, too."""
    return run_in(subject.where(place), train, world_size, subject, case, watched, resume)


_kept = cache(fresh_runs_of)


def runs_of(
    subject: Subject, case: Case, world_size: int, place: str = "threads", watched: bool = False
) -> list[Run]:
    """The same, but all claims look at one and the same run, which they may not change.

    A cheat is never equal to the stage that it claims to be, so it is run by itself.
    """
    return _kept(subject, case, world_size, subject.where(place), watched)


def parity(subject: Subject, case: Case, world_size: int, place: str = "threads") -> list[Run]:
    """After k steps the parameters are those of plain Adam on the whole batch, on every rank."""
    runs = runs_of(subject, case, world_size, place)
    wanted = reference(case, world_size, subject.counts_no_gradient_as_zero)
    tolerance = TOLERANCE[case.dtype]
    for rank, run in enumerate(runs):
        assert list(run.parameters) == list(wanted), f"rank {rank} has other parameters"
        for name, want in wanted.items():
            got = run.parameters[name]
            assert got.shape == want.shape, f"rank {rank}, {name}: shape {got.shape}, expected {want.shape}"
            worst = float((got - want).abs().max()) if want.numel() else 0.0
            assert worst <= tolerance, f"rank {rank}, {name}: off by {worst:.3g} from plain Adam"
            assert torch.equal(got, runs[0].parameters[name]), f"{name} differs between rank 0 and {rank}"
    return runs


def memory(subject: Subject, case: Case, world_size: int, place: str = "threads") -> None:
    """Between steps a rank holds exactly what the formula says, and nothing that nobody admits to."""
    runs_of(
        subject, Case(dtype=case.dtype), world_size, place
    )  # the first makes constants that stay for life
    for rank, run in enumerate(runs_of(subject, case, world_size, place, watched=True)):
        want = expected.held(subject, case, world_size, rank)
        assert run.held == want, f"rank {rank} holds {run.held} bytes, the formula says {want}"
        barrier = place == "processes" and run.live % 2  # torch 2.11's last barrier keeps its one byte
        assert run.live - barrier == sum(want.values()), (
            f"rank {rank} has {run.live} live bytes but admits to {sum(want.values())}"
        )


def traffic(subject: Subject, case: Case, world_size: int, place: str = "threads") -> None:
    """All ranks together send exactly what the formula says in one step."""
    runs = runs_of(subject, case, world_size, place, watched=True)  # the run that `memory` looks at
    want, got = expected.sent(subject, case, world_size), sum(run.sent for run in runs)
    by_rank = [run.sent_by for run in runs]
    assert got == want, f"the ranks sent {got} bytes, the formula says {want}: {by_rank}"


def calls(subject: Subject, case: Case, world_size: int) -> None:
    """A step of zero_min makes as many calls as the stage needs, and not the same bytes in more of them."""
    want = expected.calls(subject.stage, case, world_size)
    for rank, run in enumerate(runs_of(subject, case, world_size, watched=True)):
        got = Counter(event.what for event in run.diary if event.what != ADAM)
        assert got == want, f"rank {rank} makes the calls {dict(got)} in a step, it needs {want}"


def working_set(subject: Subject, case: Case, world_size: int) -> None:
    """When Adam begins, nothing is alive in zero_min that the step is done with."""
    runs_of(subject, Case(dtype=case.dtype), world_size)  # as in `memory`
    for rank, run in enumerate(runs_of(subject, case, world_size, watched=True)):
        want = expected.at_adam(subject, case, world_size, rank)
        saved = held(tensors_in(run.state))  # by the suite, in the middle of the run
        (got,) = [event.live - saved for event in run.diary if event.what == ADAM]
        assert got == want, f"rank {rank} has {got} live bytes when Adam begins, the formula says {want}"


def resume(subject: Subject, case: Case, world_size: int, place: str = "threads") -> None:
    """Saved in the middle and continued, a run ends in the same bits as one that never stopped."""
    whole = runs_of(subject, case, world_size, place)
    saved = {"half": [deepcopy(run.state) for run in whole]}  # a thread trains on what it loads
    continued = fresh_runs_of(subject, case, world_size, place, resume=saved)
    for rank in range(world_size):
        for name, want in whole[rank].parameters.items():
            got = continued[rank].parameters[name]
            assert torch.equal(got, want), f"rank {rank}: {name} differs after resuming"
