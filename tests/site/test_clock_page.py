"""The clock's page computes what lessons/clock.py computes from steps that are recorded here, whole."""

import random
from functools import cache
from typing import Any

import clock
import pytest

from lessons.clock import Machine, Size, bound, hides_from, replay
from lessons.recording import Recording, record
from tests.site.browser import Open

pytest_plugins = ["tests.site.fixtures"]

STAGES = ("0", "1", "2", "3", "3 with prefetch")


def settings(seed: int, count: int) -> list[tuple[dict[str, Any], dict[str, float], dict[str, float]]]:
    """Random machines and sizes for a few runs: each stage, alone and in several micro-batches."""
    generator = random.Random(seed)
    runs = [
        {
            "stage": stage,
            "ranks": generator.choice(clock.RANKS[:2]),
            "bucket": generator.choice(clock.BUCKETS[:3]),
            "microBatches": micro_batches,
        }
        for stage in STAGES
        for micro_batches in (1, generator.choice([2, 4]))
    ]

    def between(low: float, high: float) -> float:
        return low * (high / low) ** generator.random()

    return [
        (
            runs[place % len(runs)],
            {
                "latency": generator.choice([0.0, between(1e-7, 1e-2)]),
                "bandwidth": between(1e6, 1e12),
                "flops": between(1e10, 1e15),
            },
            {"parameters": between(1e4, 1e12), "tokens": between(1, 1e6)},
        )
        for place in range(count)
    ]


@cache
def recorded(name: str, ranks: int, micro_batches: int) -> Recording:
    return record(clock.STAGES[name], ranks, micro_batches)


def expected(run: dict[str, Any], numbers: dict[str, float], size: dict[str, float]) -> dict[str, Any]:
    name = f"2/{run['bucket']}" if run["stage"] == "2" else run["stage"]
    made = recorded(name, run["ranks"], run["microBatches"])
    machine = Machine("", **numbers)
    replayed = replay(made, machine, Size(**size))
    return {
        "times": [replayed.step, replayed.idle, replayed.sending, replayed.hidden],
        "network": [[bar.what, bar.start, bar.end] for bar in replayed.network],
        "arithmetic": [[bar.what, bar.start, bar.end] for bar in replayed.arithmetic[0]],
        "bound": bound(made, machine),
        "found": hides_from(made, machine, size["parameters"]),
    }


SHOWN = """cases => cases.map(([run, machine, size]) => {
  const made = zeroReplay.replay(run, machine, size), bars = (all) => all.map((b) => [b.what, b.start, b.end])
  return { times: [made.step, made.idle, made.sending, made.hidden], network: bars(made.network),
    arithmetic: bars(made.arithmetic), bound: zeroReplay.bound(run, machine),
    found: zeroReplay.hidesFrom(run, machine, size.parameters) }
})"""


@pytest.mark.rotates
def test_the_page_replays_as_python_does_in_40_random_settings(open_page: Open) -> None:
    cases = settings(0, 40)
    for case, shown in zip(cases, open_page("clock.html").evaluate(SHOWN, cases), strict=True):
        wanted = expected(*case)
        for lane in ("network", "arithmetic"):
            assert [bar[0] for bar in shown[lane]] == [bar[0] for bar in wanted[lane]], case
            ends = [[time for bar in each[lane] for time in bar[1:]] for each in (shown, wanted)]
            assert ends[0] == pytest.approx(ends[1], rel=1e-9), case
        scale = wanted["times"][0]  # what stands still is a small difference of large numbers
        assert shown["times"] == pytest.approx(wanted["times"], rel=1e-9, abs=1e-9 * scale), case
        assert shown["bound"] == pytest.approx(wanted["bound"]), case
        assert (shown["found"] is None) == (wanted["found"] is None), case
        assert shown["found"] is None or shown["found"] == pytest.approx(wanted["found"], rel=1e-3), case


def choose(page: Any, **fields: Any) -> None:
    """As a person would, field by field."""
    for name, value in fields.items():
        field = page.locator(f"#clock [name={name}]").first
        if name == "stage":
            page.check(f"#clock [name=stage][value='{value}']")
        elif name == "machine":
            field.select_option(value)
        else:
            field.fill(str(value))


def test_sliders_change_the_answer_and_say_what_they_stand_on(open_page: Open) -> None:
    page = open_page("clock.html", width=390, scheme="dark")
    assert page.inner_text(".answer").startswith("Stage 2: a step takes")
    before = page.inner_text(".answer")
    for name, value in {"ranks": 0, "bucket": 3, "microBatches": 4, "tokens": 16, "parameters": 8}.items():
        choose(page, **{name: value})
        after = page.inner_text(".answer")
        assert after != before or name == "parameters", name
        assert page.locator(f"label:has([name={name}]) output").inner_text()
        before = after
    assert page.locator("label:has([name=ranks]) output").inner_text() == "2"
    choose(page, stage="1")
    assert page.is_disabled("[name=bucket]")
    assert "Nothing is sent before the arithmetic is over" in page.inner_text(".answer")
    assert page.locator(".numbers tr.chosen th").inner_text() == "stage 1"


def test_a_machine_fills_the_fields_and_the_fields_make_a_machine(open_page: Open) -> None:
    page = open_page("clock.html")
    for key, machine in clock.MACHINES.items():
        choose(page, machine=key)
        shown = page.evaluate("zeroClockPage.read().machine")
        numbers = {"latency": machine.latency, "bandwidth": machine.bandwidth, "flops": machine.flops}
        assert shown == pytest.approx(numbers)
        assert machine.source in page.inner_text(".source")
    choose(page, bandwidth=10)
    assert page.input_value("[name=machine]") == "" and page.inner_text(".source") == "Your own numbers."
    choose(page, flops=0)
    assert "speed, TFLOP/s: give a number above 0." in page.inner_text(".answer")


def test_the_table_names_the_batch_that_the_text_derives(open_page: Open) -> None:
    """Four ranks: the column is between 3/4 and once FLOP/s / bandwidth, because buckets have one owner."""
    page = open_page("clock.html")
    machine = clock.MACHINES["pcie"]
    cells = page.locator(".numbers tr.chosen td").all_inner_texts()
    most = machine.flops / machine.bandwidth
    assert 0.75 * most <= float(cells[-1].replace(",", "")) <= most
