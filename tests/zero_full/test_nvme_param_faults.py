"""Parameters that wait in a file, on a disk that fails: a clear error on all ranks, and nothing is lost."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import data
from tests.zero_full.stage3_runs import whole_bytes
from tests.zero_full.test_nvme_params import engine_of, go, settle, shelf_of
from tests.zero_full.test_nvme_state import files_no_longer_than, refused, states


def disk_full(comm: Any, path: str, keys: dict[str, Any]) -> tuple[str, bool, bool]:
    """One rank cannot write in the third step. Returns the refusal; whether all is right, here and saved."""
    zero_dir = Path(path) / "parameters"
    engine, other = engine_of(zero_dir, **keys), engine_of(zero_dir, **keys)
    go(other, 0, 1, 2, rank=comm.rank)
    go(engine, 0, 1, rank=comm.rank)
    settle(engine)
    with files_no_longer_than(4096 if comm.rank == 0 else resource.RLIM_INFINITY):
        go(engine, 2, rank=comm.rank)
        settle(engine)
    try:
        go(engine, 3, rank=comm.rank)
        refusal = ""
    except RuntimeError as error:
        refusal = str(error)
    engine.optimizer.zero_grad()
    engine.save_checkpoint(Path(path) / "saved")
    same = all(torch.equal(a, b) for a, b in zip(*map(states, (engine, other)), strict=True))
    again = engine_of(zero_dir, **keys)
    again.load_checkpoint(Path(path) / "saved")
    resumed = all(torch.equal(a, b) for a, b in zip(*map(states, (again, other)), strict=True))
    go(again, 3, rank=comm.rank)
    for each in (engine, other, again):
        each.destroy()
    return refusal, same, resumed


@pytest.mark.parametrize("keys", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_a_full_disk_loses_nothing(keys: dict[str, Any], tmp_path: Path) -> None:
    first, second = POOL.run(disk_full, 2, str(tmp_path), keys)
    assert (
        "parameters cannot be written to" in first[0] and "a checkpoint now, after zero_grad" in first[0]
    ), first
    assert "another rank failed" in second[0]
    assert first[1:] == second[1:] == (True, True)


def damaged(comm: Any, path: str, how: str, trains: bool) -> list[str]:
    engine = engine_of(path)
    go(engine, 0, 1, rank=comm.rank)
    settle(engine)
    if comm.rank == 1:
        file = shelf_of(engine).file
        if how == "truncated":
            os.ftruncate(file._file, 4096)
        else:
            for begin in range(0, file.size, 4096):
                os.pwrite(file._file, b"x", begin)

    def evaluate() -> None:
        with torch.no_grad():
            engine(data(2, 0, comm.rank))

    def read() -> None:
        with zero_full.GatheredParameters(list(engine.module.parameters())):
            pass

    told = []
    acts = (lambda: go(engine, 2, rank=comm.rank),) if trains else (evaluate, evaluate, read)
    acts = (*acts, engine.module_state_dict)
    for act in (*acts, lambda: go(engine, 3, rank=comm.rank)):
        try:
            act()
        except RuntimeError as error:
            told.append(str(error))
        engine.optimizer.zero_grad()
    try:
        engine.save_checkpoint(Path(path) / "saved")
    except zero_full.CheckpointError as error:
        told.append(str(error))
    assert not whole_bytes(engine)
    engine.destroy()
    return told


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluating"])
@pytest.mark.parametrize(
    ("how", "why"), [("truncated", "too few to read"), ("changed", "not those that were written")]
)
def test_a_damaged_file_is_an_error_on_all_ranks(how: str, why: str, trains: bool, tmp_path: Path) -> None:
    for rank, told in enumerate(POOL.run(damaged, 2, str(tmp_path), how, trains)):
        assert len(told) == (4 if trains else 6), told
        for each in told[:-1]:
            if rank == 1:
                assert "cannot be read" in each and why in each, told
            else:
                assert "another rank" in each, told
        assert "cannot be read" in told[-1]


def test_too_little_space_is_told_before_anything_is_written(tmp_path: Path) -> None:
    for told in POOL.run(refused, 2, str(tmp_path), 1000, engine_of):
        assert "has 1.00 kB free" in told and "needs 65.5 kB" in told, "two ranks, 8 pages each"


def test_a_place_where_nothing_can_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for told in POOL.run(refused, 2, str(tmp_path / "file" / "below"), None, engine_of):
        assert str(tmp_path / "file") in told
