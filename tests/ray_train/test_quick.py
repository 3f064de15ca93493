"""Where Ray is installed: a node is lost, and the worker that is left goes on, in two minutes."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ray_train.launch import check, rows

if not find_spec("ray"):
    pytest.skip("needs Ray: `make test-ray` installs it", allow_module_level=True)


def test_the_remaining_worker_goes_on_with_the_losses_of_one_process(tmp_path: Path) -> None:
    options = ("--workers", 1, 2, "--steps", 8, "--save-every", 2, "--pause", 0.3)
    check(*rows(tmp_path, 3, 0, *options), save_every=2, workers=[2, 1])
