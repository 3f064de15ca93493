"""Muon: whole matrices at every stage, in the bits of torch's own on one process."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL, run_each
from tests.zero_full.muon_runs import (
    BY_ADAM,
    SHAPES,
    Run,
    engine_of,
    expected,
    numbers,
    one_step,
    trained,
    values_of,
)
from tests.zero_full.runs import config, data
from zero_full.comm.communicator import Communicator
from zero_full.optim.muon import Orthogonal
from zero_full.plan import plan

HOST = {"offload_optimizer": {"device": "cpu"}}
MICS, PARTS = {"mics_shard_size": 2}, {"sub_group_size": 100}
RUNS = [
    *(Run(stage, precision) for stage in range(4) for precision in ("fp32", "bf16", "fp16")),
    Run(2, "bf16", zero={"overlap_comm": True}),
    Run(3, "bf16", zero=PARTS),
    *(Run(stage, precision, 2, zero=HOST) for stage, precision in ((1, "bf16"), (2, "fp16"), (3, "fp32"))),
    Run(1, options={"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 2}),
]
IN_GROUPS = [Run(1, "bf16", zero=MICS), Run(2, zero=MICS), Run(3, "bf16", zero={**MICS, **PARTS})]


def differences(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    """What is off: AdamW's by more than rounding, Muon's by a bit."""
    wrong = [f"only one has {name}" for name in got.keys() ^ want.keys()]
    for name in got.keys() & want.keys():
        mine, theirs = got[name], want[name].to(got[name].dtype)
        by_adam = any(f".{each}." in name for each in BY_ADAM)
        tolerance = 4 * torch.finfo(mine.dtype).eps if by_adam else 0.0
        if not torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance / 4):
            wrong.append(f"{name} by {float((mine - theirs).abs().max())}")
    return wrong


@pytest.mark.rotates
@pytest.mark.parametrize("world", [2, 4])
def test_sharded_matrices_have_the_bits_of_torchs_muon(world: int) -> None:
    runs = [*RUNS, *(IN_GROUPS if world == 4 else [])]
    for run, ranks in zip(runs, run_each(trained, world, [(run,) for run in runs]), strict=True):
        want = expected(world, run)
        for rank, got in enumerate(ranks):
            assert not differences(got, want), (run, rank)


def test_experts_are_put_together_among_those_that_hold_them() -> None:
    runs = [Run(stage, experts=2) for stage in range(4)]
    whole, *others = run_each(trained, 4, [(run,) for run in runs])
    for got in others:
        assert [differences(mine, theirs) for mine, theirs in zip(got, whole, strict=True)] == [[]] * 4
    assert not torch.equal(whole[0]["parts.large.weight"], whole[1]["parts.large.weight"])
    assert torch.equal(whole[0]["parts.large.weight"], whole[2]["parts.large.weight"])


# What travels, and who works ---------------------------------------------------------------------


def told(comm: Any, run: Run) -> tuple[dict[str, Counter[str]], int, int, int]:
    """Of one step: what lies here of each matrix and which are worked on here; bytes, calls, and work."""
    engine = engine_of(comm, run)
    one_step(engine, comm.rank, 0)
    mine = Counter[str]()
    for group in engine.optimizer.trained:
        for piece in group.master.pieces.values():
            mine[piece.name] += piece.param_range[1] - piece.param_range[0]
    worked, calls, work = Counter[str](), [], []
    of_whole, travel = Orthogonal.of_whole, Communicator.all_to_all_uneven

    def noted(self: Orthogonal, whole: Any, values: Tensor) -> Tensor:
        worked[whole.name] += 1
        work.append(self.work(whole))
        return of_whole(self, whole, values)

    def counted(*given: Any) -> None:
        calls.append(1)
        travel(*given)

    engine.optimizer.communicators.traffic.clear()
    with (
        mock.patch.object(Orthogonal, "of_whole", noted),
        mock.patch.object(Communicator, "all_to_all_uneven", counted),
    ):
        one_step(engine, comm.rank, 1)
    sent = engine.traffic().get("all_to_all", 0)
    engine.destroy()
    return {"mine": mine, "worked": worked}, sent, len(calls), sum(work)


MATRICES = [name for name in SHAPES if name not in (*BY_ADAM, "unused", "frozen", "empty")]
WIRE = 2  # bytes of a bf16 number


@pytest.mark.rotates
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_bytes_are_those_of_pieces_that_are_not_their_owners_there_and_back(world: int) -> None:
    runs = [Run(0), Run(1), Run(2, "bf16"), Run(3, zero={"overlap_comm": False})]
    for run, ranks in zip(runs, run_each(told, world, [(run,) for run in runs]), strict=True):
        alone = world == 1 or run.stage == 0
        for name in (f"parts.{each}.weight" for each in MATRICES):
            times = [facts["worked"][name] for facts, *_ in ranks]
            assert sum(times) == (world if alone else 1), (run, name, "each matrix has one owner")
        for facts, sent, calls, work in ranks:
            mine, worked = facts["mine"], facts["worked"]
            there = sum(n for name, n in mine.items() if name.split(".")[1] in MATRICES and not worked[name])
            back = sum(torch.Size(SHAPES[name.split(".")[1]]).numel() - mine[name] for name in worked)
            assert sent == (0 if alone else WIRE * (there + back)), run
            if not alone:
                assert calls == 2
                largest = max(work for *_, work in ranks)
                assert largest <= sum(work for *_, work in ranks) / world + 5 * 33 * 33 * (2 * 40 + 33)


def in_rounds(comm: Any, overlap: bool) -> tuple[dict[str, Tensor], int]:
    """Eight matrices of a size; and how many collectives have brought them there and back."""
    model = nn.Sequential(*(nn.Linear(9, 9) for _ in range(8)))
    for number, p in enumerate(model.parameters()):
        p.data.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(number)))
    zero = {"overlap_comm": overlap, "reduce_bucket_size": 100}
    keys = config(2, optimizer={"type": "Muon", "params": {"lr": 0.05}}, zero_optimization=zero)
    engine, *_ = zero_full.initialize(model=model, config=keys)
    calls, travel = [], Communicator.all_to_all_uneven
    with mock.patch.object(Communicator, "all_to_all_uneven", lambda *a: (calls.append(1), travel(*a))):
        for step in range(2):
            engine.backward(engine(data(step, 0, comm.rank)[:, :9]).square().mean())
            engine.step()
    found = engine.module_state_dict()
    engine.destroy()
    return found, len(calls)


def test_beside_work_matrices_travel_in_rounds_and_nothing_else_changes() -> None:
    rounds, once = run_each(in_rounds, 2, [(True,), (False,)])
    assert [calls for _, calls in rounds] == [2 * 2 * 4] * 2 and [calls for _, calls in once] == [2 * 2] * 2
    for (mine, _), (theirs, _) in zip(rounds, once, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_the_plan_has_the_memory_of_matrices_on_their_way() -> None:
    run = Run(1, "bf16", zero={"reduce_bucket_size": 100_000, "overlap_comm": False})
    keys = run.keys(2)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 32, bias=False))
    small, large = 64 * 32, 64 * 64
    # Both lie on both ranks: the first rank, which has 3/4 of the large one, makes that orthogonal, and sends
    # what it has of the small one, which is nothing. It is sent a quarter; beside that there is the whole
    # matrix, then what it is now, and what it will be next, and two squares.
    found = plan(model, keys, 2)
    assert found.update >= WIRE * (large // 4 + 3 * large)
    assert found.update <= WIRE * (large // 4 + 3 * large + 2 * large) + 4 * 3 * (small + large) // 2
    assert found.moments == 4 * (small + large) // 2


# Steps that are not taken, and what goes on ------------------------------------------------------


def skipped(comm: Any, run: Run) -> list[str]:
    """A step with one inf on one rank leaves everything as it was."""
    engine = engine_of(comm, run)
    one_step(engine, comm.rank, 0)
    before = values_of(engine)
    bad = numbers(1, 0, comm.rank, engine.module.parts["bias"].weight.dtype)
    if comm.rank == comm.world_size - 1:
        bad["wide"][0, 0] = float("inf")
    engine.backward(engine(bad))
    engine.step()
    wrong = ["it was applied"] if engine.was_step_applied() else []
    wrong += [name for name, value in values_of(engine).items() if not torch.equal(value, before[name])]
    one_step(engine, comm.rank, 2)
    wrong += [name for name, value in values_of(engine).items() if not bool(value.isfinite().all())]
    engine.destroy()
    return wrong


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    runs = [Run(1, "fp16"), Run(3, "fp16")]
    assert run_each(skipped, 2, [(run,) for run in runs]) == [[[], []]] * len(runs)


def saved_after(comm: Any, run: Run, folder: Path, first: int, last: int) -> dict[str, Tensor]:
    """From the checkpoint that is there, if any: some steps, and a new one."""
    engine = engine_of(comm, run)
    engine.load_checkpoint(folder)
    for step in range(first, last):
        one_step(engine, 0, step)
    engine.save_checkpoint(folder)
    found = values_of(engine)
    engine.destroy()
    return found


ELSEWHERE = [
    (2, Run(2)),
    (4, Run(3, zero=PARTS)),
    (1, Run(0)),
    (3, Run(1, zero=HOST)),
    (2, Run(3, zero=HOST)),
]


@pytest.mark.rotates
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_goes_on_at_other_stages_and_numbers_of_ranks_in_the_same_bits(
    precision: str, tmp_path: Path
) -> None:
    for number, (world, run) in enumerate(ELSEWHERE):
        run = replace(run, precision=precision, alike=True)
        ranks = POOL.run(saved_after, world, run, tmp_path, number, number + 1)
        for got in ranks:
            assert not differences(got, expected(1, run, number + 1)), (world, run)
