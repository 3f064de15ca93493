"""The site as `make site` builds it, once for all tests of this folder."""

import os
import subprocess
import sys
from pathlib import Path

import notebook_pages
import pytest

from tests import rotation

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site(request: pytest.FixtureRequest) -> Path:
    """The folder with the built pages. Notebooks are run only if they or the code have changed.

    Without slow tests one notebook is run: the one that tests/notebooks run.
    """
    pytest.importorskip("material", reason="pip install -e '.[site]'")
    # Not --quiet: mkdocs counts the warnings that it prints, and would find none.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "site/mkdocs.yml"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    if "not slow" in request.config.option.markexpr:
        environment[notebook_pages.ONLY] = rotation.chosen(notebook_pages.names())
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return ROOT / "build" / "site"
