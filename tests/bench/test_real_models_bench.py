"""The benchmark of real models: which visits are still to be made, and what its tables say."""

import argparse
from typing import Any

import pytest

from tests.bench import real_models
from tests.bench.real_models import LOOP, TRAINER, Case, pending

ASKED = argparse.Namespace(
    rounds=2,
    ranks=[2],
    models=["GPT2-124M"],
    dtypes=["fp32"],
    ways=[TRAINER, LOOP],
    rows=["zero_full 2", "DDP"],
    tokens=128,
    warmup=1,
    steps=2,
)


def visit(row: str, way: str = LOOP, **found: Any) -> dict[str, Any]:
    """A visit as the file has it."""
    steps = 8 if way == "products" else 2
    job = {"model": "GPT2-124M", "dtype": "fp32", "way": way, "row": row, "ranks": 2, "tokens": 128}
    return {**job, "warmup": 0 if way == "products" else 1, "steps": steps, **found}


def results(*visits: dict[str, Any]) -> dict[str, Any]:
    """The contents of the file."""
    return {"flops": {"GPT2-124M, 128": 10**11}, "visits": list(visits)}


def test_a_call_makes_the_visits_that_the_file_lacks() -> None:
    products = visit("", "products", seconds=[1.0] * 8)
    done = results(products, visit("DDP", seconds=[1.0, 1.0]), visit("DDP", TRAINER, missing="no"))
    left = [(job.way, job.row) for job in pending(ASKED, done)]
    first = [(TRAINER, "zero_full 2"), (LOOP, "zero_full 2")]
    second = [("products", ""), (LOOP, "zero_full 2"), (LOOP, "DDP"), (TRAINER, "zero_full 2")]
    assert left == [*first, *second]


def test_a_table_says_what_was_measured_and_what_could_not_be() -> None:
    rate = 2 * real_models.SIZE**3  # a product in a second
    found = results(
        visit("", "products", seconds=[1.0, 2.0, 1.0]),
        visit("DDP", seconds=[4.0, 4.0], peak=2**30, losses=[5.0, 4.0]),
        visit("zero_full 2", seconds=[2.0, 2.0], peak=2**29, losses=[5.0, 4.25]),
        visit("FSDP2", missing="not here"),
    )
    case = Case(found, "GPT2-124M", 2, "fp32")
    mfu = 10**11 / 2 / rate
    assert case.cells(LOOP, "zero_full 2") == [
        "zero_full 2",
        "128",
        "0.50",
        "0.50-0.50",
        "512",
        f"{mfu:.2f}",
        "0.2",
    ]
    assert {*case.cells(LOOP, "FSDP2")} == {"FSDP2", "-"}
    assert case.notes(LOOP, ["DDP", "FSDP2"]) == ["FSDP2: not here"]
    assert f"| loop, zero_full 2 | 128, 0.5, {mfu:.2f} |" in " ".join(real_models.short(found).split())
    assert "FSDP2" not in real_models.short(found)


def test_ratios_take_the_rounds_that_both_rows_have(capsys: pytest.CaptureFixture[str]) -> None:
    found = results(
        visit("", "products", seconds=[1.0]),
        *[visit("DDP", seconds=[seconds], peak=1, losses=[1.0]) for seconds in (1.0, 2.0)],
        visit("zero_full 2", seconds=[3.0], peak=1, losses=[1.0]),
    )
    ratios = {ratio.name: ratio.value for ratio in real_models.report(found)}
    assert ratios == {"GPT2-124M, fp32, 2 ranks, loop: zero_full 2 / DDP": 3.0}
    assert "## GPT2-124M, fp32, 2 ranks, loop" in capsys.readouterr().out
