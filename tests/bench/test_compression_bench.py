"""The benchmarks of compression and of optimizers measure what they say. (The numbers are nobody's test.)"""

import subprocess
from collections import Counter
from statistics import median

import pytest
import torch

from tests.bench import compression, limited_steps, link, optimizers, scales, volume
from tests.bench.limited_steps import ADAM_ROW, ALONE, EVERY, IN_16, ONE_BIT_ROW, Found, Plan
from tests.bench.optimizers import Row
from tests.worlds import POOL, run_each
from zero_full.comm.chunks import Chunks
from zero_min.formula import zero_one_rounds

SCHEDULES = [
    {"var_freeze_step": 1, "var_update_scaler": 1, "local_step_scaler": 1, "local_step_clipper": 1},
    {"var_freeze_step": 60, "var_update_scaler": 3, "local_step_scaler": 7, "local_step_clipper": 8},
    {"var_freeze_step": 500, "var_update_scaler": 16, "local_step_scaler": 9, "local_step_clipper": 16},
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_closed_form_has_the_lessons_rounds(schedule: dict[str, int]) -> None:
    names = ("kappa", "freeze_step", "local_kappa", "local_clip")
    order = ("var_update_scaler", "var_freeze_step", "local_step_scaler", "local_step_clipper")
    theirs = zero_one_rounds(200, **{name: schedule[of] for name, of in zip(names, order, strict=True)})
    assert Counter(volume.zero_one_adam(200, **schedule)) == Counter(theirs)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("sizes", [[1000], [5, 300, 1, 64], [1] * 40, [3]], ids=str)
def test_the_closed_form_of_a_message_is_the_one_that_is_sent(sizes: list[int], ranks: int) -> None:
    ends = tuple(int(end) for end in torch.tensor(sizes).cumsum(0))
    assert volume.Model(sizes, ranks).one_bit() == Chunks(ends, ranks).sent


def test_the_published_trainings_have_the_rounds_and_bits_that_follow_by_hand() -> None:
    large = volume.PUBLISHED["BERT-Large"].rounds()
    assert large["1-bit Adam"] == {volume.EXACT: 24_500, volume.ONE_BIT: 137_500}
    assert volume.bits(large["1-bit Adam"]) == pytest.approx((16 * 24_500 + 137_500) / 162_000)
    assert volume.bits(large["Adam"]) == 16
    talks = {name: 1 - kinds[volume.SILENT] / 162_000 for name, kinds in large.items()}
    assert talks["Adam"] == talks["1-bit Adam"] == 1 and 0.45 < talks["0/1 Adam"] < 0.47  # "up to 54 %" less


@pytest.mark.rotates
@pytest.mark.parametrize("name", compression.COUNTS)
def test_what_is_counted_is_the_closed_form_in_every_step(name: str) -> None:
    one = POOL.run(compression.count, 2, name, 60)[0]
    assert one.wrong == [] and len(one.sent) == 60
    assert one.kinds == Counter(compression.COUNTS[name].kinds(60))
    one.formula[6] += 1
    assert one.wrong == [7]


def test_a_row_that_sends_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan("50k", (ALONE, ADAM_ROW, EVERY, IN_16), 1, None)
    found = limited_steps.together(POOL.run(limited_steps.in_pool, 2, plan))
    assert found.sent[EVERY] == 16 * found.sent[IN_16] < found.sent[ADAM_ROW] / 15
    assert all(min(map(min, series)) > 0 for series in found.seconds.values())
    assert POOL.run(wrong_kind, 2, plan) == [f"{ADAM_ROW} sent something else"] * 2


def wrong_kind(comm: object, plan: Plan) -> str:
    rank = limited_steps.Rank(plan)
    rank.model = volume.Model([1], 2)
    try:
        rank.visit(ADAM_ROW, 0)
    except RuntimeError as error:
        return " ".join(str(error).split()[:2]) + " something else"
    return "nobody has noticed"


def found_of(**seconds: float) -> Found:
    rows = {ALONE: "alone", ADAM_ROW: "adam", ONE_BIT_ROW: "one", EVERY: "every", IN_16: "rare"}
    return Found(10**6, 1e8, {row: [[seconds[key]]] for row, key in rows.items()}, {ADAM_ROW: 4e6})


def test_a_mean_step_of_a_schedule_is_made_of_its_kinds() -> None:
    found = found_of(alone=1, adam=100, one=10, every=20, rare=5)
    mean = compression.whole_training(found)
    assert mean["Adam"] == 100
    assert mean["1-bit Adam"] == pytest.approx((24_500 * 100 + 137_500 * 10) / 162_000)
    rounds = volume.PUBLISHED["BERT-Large"].rounds()["0/1 Adam"]
    silent = (16 * 5 - 20) / 15
    wanted = (
        100 * rounds[volume.EXACT] + 20 * rounds[volume.ONE_BIT] + silent * rounds[volume.SILENT]
    ) / 162_000
    assert mean["0/1 Adam"] == pytest.approx(wanted)


def test_the_target_is_for_0_1_adam_on_the_slow_link_only() -> None:
    found = found_of(alone=1, adam=100, one=10, every=20, rare=5)
    slow = compression.link_ratios("x", found, link.RATES["100 Mbit"])
    assert {one.name: (one.value, one.met) for one in slow} == {
        f"x: {ONE_BIT_ROW} / Adam": (0.1, None),
        f"x: {EVERY} / Adam": (0.2, True),
        f"x: {IN_16} / Adam": (0.05, True),
    }
    assert all(one.target is None for one in compression.link_ratios("x", found, link.RATES["1 Gbit"]))


def test_what_cannot_be_measured_is_labelled_as_computed() -> None:
    found = found_of(alone=0.01, adam=0.1, one=0.1, every=0.1, rare=0.1)
    lines = compression.computed_report(found, 10**8).splitlines()
    assert "measured" in lines[0] and lines[0].count("computed") == 2
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == [ADAM_ROW, "100.0", "320.0", "420.0"]


def test_a_machine_without_the_tools_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert link.problem() == "tc cannot be found"
    monkeypatch.setattr(link.shutil, "which", lambda tool: tool)
    refused = subprocess.CompletedProcess([], 1, "", "unshare: unshare failed: Operation not permitted\n")
    monkeypatch.setattr(link.subprocess, "run", lambda *_, **__: refused)
    assert link.problem() == "unshare: unshare failed: Operation not permitted"


def streams(rate: int) -> list[float]:
    return [limited_steps.measured_rate(rate) for _ in range(2)]


def fails_on_one() -> None:
    if torch.distributed.get_rank() == 1:
        raise ValueError("of rank 1")
    torch.distributed.barrier()


@pytest.mark.rotates
def test_a_link_lets_no_more_than_its_rate_through() -> None:
    if why := link.problem():
        pytest.skip(f"links cannot be limited here: {why}")
    rate = 50_000_000
    found = link.run(streams, 2, rate, rate=rate, limit=60)
    assert 0.5 * rate < median(found[0]) < 1.02 * rate


@pytest.mark.slow
def test_a_rank_behind_a_link_that_fails_ends_all_of_them() -> None:
    if why := link.problem():
        pytest.skip(f"links cannot be limited here: {why}")
    with pytest.raises(link.LinkError, match="rank 1: ValueError: of rank 1"):
        link.run(fails_on_one, 2, rate=None, limit=60)


def test_a_seed_decides_everything_and_another_one_something_else() -> None:
    row = Row("AdamW", {"lr": 1e-3}, "Adam", batch=2, steps=40)
    runs = run_each(optimizers.train, 2, [(row, 0), (row, 1), (row, 0)])
    first, other, again = (optimizers.agreed(ranks, "here") for ranks in runs)
    assert first.steps == [20, 40] and first.sent == 4.0
    assert first.curves == again.curves != other.curves
    assert all(curve[-1] < curve[0] for one in (first, other) for curve in one.curves)


def test_ranks_that_have_drifted_apart_are_found() -> None:
    ranks = [optimizers.Found([20], [[loss]]) for loss in (2.0, 2.0000002)]
    assert optimizers.agreed([ranks[0], ranks[0]], "here") is ranks[0]
    with pytest.raises(RuntimeError, match="here: the ranks have different models"):
        optimizers.agreed(ranks, "here")


def test_every_row_is_compared_with_one_of_its_steps_and_batches() -> None:
    for name, row in optimizers.ROWS.items():
        other = optimizers.ROWS[row.compared_with]
        assert (row.batch, row.steps) == (other.batch, other.steps), name
        assert row.steps % optimizers.LOOK == 0


def test_all_kinds_of_scales_are_heard_and_nothing_changes_by_it() -> None:
    row = Row("OneBitAdam", {"lr": 1e-3, "freeze_step": 10}, "Adam", batch=2, steps=20)
    ranks = [each[0] for each in run_each(scales.train, 2, [(row, 0, kind) for kind in scales.KINDS])]
    assert ranks[0][0].curves == run_each(optimizers.train, 2, [(row, 0)])[0][0].curves
    assert len({found.ends[0] for found, _ in ranks}) == len(scales.KINDS)
    heard = [unsaid for _, unsaid in ranks]
    assert all(len(each.whole) == len(each.each) == 10 for each in heard)
    by_root, by_size = heard[0].each[0], heard[1].each[0]  # when all are asked for the same
    for one, other in zip(by_root, by_size, strict=True):  # by their closed forms, from mean size over root
        assert other**2 == pytest.approx(1 - (1 - one**2 / 2) ** 2, abs=1e-4)
    assert heard[2].each[0] != by_root != heard[3].each[0]


def test_the_table_of_scales_compares_seed_by_seed() -> None:
    unsaid = scales.Unsaid([1.0, 2.0, 3.0], [[1.0, 4.0], [2.0, 5.0], [0.0, 6.0]])
    ends = [[2.0, 3.0], [2.5, 3.25], [2.0, 2.0], [2.0, 3.0]]
    lines = {kind: scales.Line(each, unsaid) for kind, each in zip(scales.KINDS, ends, strict=True)}
    rows = [
        [cell.strip() for cell in row.split("|")[2:-1]] for row in scales.report({"x": lines}).splitlines()
    ]
    assert rows[2] == ["one each, rms", "2.500", "", "", "2.00", "5.00"]
    assert rows[3] == ["one each, mean size", "2.875", "+0.375", "+0.250 to +0.500", "2.00", "5.00"]
    assert rows[4][2:4] == ["-0.500", "-1.000 to +0.000"]
