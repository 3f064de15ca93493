"""Ray Train: a node is lost and comes back, and the run goes on with the workers that there are."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ray_train.launch import check, rows

if not find_spec("ray"):
    pytest.skip("needs Ray: `make test-ray` installs it", allow_module_level=True)

pytestmark = pytest.mark.ray


def test_a_node_that_comes_back_gets_a_worker_again(tmp_path: Path) -> None:
    options = ("--workers", 1, 2, "--steps", 80, "--save-every", 5, "--pause", 1, "--look-every", 5)
    check(*rows(tmp_path, 8, 3, *options), save_every=5, workers=[2, 1, 2])
