"""The site as `make site` builds it, once for all tests of this folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site() -> Path:
    """The folder with the built pages. Notebooks are run only if they or the code have changed."""
    pytest.importorskip("material", reason="pip install -e '.[site]'")
    # Not --quiet: mkdocs counts the warnings that it prints, and would find none.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "site/mkdocs.yml"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return ROOT / "build" / "site"
