"""The calculator's page says what `zero_full.plan` says, to the byte."""

import contextlib
import io
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import calculator
import pytest
import torch
from places import SiteError
from torch import nn

from tests.site.browser import Open
from zero_full.plan import activations, human, plan
from zero_full.precision.dtypes import Dtypes
from zero_min import formula
from zero_min.gpt import GPT, GPTConfig

pytest_plugins = ["tests.site.fixtures"]

KINDS = (
    "parameters",
    "gradients",
    "master",
    "moments",
    "gathered",
    "buckets",
    "activations",
    "update",
    "sent",
    "host",
    "disk",
)
KEPT = KINDS[:4]


def configured(run: dict[str, Any], **zero: Any) -> dict[str, Any]:
    """What the page means by a run, as a configuration."""
    return {
        "train_micro_batch_size_per_gpu": run["batch"],
        "gradient_accumulation_steps": run["microBatches"],
        "optimizer": calculator.OPTIMIZERS[run["optimizer"]][1],
        **calculator.PRECISIONS[run["precision"]][1],
        "zero_optimization": {"stage": run["stage"], **zero},
    }


def planned(shape: dict[str, int], run: dict[str, Any]) -> dict[str, int]:
    with torch.device("meta"):
        model = GPT(GPTConfig(**shape))
        tokens = torch.empty(run["batch"], shape["context"], dtype=torch.int64)
    parameter = calculator._settings(0, precision=run["precision"]).dtypes.parameter
    saved = activations(model, [tokens, tokens], Dtypes(parameter))
    # The page adds peaks, of modules in the order of registration: as a plan without inputs.
    each = replace(plan(model, configured(run), run["ranks"]), activations=saved)
    found = {kind: getattr(each, kind) for kind in KINDS}
    return {**found, "kept": each.between_steps, "peak": each.peak}


def runs(seed: int, count: int) -> Iterator[tuple[random.Random, dict[str, Any]]]:
    """Random runs; every stage and precision comes often."""
    generator = random.Random(seed)
    for place in range(count):
        yield (
            generator,
            {
                "stage": place % 4,
                "precision": list(calculator.PRECISIONS)[place % len(calculator.PRECISIONS)],
                "optimizer": generator.choice(list(calculator.OPTIMIZERS)),
                "ranks": generator.choice([1, 2, 3, 4, 7, 8, 64, 100, 513]),
                "batch": generator.choice([1, 2, 5]),
                "microBatches": generator.choice([1, 1, 2, 3, 8]),
            },
        )


def shapes(generator: random.Random) -> dict[str, int]:
    """From one where everything is small to one that must be gathered layer by layer."""
    heads = generator.choice([1, 2, 3, 8, 16])
    return {
        "layers": generator.choice([1, 2, 3, 9]),
        "heads": heads,
        "width": heads * generator.choice([8, 12, 64, 128, 256]),
        "vocabulary": generator.choice([76, 1000, 50257, 128256]),
        "context": generator.choice([16, 64, 100, 1024]),
    }


# 20 have every stage with every precision once.
many = pytest.mark.parametrize("count", [20, pytest.param(60, marks=pytest.mark.slow)])


@many
def test_a_gpt_costs_what_the_plan_says_in_random_runs(open_page: Open, count: int) -> None:
    cases = [(shapes(generator), run) for generator, run in runs(0, count)]
    page = open_page("calculator.html")
    shown = page.evaluate("cases => cases.map(([shape, run]) => zeroPlan.ofShape(shape, run))", cases)
    for (shape, run), each in zip(cases, shown, strict=True):
        assert each == planned(shape, run), (shape, run)


@pytest.mark.rotates
def test_a_large_model_meets_the_limits_of_buckets_gathering_and_sub_groups(open_page: Open) -> None:
    shape = {"layers": 24, "heads": 16, "width": 6144, "vocabulary": 50257, "context": 256}
    cases = [
        (shape, {**run, "stage": stage, "precision": precision, "batch": 1, "ranks": ranks})
        for stage, precision, ranks in [(1, "mixed", 4), (2, "mixed16", 3), (3, "mixed16", 2), (3, "fp32", 8)]
        for _, run in runs(1, 1)
    ]
    page = open_page("calculator.html")
    shown = page.evaluate("cases => cases.map(([shape, run]) => zeroPlan.ofShape(shape, run))", cases)
    assert shown == [planned(*case) for case in cases]


