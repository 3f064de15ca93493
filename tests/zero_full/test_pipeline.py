"""A pipeline trains as the whole model does: 2 and 4 stages, one and two data ranks, every schedule."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import torch

from tests.worlds import POOL, run_each
from tests.zero_full.pipeline_runs import Case, beside_whole, continued, habits, resumed, saved
from zero_full.examples.pipeline import main

STEPS = 4
# The whole model adds up a tied weight's gradients in 16 bits, the pipeline in 32.
ROUNDED = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 1e-2}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
IN_FILES = {"offload_optimizer": {"device": "nvme", "nvme_path": gettempdir()}}

ONE_DATA_RANK = [
    Case(2),
    Case(2, zero=0, interval=2),
    Case(2, "gpipe", precision="bf16"),
    Case(2, precision="fp16", spoilt=1),
    Case(2, "interleaved_1f1b", per_rank=2),
    Case(2, "interleaved_zero_bubble", per_rank=2, precision="fp16"),
    Case(2, "zbv", per_rank=2),
    Case(2, more=OFFLOADED, precision="bf16", copies=True),
    Case(2, optimizer="Muon", params={"momentum": 0.9}),
]
TWO_DATA_RANKS = [
    Case(2),
    Case(2, precision="fp16", spoilt=2),
    Case(2, "zbv", per_rank=2, zero=0),
    Case(2, optimizer="Lamb"),
    Case(4),
    Case(4, "interleaved_1f1b", per_rank=2, precision="bf16"),
]
LONG = {
    2: [
        Case(2, zero=0, optimizer="Lamb"),
        Case(2, optimizer="Lion"),
        Case(2, optimizer="SGD", params={"momentum": 0.9}),
        Case(2, zero=0, optimizer="OneBitAdam", params={"freeze_step": 2}, tied=False),
        Case(2, optimizer="ZeroOneAdam", tied=False),
        Case(2, more=OFFLOADED, precision="fp16", spoilt=1, copies=True),
        Case(2, more=IN_FILES, precision="bf16"),
        Case(2, more={"overlap_comm": True, "reduce_bucket_size": 70}),
    ],
    4: [
        Case(2, more=OFFLOADED, precision="fp16", spoilt=1, copies=True),
        Case(2, more={"overlap_comm": True, "reduce_bucket_size": 70, "round_robin_gradients": True}),
        Case(2, optimizer="Muon", params={"momentum": 0.9}),
        Case(2, "interleaved_zero_bubble", per_rank=4, precision="fp16", spoilt=0),
        Case(4, "zbv", per_rank=2, precision="bf16"),
        Case(4, "gpipe", interval=1),
    ],
}


HAS_ZBV = torch.__version__ >= "2.13"


def check_beside_whole(world: int, cases: list[Case]) -> None:
    cases = [case for case in cases if case.schedule != "zbv" or HAS_ZBV]
    answers = run_each(beside_whole, world, [(case, STEPS) for case in cases])
    for case, ranks in zip(cases, answers, strict=True):
        for off, same, applied, scales, losses in ranks:
            assert same, (
                f"{case}: ranks or the whole model have other losses, steps or scales: {losses}, {scales}"
            )
            assert off < ROUNDED[case.precision], f"{case}: {off}"
            assert applied == [step != case.spoilt for step in range(STEPS)], case


@pytest.mark.parametrize(("world", "cases"), [(2, ONE_DATA_RANK), (4, TWO_DATA_RANKS)])
def test_as_the_whole_model(world: int, cases: list[Case]) -> None:
    check_beside_whole(world, cases)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_as_the_whole_model_with_other_rules_and_tiers(world: int) -> None:
    check_beside_whole(world, LONG[world])


def test_a_checkpoint_is_loaded_at_other_stages_and_ranks(tmp_path: Path) -> None:
    first = Case(2, precision="bf16")
    state, whole, losses = POOL.run(saved, 4, first, tmp_path)[0]
    again = [
        Case(4, seed=5, precision="bf16"),
        Case(2, "zbv" if HAS_ZBV else "interleaved_1f1b", per_rank=2, seed=6, precision="bf16", zero=0),
        None,
    ]
    found = [ranks[0] for ranks in run_each(resumed, 4, [(case, first, tmp_path) for case in again])]
    found += [POOL.run(resumed, 2, Case(2, seed=7, precision="bf16"), first, tmp_path)[0]]
    for loaded, counted in found:
        assert loaded.keys() == state.keys()
        assert all(torch.equal(loaded[name], state[name]) for name in state)
        assert counted == 2
    assert {name.partition(".")[0] for name in state} == {"layers", "tied"}
    assert whole.keys() == {name for name in state if "/" not in name}  # the exported file
    assert all(torch.equal(whole[name], state[name].to(whole[name].dtype)) for name in whole)
    after = run_each(continued, 4, [(Case(2, seed=8, precision="bf16"), tmp_path)])
    assert after[0][0] == losses  # bit for bit at the same layout


def test_metrics_state_dicts_meshes_and_signals(tmp_path: Path) -> None:
    for found in POOL.run(habits, 4, tmp_path):
        assert found["on"] == found["again"]
        assert found["metrics"] == pytest.approx(found["losses"][-1], abs=0.3)  # of this rank or of all
        for order in ("pipe", "data"):
            assert found[order] == pytest.approx(found["losses"], abs=1e-5)
        assert found["stopped after"] == 3
    assert (tmp_path / "latest").exists() and (tmp_path / "recording.json").exists()


def of_the_example(comm: Any, folder: Path) -> list[list[str]]:
    """What the example prints in two runs, of which the second has other stages, and in one whole run."""
    halves, whole = [], []
    for out, stages, steps, printed in (("a", 2, 3, halves), ("a", 4, 5, halves), ("b", 4, 5, whole)):
        with redirect_stdout(StringIO()) as out_text:
            main(["--out", str(folder / out), "--stages", str(stages), "--steps", str(steps)])
        printed += out_text.getvalue().splitlines()
    return [halves, whole]


@pytest.mark.rotates
def test_the_example_goes_on_at_another_number_of_stages(tmp_path: Path) -> None:
    halves, whole = POOL.run(of_the_example, 4, tmp_path)[0]
    assert len(halves) == len(whole) == 5
    for number, (half, all_of_it) in enumerate(zip(halves, whole, strict=True)):
        losses = [float(line.split("loss ")[1].split(",")[0]) for line in (half, all_of_it)]
        assert half.startswith(f"step {number + 1}: ") and losses[0] == pytest.approx(losses[1], abs=2e-5)
