"""Runs repeat themselves bit for bit, and repeat what is written down."""

import json
from functools import cache

import pytest

from tests.zero_full import golden

WRITTEN = json.loads(golden.FILE.read_text())


def means_of_ten(losses: list[float]) -> list[float]:
    return [sum(losses[start : start + 10]) / 10 for start in range(0, len(losses), 10)]


hundred_steps = cache(golden.run)
# What else a run may depend on: where a scale changes, and what travels beside backward.
REPEATED = [name for name in golden.CONFIGS if "fp16" in name or "overlap" in name]


@pytest.mark.rotates
@pytest.mark.parametrize("name", golden.CONFIGS)
def test_a_hundred_steps_are_those_written_down(name: str) -> None:
    now = hundred_steps(name)
    written = WRITTEN["losses"][name]
    assert len(written) == len(now) >= golden.STEPS
    if WRITTEN["machine"] == golden.machine():
        assert now == written
    else:  # other kernels, other rounding: in 16 bits single losses wander by some percent
        assert means_of_ten(now) == pytest.approx(means_of_ten(written), rel=0.02)
    assert sum(now[-10:]) < sum(now[:10]) - 5, "nothing was learned"


@pytest.mark.rotates
@pytest.mark.parametrize(
    "name",
    [name if name in REPEATED else pytest.param(name, marks=pytest.mark.slow) for name in golden.CONFIGS],
)
def test_the_same_run_repeats_itself(name: str) -> None:
    again = golden.run(name, steps=30)  # beyond them the scale of fp16 has grown, and rounding has shown
    assert again == hundred_steps(name)[: len(again)]


def test_every_configuration_is_written_down() -> None:
    assert WRITTEN["losses"].keys() == golden.CONFIGS.keys()


def test_stages_write_down_the_same_losses_until_rounding_tells() -> None:
    """Adam turns rounding into steps of full size wherever a gradient is nothing but rounding."""
    for precision in golden.PRECISIONS:
        first, *others = (WRITTEN["losses"][f"stage {stage}, {precision}"] for stage in (0, 1, 2))
        assert others[0] == others[1]
        for step in range(20):
            assert others[0][step] == pytest.approx(first[step], rel=1e-5 if precision == "fp32" else 0.01)