@pytest.mark.rotates
@many
def test_a_number_of_parameters_costs_what_matrices_without_padding_cost(open_page: Open, count: int) -> None:
    """Where there is nothing to pad, what is kept is exact; what stage 3 sends is the most it can be."""
    page = open_page("calculator.html")
    for generator, run in runs(2, count):
        rows = 8 * run["ranks"] * generator.choice([16, 40])
        with torch.device("meta"):
            layers = [nn.Linear(1024, rows, bias=False) for _ in range(generator.choice([2, 5, 9]))]
        numel = 1024 * rows * len(layers)
        shown = page.evaluate("([numel, run]) => zeroPlan.ofCount(numel, run)", [numel, run])
        model = nn.Sequential(*layers)
        each = plan(model, configured(run, stage3_max_reuse_distance=0), run["ranks"])
        assert {kind: shown[kind] for kind in KEPT} == {kind: getattr(each, kind) for kind in KEPT}, run
        assert shown["kept"] == each.between_steps and shown["sent"] == each.sent, run
        assert shown["sent"] >= plan(model, configured(run), run["ranks"]).sent
        assert shown["peak"] is None and shown["activations"] is None


AWAY = ("host", "disk", "down", "up")


@pytest.mark.rotates
@many
def test_what_waits_elsewhere_is_what_the_plan_says_in_random_runs(open_page: Open, count: int) -> None:
    large = {"layers": 24, "heads": 16, "width": 6144, "vocabulary": 50257, "context": 256}
    cases = [
        (shapes(generator), {**run, "stage": max(1, run["stage"]), "state": ("nvme", "cpu")[place % 2]})
        for place, (generator, run) in enumerate(runs(4, count))
    ]
    cases += [(large, {**cases[0][1], "stage": stage, "ranks": 3, "state": "nvme"}) for stage in (1, 2, 3)]
    shown = open_page("calculator.html").evaluate(
        "cases => cases.map(each => zeroPlan.waiting(...each))", cases
    )
    for (shape, run), found in zip(cases, shown, strict=True):
        with torch.device("meta"):
            model = GPT(GPTConfig(**shape))
        offload = {"device": run["state"], "nvme_path": "/"}
        each = plan(model, configured(run, offload_optimizer=offload), run["ranks"])
        assert found == {kind: getattr(each, kind) for kind in AWAY}, (shape, run)


def test_offload_costs_what_lesson_5_says(open_page: Open) -> None:
    page = open_page("calculator.html")
    for generator, run in runs(3, 50):
        numel, ranks, micro_batches = generator.randint(1, 10**7), run["ranks"], run["microBatches"]
        shown = page.evaluate("([numel, run]) => zeroPlan.offloaded(numel, run)", [numel, run])
        held = formula.held(2, [numel], ranks, formula.MIXED)
        moved = formula.moved([numel], ranks, micro_batches)
        assert [shown[kind] for kind in ("parameters", "hostGradients", "hostState")] == list(held.values())
        assert (shown["downByAll"], shown["upByAll"]) == moved
        sent = formula.sent(2, [numel], ranks, micro_batches, formula.MIXED) + formula.flag(ranks)
        assert shown["sentByAll"] == sent


# The form ----------------------------------------------------------------------------------------


def fill(page: Any, **fields: Any) -> None:
    """As a person would, field by field."""
    for name, value in fields.items():
        field = page.locator(f"#calculator [name={name}]")
        if name in ("known", "stage"):
            page.check(f"#calculator [name={name}][value='{value}']")
        elif isinstance(value, bool):
            field.set_checked(value)
        elif name in ("precision", "optimizer", "preset"):
            field.select_option(value)
        else:
            field.fill(str(value))


