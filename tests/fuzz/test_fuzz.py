"""Ten seconds of the search, always the same; and is it fooled?"""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests import rotation
from tests.fuzz import script
from tests.fuzz.case import (
    BETWEEN,
    ONE_BIT,
    OPTIMIZERS,
    PARAM_TIERS,
    PRECISIONS,
    SCHEDULES,
    TIERS,
    WITHIN,
    Case,
    Layout,
    draw,
    is_valid,
)
from tests.fuzz.defects import PLANTED
from tests.fuzz.loops import LOOPS
from tests.fuzz.model import Part, Use
from tests.fuzz.search import ERROR, HANG, MISMATCH, Judge, Verdict
from tests.fuzz.shrink import shrink
from tests.worlds import free_port

SEEDS = range(24)
DRAWN = [draw(seed) for seed in range(2000)]


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    judge = Judge()
    yield judge
    judge.close()


def test_these_cases_are_plain_torch_or_refused(judge: Judge) -> None:
    seeds = rotation.part_of(SEEDS)
    verdicts = judge.verdicts([draw(seed) for seed in seeds])
    wrong = [f"{seed}: {each.text}" for seed, each in zip(seeds, verdicts, strict=True) if each.is_wrong]
    assert not wrong, "\n".join(wrong)


FOUND = {  # by the search, and mended since
    "what Adagrad keeps from the start, of a part that is thawed": Case(
        width=5,
        parts=(Part(frozen=(0, 2)),),
        uses=(Use(0),),
        optimizer="Adagrad",
        steps=3,
        first=Layout(precision="bf16"),
    ),
    "a checkpoint of pipeline stages of which one has no matrix": Case(
        parts=(Part("norm"), Part()),
        uses=(Use(0), Use(0), Use(1)),
        groups=True,
        decay=True,
        optimizer="Adam",
        first=Layout(pipe=2),
        then=Layout(pipe=3),
        micro_batches=3,
    ),
    "a tied layer of a pipeline that is frozen for a step": Case(
        parts=(Part(), Part(frozen=(1, 2))),
        uses=(Use(0), Use(1), Use(0), Use(1)),
        optimizer="AdamW",
        first=Layout(pipe=2),
        micro_batches=2,
    ),
    "state in a file that a step writes and reads again": Case(
        seed=210,
        width=16,
        parts=(Part("own", frozen=(0, 2)), Part("own", frozen=(1, 4)), Part("transposed"), Part()),
        uses=(Use(0), Use(1), Use(2, micro=0), Use(3, micro=1)),
        optimizer="Adam",
        instance=True,
        micro_batches=2,
        steps=5,
        first=Layout(stage=3, tier="disk", zero={"reduce_bucket_size": 10**6}),
    ),
    "a layer that is tied inside a stage whose backward is split": Case(
        parts=(Part(), Part("narrow")),
        uses=(Use(0), *([Use(1)] * 6)),
        first=Layout(pipe=2, schedule="interleaved_zero_bubble"),
        micro_batches=2,
    ),
}


def test_what_the_search_has_found_stays_right(judge: Judge) -> None:
    verdicts = judge.verdicts([*FOUND.values()])
    assert not [(name, each.text) for name, each in zip(FOUND, verdicts, strict=True) if each.is_wrong]


# What is drawn -----------------------------------------------------------------------------------


def test_a_case_is_what_its_json_says() -> None:
    assert all(Case.from_json(case.to_json()) == case for case in DRAWN)
    assert all(is_valid(case) for case in DRAWN)


def test_everything_is_drawn() -> None:
    layouts = [layout for case in DRAWN for layout, _ in case.legs()]
    assert {(each.world, each.stage) for each in layouts} == {(w, s) for w in (1, 2, 3, 4) for s in range(4)}
    assert {each.precision for each in layouts} == {*PRECISIONS}
    assert {each.tier for each in layouts} == {*TIERS}
    assert {each.param_tier for each in layouts} == {*PARAM_TIERS}
    assert {(case.optimizer, case.instance) for case in DRAWN} == {(o, i) for o in OPTIMIZERS for i in (0, 1)}
    uncorrected = {(case.optimizer, case.instance) for case in DRAWN if not case.corrects}
    assert uncorrected == {(o, i) for o in ("Adam", "AdamW") for i in (0, 1)}
    loops = {(case.loop, case.micro_batches) for case in DRAWN if not case.is_pipeline}
    assert loops == {(x, m) for x in LOOPS for m in (1, 2, 3)}
    assert {case.between for case in DRAWN} == {"", *BETWEEN}
    assert {case.within for case in DRAWN} == {"", *WITHIN}
    assert any(each.joins for each in layouts)
    uses = [use for case in DRAWN for use in case.uses]
    assert {use.checkpoint for use in uses} == {"", "plain", "reentrant"}
    assert {use.rank for use in uses} == {None, 0, 1, 2, 3} and {use.micro for use in uses} == {None, 0, 1, 2}
    assert any(case.then and case.then.world != case.first.world for case in DRAWN)
    pipelines = [case for case in DRAWN if case.is_pipeline]
    places = [layout for case in pipelines for layout, _ in case.legs()]
    assert {each.schedule for each in places} == {*SCHEDULES}
    assert {(each.pipe, each.world) for each in places} > {(2, 1), (2, 2), (3, 1), (4, 1), (1, 2)}
    assert {case.optimizer for case in pipelines} == OPTIMIZERS.keys() - {*ONE_BIT}
    assert any(case.then and 0 < case.then.pipe != case.first.pipe > 0 for case in pipelines)
    assert any(len({use.part for use in case.uses}) < len(case.uses) for case in pipelines)
    assert any(case.poison for case in DRAWN) and any(
        case.optimizer in ONE_BIT and case.then for case in DRAWN
    )


