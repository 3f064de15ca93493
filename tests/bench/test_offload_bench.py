"""The benchmark of offload measures what it says. (The numbers themselves are nobody's test.)"""

import json
from pathlib import Path

import pytest
import torch

from tests.bench import offload, offload_gpu, offload_rows
from tests.bench.offload import Limits, in_ranks
from tests.bench.offload_disk import DiskFound, anonymous, peak_memory
from tests.bench.offload_rows import (
    DELAYED,
    DISK,
    HOST,
    INSIDE,
    KEPT,
    RELEASED,
    STAGES,
    away,
    here,
    linked,
    theirs,
)
from tests.bench.step_time import TOLERANCE, Found, Plan, loss_differences

SMALL = Plan("50k", "fp32", (), rounds=1, warmup=2, steps=1, bucket=20_000, overlap=False)
MS = 1e-3


def timed(step: float, backward: float = 0.0) -> Found:
    return Found(parameters=10, step=[[step] * 3], backward=[[backward] * 3])


@pytest.mark.rotates
def test_every_row_trains_as_without_offload(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--size", "50k", "--rounds", "1", "--steps", "1", "--bucket", "20000", "--limit", "120"]
    offload.main(["--topics", "peers", *sizes])
    said = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.split("|")] for line in said.splitlines() if line[:1] == "|"]
    table = {cells[1]: cells[2:-1] for cells in lines}
    missing = {name for name, cells in table.items() if cells[0] == "not installed"}
    assert missing <= {theirs(stage)[0] for stage in STAGES} and "DIFFERS" not in said
    assert all(table[away(stage)][-1] == "0e+00" for stage in STAGES), "not the same losses"
    assert all(float(table[name][-1]) <= TOLERANCE for name in (KEPT, RELEASED))
    ratios = json.loads(said.splitlines()[-1])["ratios"]
    assert {f"{away(1)} / {here(1)}", f"{away(1)} / {KEPT}", f"{away(3)} / {RELEASED}"} <= {*ratios}


def test_the_aim_is_about_the_better_peer() -> None:
    found = {name: timed(1.0) for name in offload_rows.of_peers()}
    found[away(1)], found[KEPT], found[theirs(2)[0]] = timed(0.7), timed(0.9), Found("not installed")
    ratios = {ratio.name: ratio for ratio in offload.peer_ratios(found)}
    assert ratios[f"{away(1)} / {KEPT}"].target == offload.PEER_TARGET
    assert ratios[f"{away(1)} / {KEPT}"].met is False  # though it is, beside the other
    assert ratios[f"{away(1)} / {theirs(1)[0]}"].target is None
    assert ratios[f"{away(2)} / {KEPT}"].value == pytest.approx(1 / 0.9)
    assert f"{away(2)} / {theirs(2)[0]}" not in ratios


@pytest.mark.rotates
def test_the_disk_is_measured_beside_the_rows_and_its_bytes_are_the_states(tmp_path: Path) -> None:
    (found,) = in_ranks(offload.disk_main, 1, SMALL, Limits(str(tmp_path), 1, in_memory=0), limit=60)
    assert {*found.rows} == {INSIDE, HOST, DISK} and len(found.reads) == len(found.writes) == SMALL.rounds
    numel = found.rows[DISK].parameters
    assert all(12 * numel <= moved < 13.5 * numel for moved in (found.read, found.written))
    assert all(seconds > 0 for seconds in found.moving()) and not [*tmp_path.iterdir()]
    grown = in_ranks(peak_memory, 1, SMALL, str(tmp_path), DISK, limit=60)[0]
    assert grown is None if anonymous() is None else grown > 4 * numel


def test_the_floor_is_the_longer_of_computing_and_moving_in_each_round() -> None:
    rows = {HOST: timed(30 * MS, 20 * MS), DISK: timed(45 * MS, 20 * MS)}
    slow = DiskFound(rows, reads=[[1e9]], writes=[[5e8]], read=10**7, written=5 * 10**6)
    assert slow.moving() == [pytest.approx(20 * MS)]
    values = {ratio.name: ratio.value for ratio in offload.disk_ratios(slow)}
    assert values["update on the disk / max(on the host, bytes / bandwidth)"] == pytest.approx(25 / 20)
    assert values["step on the disk / max(on the host, bytes / bandwidth)"] == pytest.approx(45 / 30)
    fast = DiskFound(rows, reads=[[1e12]], writes=[[1e12]], read=10**7, written=10**7)
    assert offload.disk_ratios(fast)[0].value == pytest.approx(25 / 10)


@pytest.mark.rotates
def test_copies_of_a_step_are_noted_at_their_bandwidth() -> None:
    rows = offload_rows.of_links()
    plan = Plan(**{**vars(SMALL), "rows": tuple(rows)})
    ((found, copying),) = in_ranks(offload.link_main, 1, plan, limit=60)
    nbytes = 4 * found[linked(None)].parameters
    for bandwidth in offload_rows.BANDWIDTHS:
        (seconds,) = copying[linked(bandwidth)]
        assert seconds >= nbytes / bandwidth / 1e9  # each way so many, and both ways may go at once
    differences = loss_differences(found, rows)
    assert {*differences} == {*rows} and not any(differences.values())


def test_hidden_is_what_a_step_does_not_get_longer_by() -> None:
    names = [linked(None), linked(1.0), linked(2.0)]
    found = dict(zip(names, map(timed, (0.10, 0.13, 0.12)), strict=True))
    copying = dict(zip(names, ([0.01], [0.05], [0.03]), strict=True))
    parts = [offload.hidden_part(found, copying, name) for name in names]
    assert parts == [None, pytest.approx(1 - 0.03 / 0.04), pytest.approx(0)]


def event(
    name: str, begin: float, length: float, cat: str = "gpu_memcpy", nbytes: int = 0
) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": length, "args": {"bytes": nbytes}}


def test_a_trace_says_what_runs_beside_copies_and_how_fast_they_are() -> None:
    events = [
        event("Memcpy DtoH (Device -> Pinned)", 0, 100, nbytes=2_000_000),
        event("gemm", 50, 100, "kernel"),
        event("Memcpy HtoD (Pinned -> Device)", 200, 100, nbytes=1_000_000),
        event("zero_full::adam_step", 250, 100, "cpu_op"),
        event("aten::copy_", 200, 100, "cpu_op"),
    ]
    kept = [one for one in events if offload_gpu.counts(one)]
    assert len(kept) == 4
    assert offload_gpu.of_trace({"traceEvents": kept}, 1) == ["0.2", "0.50", "20.0", "10.0"]


@pytest.mark.rotates
def test_every_tier_trains_as_without_offload_and_is_traced(tmp_path: Path) -> None:
    rows = offload_rows.of_tiers(str(tmp_path))
    plan = Plan(**{**vars(SMALL), "rows": tuple(rows), "keep": False})  # one row alive at a time
    ((found, traces),) = in_ranks(offload_gpu.trace_main, 1, plan, str(tmp_path), limit=120)
    assert {*found} == {*traces} == {*rows} and all(row.step for row in found.values())
    differences = loss_differences(found, rows)
    assert {*differences} == {*rows} - {INSIDE, DELAYED} and not any(differences.values())
    assert torch.cuda.is_available() or offload_gpu.of_trace(traces[HOST], 1)[0] == "0.0"
    assert next(ratio.name for ratio in offload_gpu.tier_ratios(found)) == f"{DELAYED} / {HOST}"