def exact(page: Any) -> dict[str, int]:
    """The column of bytes."""
    cells = page.query_selector_all("#calculator-result td[data-kind]")
    read = {cell.get_attribute("data-kind"): cell.inner_text().replace(",", "") for cell in cells}
    return {kind: int(text) for kind, text in read.items() if text}


@pytest.mark.rotates
def test_the_form_s_answer_is_what_its_own_python_prints(open_page: Open) -> None:
    page = open_page("calculator.html", width=390, scheme="dark")
    fill(page, layers=3, width=96, heads=4, vocabulary=1000, context=64)
    fill(page, ranks=3, batch=2, microBatches=2, precision="mixed16", optimizer="lion")
    codes, answers = list[str](), list[tuple[dict[str, int], str]]()
    for stage in range(4):
        fill(page, stage=stage)
        codes.append(page.text_content("#calculator-result code"))
        answers.append((exact(page), page.inner_text(".answer")))
    # As a reader runs them, in a process of their own.
    script = "\nprint('next')\n".join(codes)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for stage, (printed, (sizes, answer)) in enumerate(
        zip(done.stdout.split("next\n"), answers, strict=True)
    ):
        for kind, size in sizes.items():
            # Not the peak: a plan with a batch finds it at one moment, with gradients of activations.
            if kind != "peak" and (kind != "kept" or size):
                assert f"{size:,}" in printed, f"stage {stage}: {kind}, {printed}"
        assert f"{human(sizes['peak'])} at a step's peak" in answer


def test_what_would_wait_elsewhere_is_told_below_the_numbers(open_page: Open) -> None:
    page = open_page("calculator.html")
    fill(page, layers=3, width=96, heads=4, vocabulary=1000, context=64, ranks=3, stage=2)
    shape = {"layers": 3, "width": 96, "heads": 4, "vocabulary": 1000, "context": 64}
    run = {"stage": 2, "precision": "mixed", "optimizer": "adamw", "ranks": 3, "batch": 1, "microBatches": 1}
    with torch.device("meta"):
        model = GPT(GPTConfig(**shape))
    for place, kinds in {"cpu": ("host", "down", "up"), "nvme": ("disk", "host")}.items():
        offload = {"device": place, "nvme_path": "/"}
        each = plan(model, configured(run, offload_optimizer=offload), 3)
        said = page.inner_text(".note").partition('With "nvme"')[place == "nvme" and 2]
        assert all(human(getattr(each, kind)) in said for kind in kinds), place
    fill(page, stage=0)
    assert "offload_optimizer" not in page.inner_text(".note")


def told(page: Any) -> list[str]:
    """In a word, for each size."""
    return [item.inner_text().split("\n")[0] for item in page.query_selector_all(".fits li")]


def test_it_says_what_fits(open_page: Open) -> None:
    page = open_page("calculator.html")
    fill(page, preset="GPT-3 6.7B", ranks=8, stage=2)
    words, peak = told(page), exact(page)["peak"]
    assert words == ["24 GB: no", "40 GB: tight", "80 GB: yes", "141 GB: yes"]
    assert 36e9 < peak < 40e9, "tight: less than a tenth is left"
    fill(page, known="count", count="7B", stage=3)
    assert "7,000,000,000 parameters" in page.inner_text(".answer")
    assert "24 GB: perhaps" in page.inner_text(".fits")
    assert "at most" in page.inner_text(".numbers") and not page.is_visible(".check")


def test_offload_is_shown_beside_the_stages_and_leaves_no_choice(open_page: Open) -> None:
    page = open_page("calculator.html")
    fill(page, offload=True)
    assert page.is_disabled("[name=precision]") and page.is_disabled("[name=stage][value='0']")
    assert "on the host" in page.inner_text(".answer") and "copy" in page.inner_text(".note")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(page.text_content("#calculator-result code"), {})
    assert str(exact(page)["parameters"]) in printed.getvalue()
    fill(page, offload=False)
    assert page.is_enabled("[name=precision]")
    fill(page, precision="fp32", optimizer="lion", stage=3)
    before = page.inner_text(".answer")
    fill(page, offload=True)
    fill(page, offload=False)
    assert page.inner_text(".answer") == before and page.input_value("[name=optimizer]") == "lion"