# It is not fooled --------------------------------------------------------------------------------

TWO = Case(steps=1, first=Layout(world=2, stage=1))
RESUMED = replace(TWO, optimizer="Adam", steps=2, then=Layout(world=1, stage=2))
SHOWING: dict[str, tuple[Case, str, str]] = {
    "gradients are summed": (TWO, MISMATCH, "master of head.weight is off by"),
    "nothing is clipped": (replace(TWO, clip=0.05), MISMATCH, "master of head.weight is off by"),
    "moments are not loaded": (RESUMED, MISMATCH, "step of parts.0.inner.bias is 1, not 2"),
    "skipped steps are not counted": (
        replace(TWO, clip=1.0, poison=(0, 1)),
        MISMATCH,
        "skipped_steps is 0, not 1",
    ),
    "a rank's first micro-batch is lost": (replace(TWO, micro_batches=2), MISMATCH, "momentum_buffer of"),
    "a rank does not go on": (TWO, HANG, "did not answer"),
    "a rank fails alone": (TWO, ERROR, "rank 1: ValueError: planted"),
    "tied layers of a pipeline do not add up": (
        Case(uses=(Use(0), Use(0)), steps=1, micro_batches=2, first=Layout(pipe=2)),
        MISMATCH,
        "values of parts.0.inner.weight differ between the stages that it is tied to",
    ),
}


@pytest.mark.rotates
@pytest.mark.parametrize("defect", PLANTED)
def test_a_planted_defect_is_found(defect: str) -> None:
    case, kind, text = SHOWING[defect]
    judge = Judge(defect, limit_s=4.0 if kind == HANG else 40.0)
    (verdict,) = judge.verdicts([case])
    judge.close()
    assert verdict.kind == kind and text in verdict.text, verdict


def test_without_a_defect_these_are_equal(judge: Judge) -> None:
    verdicts = judge.verdicts([case for case, _, _ in SHOWING.values()])
    assert not [verdict for verdict in verdicts if verdict.is_wrong]


def test_a_refusal_that_nobody_has_foreseen_is_an_error_and_one_that_does_not_come_is_a_mismatch(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = replace(TWO, first=Layout(world=2, stage=0, tier="host"))
    assert judge.verdicts([refused])[0].kind == "refused"
    monkeypatch.setattr("tests.fuzz.search.expected_refusal", lambda case: None if case == refused else "x")
    assert [verdict.kind for verdict in judge.verdicts([refused, TWO])] == [ERROR, MISMATCH]


# What is wrong becomes small ---------------------------------------------------------------------


def test_a_case_becomes_as_small_as_what_is_wrong_allows() -> None:
    large = next(case for case in DRAWN if case.then and case.then.world > 1 and len(case.uses) > 3)
    at_world_2 = shrink(large, lambda case: any(layout.world > 1 for layout, _ in case.legs()), 10**4)
    small = Case(parts=(), uses=(), steps=1, first=Layout(world=2))
    assert replace(at_world_2, optimizer="SGD") == small
    tied = replace(Case(), parts=(Part(), Part("norm"), Part("empty", tied=0)), uses=(Use(1), Use(2, rank=3)))
    kept = shrink(tied, lambda case: any(part.tied is not None for part in case.parts), 10**4)
    assert kept.parts == (Part(), Part(tied=0)) and not kept.uses


@pytest.mark.rotates
def test_a_planted_defect_becomes_small_and_a_script_that_shows_it(tmp_path: Path) -> None:
    judge = Judge("gradients are summed")
    large = replace(draw(3), first=Layout(world=2, stage=2), then=None)

    def is_wrong(case: Case) -> bool:
        return judge.verdicts([case])[0].is_wrong

    assert is_wrong(large)
    small = shrink(large, is_wrong)
    judge.close()
    assert small == Case(width=small.width, parts=(), uses=(), steps=1, first=Layout(world=2)), small
    path = script.write(small, "wrong", tmp_path, "small")
    assert Case.from_json(path.with_suffix(".json").read_text()) == small
    told = run_script(path)
    assert "head.weight" in told and "off by" in told


def run_script(path: Path) -> str:
    """What the first leg prints, on one rank."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    made = subprocess.run(
        [sys.executable, str(path), "0"],
        env={**os.environ, **place, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


@pytest.mark.parametrize("seed", [2, 7, 11])
def test_a_script_of_any_case_can_be_read_by_python(seed: int, tmp_path: Path) -> None:
    for case in DRAWN[seed : seed + 300]:
        compile(script.script_of(case, "wrong", tmp_path / "x.py"), "x.py", "exec")


def test_a_verdict_says_in_which_way_a_case_is_wrong() -> None:
    same = Verdict(ERROR, "rank 0: ValueError: a"), Verdict(ERROR, "rank 0: ValueError: b")
    assert same[0].signature == same[1].signature != Verdict(ERROR, "rank 0: KeyError: a").signature
