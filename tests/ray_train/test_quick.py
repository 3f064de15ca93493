"""Where Ray is installed: two workers train as one process, in a minute."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ray_train.launch import rows

if not find_spec("ray"):
    pytest.skip("needs Ray: `make test-ray` installs it", allow_module_level=True)


def test_two_workers_have_the_losses_of_one_process(tmp_path: Path) -> None:
    two = rows(tmp_path / "two", "tests.ray_train.lose_a_node", tmp_path / "two", 0, 2, "--steps", 6)
    alone = rows(tmp_path / "alone", "tests.ray_train.one_process", tmp_path / "alone")
    assert [row["workers"] for row in two] == [2] * 6
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in alone[:6]], abs=1e-5)