def test_the_paper_s_own_run_has_the_paper_s_numbers(open_page: Open) -> None:
    page = open_page("calculator.html")
    fill(page, preset="ZeRO paper, 7.5B on 64")
    for stage, size in enumerate(("120 GB", "31.4 GB", "16.6 GB", "1.88 GB")):
        fill(page, stage=stage)
        assert f"each rank keeps {size}" in page.inner_text(".answer")
    fill(page, preset="GPT-2, XL")
    assert page.is_checked("[name=known][value=shape]") and "1,557,611,200" in page.inner_text(".answer")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"width": 769}, "width: 769 cannot be divided among 32 heads."),
        ({"ranks": 0}, "ranks: give a whole number from 1 to 16,384."),
        ({"layers": ""}, "layers: give a whole number from 1 to 256."),
        ({"known": "count", "count": "many"}, "parameters: give a number from 1 to 1e13"),
        ({"known": "count", "count": "7,5B"}, "parameters: give a number from 1 to 1e13"),
    ],
    ids=str,
)
def test_a_field_that_makes_no_sense_is_named(open_page: Open, fields: dict[str, Any], message: str) -> None:
    page = open_page("calculator.html")
    fill(page, **fields)
    assert message in page.inner_text(".answer")
    assert told(page) == [] and not page.is_visible(".numbers"), "an older answer is gone"


@pytest.mark.rotates
def test_a_link_opens_the_page_with_the_same_answer(open_page: Open) -> None:
    page = open_page("calculator.html")
    assert "#" not in page.url, "nothing is asked yet"
    for fields in (
        {"preset": "GPT-2, XL", "ranks": 12, "precision": "fp32", "optimizer": "lion", "stage": 3},
        {"known": "count", "count": "7.5B", "batch": 3, "microBatches": 4, "stage": 1},
        {"offload": True},
    ):
        fill(page, **fields)
        shown, url = page.inner_text("#calculator-result"), page.url
        other = open_page(f"calculator.html#{url.partition('#')[2]}")
        assert other.inner_text("#calculator-result") == shown
        other.context.close()
    page.click("[name=copy]")
    page.wait_for_function("document.querySelector('.share [role=status]').textContent")
    wrong = open_page("calculator.html#known=shape&stage=7&layers=0&precision=fp8")
    assert "layers: give a whole number" in wrong.inner_text(".answer")
    assert wrong.is_checked("[name=stage][value='2']") and wrong.input_value("[name=precision]") == "mixed"
    anchor = open_page("calculator.html#numbers")
    assert anchor.url.endswith("#numbers") and "parameters" in anchor.inner_text(".answer")


def test_counts_can_be_written_as_people_write_them(open_page: Open) -> None:
    page = open_page("calculator.html")
    fill(page, known="count")
    for text, number in {"7e9": 7e9, "1.5b": 1.5e9, "125 M": 125e6, "1,000": 1000, "350_000": 350e3}.items():
        fill(page, count=text)
        assert f"{number:,.0f} parameters" in page.inner_text(".answer")


# The table ---------------------------------------------------------------------------------------


def test_a_plan_that_the_table_cannot_explain_stops_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    case = calculator.Case("mixed", 2, False, 2)
    assert calculator._kept(case, "master") == {"slice": 4}
    other = calculator.Case("mixed", 1, False, 2)
    answers = {"master": 4 * calculator.NUMEL + 2, "buckets": 7}
    monkeypatch.setattr(calculator, "plan", lambda *given: SimpleNamespace(**answers))
    calculator.Case.plan.cache_clear()
    with pytest.raises(
        SiteError, match=r"master of Case\(precision='mixed', stage=1, .* are no sum of sizes"
    ):
        calculator._kept(other, "master")
    with pytest.raises(SiteError, match="pass in another way"):
        calculator._passing(other, calculator.BYTES, calculator.BYTES)
    calculator.Case.plan.cache_clear()


def test_the_page_is_given_one_line_of_javascript_that_is_json() -> None:
    name, text = calculator.data().split(" = ", 1)
    assert name == "const zeroCalculator"
    assert json.loads(text)["sizes"] == list(calculator.SIZES)
