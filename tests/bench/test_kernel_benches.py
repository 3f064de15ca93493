"""Benchmarks of the CUDA operators, as far as they go without a GPU, and the table of what is compiled."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.bench import interleave, kernel_sizes, kernels_gpu
from tests.bench.kernel_rows import Row, Topic, Versus
from tests.kernels.cases import ops
from tests.kernels.cubin import ARCHITECTURES, Kernel, Usage
from zero_full.kernels import load

CPU = torch.device("cpu")
NUMEL = 12_800


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    ops()
    monkeypatch.setattr(kernels_gpu, "WIDTH", 32)
    monkeypatch.setattr(kernels_gpu, "CHECKED", NUMEL)


@pytest.mark.parametrize("name", kernels_gpu.TOPICS)
def test_every_topic_is_checked_measured_and_compared(name: str) -> None:
    kernels_gpu.check(name, CPU)
    topic = kernels_gpu.with_copies(kernels_gpu.TOPICS[name](NUMEL, CPU), NUMEL, CPU)
    found = kernels_gpu.measure(topic, 2, CPU)
    assert set(found) == set(topic.rows)
    assert all(len(each) == kernels_gpu.SAMPLES for series in found.values() for each in series)
    assert len(kernels_gpu.report(topic, NUMEL, found).splitlines()) == 2 + len(found)
    with_target = [r for r in kernels_gpu.ratios(name, topic, found) if r.target]
    assert len(with_target) == sum(row.startswith("zero_full") for row in topic.rows)


def test_many_tensors_are_all_elements() -> None:
    sizes = kernels_gpu.many(NUMEL)
    assert sum(sizes) == NUMEL and len(sizes) == 9 and 0 < sizes[-1] < sum(sizes[:4])


def test_a_row_that_computes_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def topic(numel: int, device: torch.device) -> Topic:
        rows = {
            "zero_full": Row(lambda: [torch.ones(3)]),
            "torch": Row(lambda: [torch.zeros(3)], like="zero_full"),
        }
        return Topic(rows, ())

    monkeypatch.setitem(kernels_gpu.TOPICS, "wrong", topic)
    with pytest.raises(AssertionError, match="wrong: result 0 of torch"):
        kernels_gpu.check("wrong", CPU)


def arguments_of(name: str, rows: dict[str, Row], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """What a row's call gives to the operator."""
    seen: list[tuple[Any, ...]] = []
    real = load.operators(CPU)

    def spy(operator: str) -> Any:
        def call(*arguments: Any) -> Any:
            seen.append(arguments)
            return getattr(real, operator)(*arguments)

        return call

    spies = SimpleNamespace(
        **{each: spy(each) for each in ("adam_step", "quantize_blocks", "unscale_norm_check")}
    )
    with monkeypatch.context() as patched:
        patched.setattr(load, "operators", lambda device: spies)
        rows[name].call()
    return seen[0]


@pytest.mark.parametrize(
    ("topic", "row", "touched"),
    [
        ("adam", "zero_full", [2, 1, 2, 2, 0, 2]),  # how often each list of tensors is read or written
        ("adam, many tensors", "zero_full", [2, 1, 2, 2, 0, 2]),
        ("adam, other types", "zero_full, no copy", [2, 1, 2, 2, 0, 0]),
        ("adam, other types", "zero_full, bf16 moments", [2, 1, 2, 2, 0, 2]),
        ("unscale", "zero_full, bf16", [2]),
        ("unscale", "zero_full, fp32, factor 1", [1]),
        ("blocks", "zero_full, to int8", [1, 1]),
        ("blocks", "zero_full, to int4", [1, 1]),
    ],
)
def test_bytes_are_those_of_the_tensors(
    topic: str, row: str, touched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = kernels_gpu.TOPICS[topic](NUMEL, CPU).rows
    moved = 0
    for times, argument in zip(touched, arguments_of(row, rows, monkeypatch), strict=False):
        tensors = argument if isinstance(argument, list) else [argument]
        moved += times * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert moved == pytest.approx(rows[row].bytes * NUMEL, rel=1e-3)


def test_the_share_of_a_copys_speed_and_its_aim() -> None:
    rows = {"copy, 4 B": Row(lambda: (), 4), "zero_full": Row(lambda: (), 4), "torch": Row(lambda: ())}
    topic = Topic(rows, (Versus("zero_full", ("copy, 4 B",), 1 / kernels_gpu.AIM),))
    found = {"copy, 4 B": [[0.8]], "zero_full": [[1.0]], "torch": [[2.0]]}
    lines = [line.split("|")[1:-1] for line in kernels_gpu.report(topic, 10**9, found).splitlines()]
    assert [cell.strip() for cell in lines[3]] == ["zero_full", "1000.000", "1000.000-1000.000", "4", "0.80"]
    assert [cell.strip() for cell in lines[4]][3:] == ["", ""]
    (ratio,) = kernels_gpu.ratios("x", topic, found)
    assert (ratio.value, ratio.met) == (1.25, False)
    found["zero_full"] = [[0.88]]
    assert kernels_gpu.ratios("x", topic, found)[0].met is True


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_nothing_is_measured() -> None:
    command = [sys.executable, "-m", "tests.bench.kernels_gpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    said = "kernels_gpu: no CUDA device, so nothing was measured\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


def test_the_table_of_kernels_has_the_least_and_the_most_of_all_variants() -> None:
    usages = [
        Usage(Kernel("a.cu", name, (kind,)), architecture, registers, 8 * (kind == "f16"), 0, 4 * spills, 0)
        for architecture in ARCHITECTURES
        for name, kind, registers, spills in (("f", "f16", 30, 0), ("f", "bf16", 40, 1), ("g", "f16", 50, 0))
    ]
    rows = kernel_sizes.kernel_rows(usages)
    assert rows == [
        ["a.cu f", "2", *["30-40"] * len(ARCHITECTURES), "0-8", "0-4"],
        ["a.cu g", "1", *["50"] * len(ARCHITECTURES), "8", "0"],
    ]
    assert len(interleave.table(kernel_sizes.HEAD, rows).splitlines()) == 4
