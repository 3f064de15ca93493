"""What every implementation must establish. A claim is a function, so that cheats can be tried on it."""

import torch

from tests.cases import Case, Run, frozen_sizes, reference, sizes, train
from tests.trainers import Subject
from tests.worlds import run_in
from zero_min import formula

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def parity(subject: Subject, case: Case, world_size: int, place: str = "threads") -> list[Run]:
    """After k steps the parameters are those of plain Adam on the whole batch, on every rank."""
    runs = run_in(place, train, world_size, subject, case)
    expected = reference(case, world_size)
    tolerance = TOLERANCE[case.dtype]
    for rank, run in enumerate(runs):
        assert list(run.parameters) == list(expected), f"rank {rank} has other parameters"
        for name, want in expected.items():
            got = run.parameters[name]
            assert got.shape == want.shape, f"rank {rank}, {name}: shape {got.shape}, expected {want.shape}"
            worst = float((got - want).abs().max()) if want.numel() else 0.0
            assert worst <= tolerance, f"rank {rank}, {name}: off by {worst:.3g} from plain Adam"
            assert torch.equal(got, runs[0].parameters[name]), f"{name} differs between rank 0 and {rank}"
    return runs


def frozen_bytes(case: Case, stage: int, world_size: int) -> int:
    """What a rank holds of parameters that nobody trains: all, or a slice at stage 3."""
    frozen = frozen_sizes(case)
    return 4 * (formula.padded(frozen, world_size) // world_size if stage == 3 else sum(frozen))


def memory(subject: Subject, case: Case, world_size: int, place: str = "threads") -> None:
    """Between steps a rank holds exactly what the formula says, and nothing that nobody admits to."""
    expected = formula.held(subject.stage, sizes(case, subject.stage), world_size)
    expected["parameters"] += frozen_bytes(case, subject.stage, world_size)
    for rank, run in enumerate(run_in(place, train, world_size, subject, case)):
        assert run.held == expected, f"rank {rank} holds {run.held} bytes, the formula says {expected}"
        assert run.live == sum(expected.values()), (
            f"rank {rank} has {run.live} live bytes but admits to {sum(expected.values())}"
        )


def traffic(subject: Subject, case: Case, world_size: int, place: str = "threads") -> None:
    """All ranks together send exactly what the formula says in one step."""
    runs = run_in(place, train, world_size, subject, case)
    expected = formula.sent(subject.stage, sizes(case, subject.stage), world_size, case.micro_batches)
    if subject.stage == 3:  # frozen parameters are gathered twice, too
        expected += 2 * case.micro_batches * (world_size - 1) * world_size * frozen_bytes(case, 3, world_size)
    got = sum(run.sent for run in runs)
    by_rank = [run.sent_by for run in runs]
    assert got == expected, f"the ranks sent {got} bytes, the formula says {expected}: {by_rank}"


def resume(subject: Subject, case: Case, world_size: int, place: str = "threads") -> None:
    """Saved in the middle and continued, a run ends in the same bits as one that never stopped."""
    whole = run_in(place, train, world_size, subject, case)
    saved = {"half": [run.state for run in whole]}
    continued = run_in(place, train, world_size, subject, case, saved)
    for rank in range(world_size):
        for name, want in whole[rank].parameters.items():
            got = continued[rank].parameters[name]
            assert torch.equal(got, want), f"rank {rank}: {name} differs after resuming"
