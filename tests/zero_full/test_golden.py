"""Runs repeat themselves bit for bit, and repeat what is written down."""

import json

import pytest

from tests.zero_full import golden

WRITTEN = json.loads(golden.FILE.read_text())


def means_of_ten(losses: list[float]) -> list[float]:
    return [sum(losses[start : start + 10]) / 10 for start in range(0, len(losses), 10)]


@pytest.mark.parametrize("name", golden.CONFIGS)
def test_a_hundred_steps_are_those_written_down_and_repeat(name: str) -> None:
    now = golden.run(name)
    again = golden.run(name, steps=30)  # beyond them the scale of fp16 has grown, and rounding has shown
    assert again == now[: len(again)], "the same run twice"
    written = WRITTEN["losses"][name]
    assert len(written) == len(now) >= golden.STEPS
    if WRITTEN["machine"] == golden.machine():
        assert now == written
    else:  # other kernels, other rounding: in 16 bits single losses wander by some percent
        assert means_of_ten(now) == pytest.approx(means_of_ten(written), rel=0.02)
    assert sum(now[-10:]) < sum(now[:10]) - 5, "nothing was learned"


def test_every_configuration_is_written_down() -> None:
    assert WRITTEN["losses"].keys() == golden.CONFIGS.keys()


def test_stages_write_down_the_same_losses_until_rounding_tells() -> None:
    """Adam turns rounding into steps of full size wherever a gradient is nothing but rounding."""
    for precision in golden.PRECISIONS:
        first, *others = (WRITTEN["losses"][f"stage {stage}, {precision}"] for stage in (0, 1, 2))
        assert others[0] == others[1]
        for step in range(20):
            assert others[0][step] == pytest.approx(first[step], rel=1e-5 if precision == "fp32" else 0.01)
