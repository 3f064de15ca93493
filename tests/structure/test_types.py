"""mypy finds nothing. It is a test so that it runs beside the others."""

import subprocess
import sys
from pathlib import Path

import pytest


def test_types() -> None:
    pytest.importorskip("mypy", reason="pip install -e '.[dev]'")
    found = subprocess.run(
        [sys.executable, "-m", "mypy"], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr
