"""The benchmarks measure what they say. (The numbers themselves are nobody's test.)"""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.bench import interleave, peers, step_time
from tests.bench.interleave import Ratio
from tests.bench.peers import Row, Trainee
from tests.bench.step_time import Found, Plan


def test_every_round_starts_with_another_row_and_misses_none() -> None:
    names = ["a", "b", "c"]
    assert [interleave.order(names, i) for i in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    visited: list[tuple[str, int]] = []

    def visit(name: str, number: int) -> list[float]:
        visited.append((name, number))
        return [float(number)]

    assert interleave.run(names, 2, visit) == {name: [[0.0], [1.0]] for name in names}
    assert visited == [("a", 0), ("b", 0), ("c", 0), ("b", 1), ("c", 1), ("a", 1)]


def test_medians_ranges_and_ratios() -> None:
    ours, theirs = [[1.0, 2.0, 9.0], [3.0, 4.0, 5.0]], [[4.0, 4.0, 4.0], [4.0, 8.0, 100.0]]
    assert interleave.middle(ours) == 3.5
    assert interleave.spread(ours) == (2.0, 4.0)
    found = interleave.ratio("x", ours, theirs, target=0.9)
    assert (found.value, found.low, found.high, found.met) == (3.5 / 4, 0.5, 0.5, True)
    assert interleave.ratio("x", theirs, ours, target=0.9).met is False
    assert interleave.ratio("x", ours, theirs).met is None
    assert interleave.slowest([[[1.0, 5.0]], [[2.0, 4.0]]]) == [[2.0, 5.0]]
    assert interleave.minus(ours, [[1.0, 1.0], [2.0, 4.0]]) == [[0.0, 1.0, 8.0], [0.0, 1.0, 2.0]]


def test_a_ratio_over_nothing_is_no_success() -> None:
    assert interleave.ratio("x", [[-1.0]], [[2.0]], target=1.0).met is False  # lost in the noise
    found = interleave.ratio("x", [[1.0]], [[0.0]], target=1.0)
    assert math.isnan(found.value)
    assert (found.met, found.resolved) == (False, False)
    nothing = {"value": None, "low": None, "high": None, "target": 1.0, "met": False, "resolved": False}
    assert json.loads(interleave.json_line([found], rounds=1)) == {"ratios": {"x": nothing}, "rounds": 1}


def test_a_table_says_whether_a_target_was_met() -> None:
    rows = [
        Ratio("a / b", 0.5, 0.4, 0.6, 1.0),
        Ratio("c / d", 1.5, 1.1, 2.0, 1.0),
        Ratio("e / f", 1, 1, 1),
        Ratio("g / h", 0.9, 0.8, 1.1, 1.0),
    ]
    assert interleave.table(interleave.RATIO_HEAD, [row.cells() for row in rows]).splitlines() == [
        "| ratio | median |     range |  target |                      |",
        "|-------|-------:|----------:|--------:|---------------------:|",
        "| a / b |   0.50 | 0.40-0.60 | <= 1.00 |                  met |",
        "| c / d |   1.50 | 1.10-2.00 | <= 1.00 |              NOT met |",
        "| e / f |   1.00 | 1.00-1.00 |         |                      |",
        "| g / h |   0.90 | 0.80-1.10 | <= 1.00 | met, rounds disagree |",
    ]


def test_loopback_is_read_from_the_right_column(tmp_path: Path) -> None:
    file = tmp_path / "dev"
    file.write_text(" face |bytes\n  eth0: 7 0 0 0 0 0 0 0 8\n    lo: 1 2 3 4 5 6 7 8 99 10\n")
    assert interleave.loopback_bytes(file) == 99
    assert interleave.loopback_bytes(tmp_path / "none") is None


def test_every_storage_behind_a_row_counts_once() -> None:
    model = nn.Linear(3, 5, bias=False)
    model.weight.grad = torch.zeros(5, 3)
    buffer = torch.zeros(100)
    hidden = {"view": buffer[:10], "again": [buffer], "weight": model.weight, "grad": model.weight.grad}
    step = (lambda kept: lambda: kept)(torch.zeros(7))  # a closure keeps a tensor alive
    trainee = Trainee(model, lambda x, y: x, step, (hidden, step), unseen=lambda: 1000)
    assert peers.held(trainee) == {"parameters": 60, "gradients": 60, "other": 400 + 28 + 1000}


def test_what_is_not_installed_is_said_and_left_out() -> None:
    step = [[0.002, 0.002]]
    found = {"DDP": Found(parameters=1, step=step, backward=step), "DeepSpeed 1": Found("not installed")}
    found["zero_full 1"] = Found(parameters=1, step=[[0.001, 0.001]], backward=step)
    lines = step_time.report(found).splitlines()
    assert "not installed" in lines[3]
    names = [r.name for r in step_time.ratios(Plan("50k", "fp32", tuple(found)), found)]
    assert names == ["50k fp32: zero_full 1 / DDP"]


def test_targets_of_bf16_are_about_the_added_time() -> None:
    found = {
        name: Found(parameters=1, step=[[seconds] * 3], backward=[[seconds] * 3])
        for name, seconds in [("forward+backward", 4), ("DDP", 6), ("DeepSpeed 2", 8), ("zero_full 2", 5)]
    }
    values = {r.name: (r.value, r.target) for r in step_time.ratios(Plan("50k", "bf16", ()), found)}
    assert values == {
        "50k bf16: added time, zero_full 2 / DeepSpeed 2": (0.25, 0.5),
        "50k bf16: added time, zero_full 2 / DDP": (0.5, 0.7),
    }


@pytest.mark.parametrize("keep", [True, False], ids=["all alive", "one at a time"])
def test_a_small_run_of_torchs_own_rows(keep: bool) -> None:
    """Right losses, right bytes; and a row that forgets to average is seen by its losses."""
    rows = ("forward+backward", "loop", "DDP", "ZeroRedundancyOptimizer")
    plan = Plan("50k", "fp32", rows, rounds=1, warmup=4, steps=2, keep=keep)
    found = step_time.measure(plan, limit=60)
    assert all(len(found[name].step[0]) == 2 and min(found[name].step[0]) > 0 for name in rows)
    n = found["loop"].parameters
    held = {name: {when: sum(kinds.values()) for when, kinds in found[name].held.items()} for name in rows}
    assert held["forward+backward"] == {"after backward": 8 * n, "between steps": 4 * n}
    for name, between in [("loop", 12), ("DDP", 16)]:  # DDP keeps its buckets
        small = held[name]["between steps"] - between * n
        assert 0 <= small <= 4 * 100  # AdamW counts its steps, once a parameter
    assert step_time.loss_differences(found)["ZeroRedundancyOptimizer"] <= step_time.TOLERANCE
    alone = {"DDP": found["DDP"], "FSDP2": found["loop"]}  # a loop that says it is data parallel
    assert step_time.loss_differences(alone)["FSDP2"] > step_time.TOLERANCE
    if found["DDP"].loopback:
        assert found["DDP"].loopback[0] > 4 * n  # an all-reduce at N = 2: every byte once
    assert "NOT" not in step_time.report(found)


def test_a_row_has_someone_to_be_compared_with() -> None:
    for name, row in peers.ROWS.items():
        assert isinstance(row, Row)
        assert row.compared_with in {"", *peers.ROWS}, name
