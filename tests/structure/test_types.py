"""mypy finds nothing. It is a test so that it runs beside the others."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def test_types() -> None:
    pytest.importorskip("mypy", reason="pip install -e '.[dev]'")
    # Every torch annotates more of itself, so the pinned one alone says which "type: ignore" is needless.
    pinned = f"torch=={torch.__version__.partition('+')[0]}\n" in (ROOT / "constraints.txt").read_text()
    options = [] if pinned else ["--no-warn-unused-ignores"]
    found = subprocess.run([sys.executable, "-m", "mypy", *options], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
