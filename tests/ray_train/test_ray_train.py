"""Ray Train: a node is lost, and the worker that is left goes on from the last checkpoint."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ray_train.launch import rows

if not find_spec("ray"):
    pytest.skip("needs Ray: `make test-ray` installs it", allow_module_level=True)

pytestmark = pytest.mark.ray


def test_the_remaining_worker_goes_on_with_the_losses_of_one_process(tmp_path: Path) -> None:
    lost = rows(tmp_path / "lost", "tests.ray_train.lose_a_node", tmp_path / "lost", 8, 1, 2)
    alone = rows(tmp_path / "alone", "tests.ray_train.one_process", tmp_path / "alone")
    assert [row["step"] for row in alone] == list(range(1, 23))
    wanted = {row["step"]: row["loss"] for row in alone}
    at = next(number for number, row in enumerate(lost) if row["workers"] == 1)
    before, after = lost[:at], lost[at:]
    assert {row["workers"] for row in before} == {2} and len(before) >= 8
    assert [row["step"] for row in after] == list(range(before[-1]["step"] // 5 * 5 + 1, 23))
    assert [row for row in lost if abs(row["loss"] - wanted[row["step"]]) > 1e-5] == []
