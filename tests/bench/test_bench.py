"""The benchmarks measure what they say. (The numbers themselves are nobody's test.)"""

import ctypes
import json
import math
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.bench import compare, interleave, kernel_rows, kernels, peers, step_time
from tests.bench.interleave import Ratio
from tests.bench.kernel_rows import Topic, Versus
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
    assert found.cells()[2] == "noise"
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


def test_a_verdict_is_resolved_if_every_round_agrees_with_the_median() -> None:
    assert Ratio("of other rounds", 0.9, 1.1, 1.2, 1.0).resolved is False
    assert Ratio("below", 0.9, 0.8, 0.95, 1.0).resolved and Ratio("above", 1.1, 1.05, 1.2, 1.0).resolved


def test_a_benchmark_says_when_where_and_how_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_FULL_KERNELS", "off")
    monkeypatch.setattr("sys.argv", ["whatever.py", "--rows", "zero_full 1"])
    monkeypatch.setattr("sys.modules", {**sys.modules, "__main__": interleave})
    said = interleave.heading()
    assert date.today().isoformat() in said and f"torch {version('torch')}" in said
    assert "ZERO_FULL_KERNELS=off python -m tests.bench.interleave --rows 'zero_full 1'\n" in said


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


def test_throughput_counts_tokens_and_operations_of_a_rank() -> None:
    plan = Plan("125M", "bf16", ())
    loop = Found(parameters=10**8, device="NVIDIA H100 80GB HBM3", step=[[0.5] * 3])
    found = {"loop": loop, "DDP": Found("not installed")}
    flops = 6 * 10**8 + 12 * 12 * 768 * 1024  # a token: parameters, and attention of twelve layers
    rows = step_time.throughput(plan, found)
    rate = 8 * 1024 / 0.5
    assert rows == {
        "loop": {
            "tokens/s": rate,
            "TFLOP/s": round(rate * flops / 1e12, 3),
            "MFU": round(rate * flops / 989e12, 4),
        }
    }
    loop.device = "a CPU"
    unknown = step_time.throughput(plan, found)
    assert unknown["loop"]["MFU"] is None
    assert step_time.throughput_table(unknown).splitlines()[2].split("|")[4].strip() == ""


@pytest.mark.rotates
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


@pytest.mark.parametrize("topic", kernel_rows.TOPICS)
def test_what_is_compared_with_an_operator_computes_the_same(topic: str) -> None:
    kernels.check(topic)


def test_a_row_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def topic(numel: int) -> Topic:
        right, wrong = torch.ones(numel), torch.ones(numel)
        wrong[-1] = 1.001
        rows = {
            "ours": kernel_rows.Row(lambda: [right]),
            "cheat": kernel_rows.Row(lambda: [wrong], like="ours"),
        }
        return Topic(rows, ())

    monkeypatch.setitem(kernel_rows.TOPICS, "topic", topic)
    with pytest.raises(ArithmeticError, match="topic: result 0 of cheat is not that of ours"):
        kernels.check("topic")


@pytest.mark.parametrize("places", [1, 4])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_ceiling_of_one_array_leaves_no_element_out(places: int, threads: int) -> None:
    numel = 3 * 2**15 + 64  # grains, and a rest
    x = torch.arange(numel, dtype=torch.float32)
    size, before = ctypes.c_int64(numel), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kernel_rows.stream("zf_scale_stream", [x], ctypes.c_float(2), size, ctypes.c_int(places))()
        assert torch.equal(x, 2 * torch.arange(numel))
        for place in (0, 2**15 + 5, 2**15 + 2**13 + 5, 2**16 - 1, numel - 1):
            bits = torch.zeros(numel, dtype=torch.int32)
            bits[place] = 8
            address = ctypes.c_void_p(bits.data_ptr())
            assert kernel_rows.streams().zf_read_stream(address, size, ctypes.c_int(places)) == 8
    finally:
        torch.set_num_threads(before)


def test_the_ceiling_of_adam_moves_all_its_arrays() -> None:
    numel = 2**15 + 64
    p, m, v = (torch.full((numel,), x) for x in (1.0, 2.0, 3.0))
    grad, copy = torch.arange(numel, dtype=torch.int16), torch.zeros(numel, dtype=torch.int16)
    numbers = ctypes.c_float(2), ctypes.c_uint16(0), ctypes.c_int64(numel)
    kernel_rows.stream("zf_adam_streams", [p, m, v, grad, copy], *numbers)()
    for array, was in ((p, 1.0), (m, 2.0), (v, 3.0)):
        assert array.eq(2 * was).all()
    assert torch.equal(copy, grad)


def test_the_faster_ceiling_counts_and_who_is_not_installed_does_not() -> None:
    rows = {row: kernel_rows.Row(lambda: []) for row in ("ours", "in order", "4 places")}
    versus = (Versus("ours", ("in order", "4 places"), 1.1), Versus("ours", ("DeepSpeed",), 0.25))
    spent = {"ours": 6.0, "in order": 5.0, "4 places": 4.0}
    found = {("x", 2, row): kernels.Times([[seconds]], [1.9]) for row, seconds in spent.items()}
    (only,) = kernels.ratios({"x": Topic(rows, versus)}, [2], found)
    assert (only.name, only.value, only.met) == ("x, 2 threads: ours / 4 places", 1.5, False)


def test_a_small_run_of_kernels_visits_every_row_with_every_number_of_threads() -> None:
    seen: list[tuple[str, int]] = []

    def row(name: str) -> kernel_rows.Row:
        return kernel_rows.Row(lambda: seen.append((name, torch.get_num_threads())) or [], bytes=8)

    before = torch.get_num_threads()
    topics = {"x": Topic({"a": row("a"), "b": row("b")}, ())}
    found = kernels.measure(topics, [1, 2], rounds=2)
    assert torch.get_num_threads() == before
    calls = 1 + kernels.SAMPLES  # the first is not timed
    assert {key: seen.count(key) for key in seen} == dict.fromkeys(
        [("a", 1), ("a", 2), ("b", 1), ("b", 2)], 2 * calls
    )
    assert all([len(one) for one in times.seconds] == [kernels.SAMPLES] * 2 for times in found.values())
    report = kernels.report(topics, 1000, found)
    assert [line for line in report.splitlines() if line.startswith("##")] == [
        "## x, 1 thread",
        "## x, 2 threads",
    ]


@pytest.mark.parametrize(
    ("ratios", "fails"),
    [
        ([1.0, 1.02, 0.97, 1.04], False),
        ([1.08, 1.09, 1.07, 1.1], True),
        ([0.8, 1.3, 0.9, 1.4], False),  # the rounds disagree
        ([0.5, 0.6, 0.5, 0.4], False),
        ([1.2], True),
    ],
)
def test_a_row_fails_if_it_is_slower_beyond_its_noise(ratios: list[float], fails: bool) -> None:
    verdict = compare.Verdict("stage3", 0.1, 0.1, ratios)
    assert verdict.fails == fails and ("SLOWER" in verdict.cells()) == fails
