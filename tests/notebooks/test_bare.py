"""Lesson 11's notebook where the project is not installed, as in Colab or Kaggle, with the address set."""

import json
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

from lessons import repository

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / f"{repository.ASKS}.ipynb"
RUN = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        shell.run_cell("".join(cell["source"])).raise_error()
import zero_min
print("from", zero_min.__file__)
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has torch and the other libraries, and does not have the project."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    find = [python, "-c", "import site; print(site.getsitepackages()[0])"]
    own = Path(subprocess.run(find, capture_output=True, text=True, check=True).stdout.strip())
    first = f"import sys; sys.path[:0] = {site.getsitepackages()!r}\n"  # before its own, older setuptools
    (own / "libraries.pth").write_text(first)  # .pth files of those folders are not read
    return python


def run(bare: Path, folder: Path, address: str) -> subprocess.CompletedProcess[str]:
    """All code cells of the notebook with this address as the setting, in an empty folder."""
    made = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    (cell,) = [cell for cell in made["cells"] if cell["id"] == repository.CELL]
    source, setting = "".join(cell["source"]), f'\nREPOSITORY = "{repository.REPOSITORY}"'
    assert source.count(setting) == 1
    cell["source"] = [source.replace(setting, f"\nREPOSITORY = {address!r}")]
    (folder / "notebook.ipynb").write_text(json.dumps(made), encoding="utf-8")
    (folder / "run.py").write_text(RUN, encoding="utf-8")
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "ZERO_MIN_REPLACE")}
    env |= {
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "OMP_NUM_THREADS": "1",
    }  # "0" means no isolation; nothing is downloaded
    command = [bare, "run.py", "notebook.ipynb"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_without_the_address_it_asks_for_it(bare: Path, tmp_path: Path) -> None:
    done = run(bare, tmp_path, "")
    assert done.returncode != 0
    assert "ModuleNotFoundError: set REPOSITORY above" in done.stdout + done.stderr


@pytest.mark.slow
def test_with_the_address_it_installs_the_project_and_runs(bare: Path, tmp_path: Path) -> None:
    done = run(bare, tmp_path, ROOT.as_uri())
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"from {tmp_path / repository.FOLDER / 'zero_min'}" in done.stdout
    assert "this machine has" in done.stdout and "recorded on" in done.stdout
