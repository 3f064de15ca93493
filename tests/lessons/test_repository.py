"""What follows from the project's public address: links, the commands of a clone, a cell that installs."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from lessons import repository, weave
from lessons.registry import ROOT

SOMEWHERE = "https://github.com/somebody/something"


@pytest.mark.parametrize("address", [SOMEWHERE, SOMEWHERE + "/", SOMEWHERE + ".git"])
def test_a_notebook_opens_in_colab_and_binder_by_one_link(address: str) -> None:
    assert repository.links("03_parameters", address) == {
        "Colab": "https://colab.research.google.com/github/somebody/something/blob/main/notebooks/03_parameters.ipynb",
        "Binder": "https://mybinder.org/v2/gh/somebody/something/main?labpath=notebooks/03_parameters.ipynb",
    }


def test_without_an_address_there_are_no_links_and_the_reader_is_told_what_to_put_there() -> None:
    assert repository.links("03_parameters", "") == {} and repository.elsewhere(["03_parameters"], "") == ""
    assert "git clone ADDRESS zero-full" in repository.clone("")
    assert "ADDRESS is " in repository.clone("") and "ADDRESS" not in repository.clone(SOMEWHERE)


def test_all_notebooks_are_listed_with_their_links() -> None:
    names = [path.stem for path in weave.notebooks()]
    listed = repository.elsewhere(names, SOMEWHERE)
    assert all(address in listed for name in names for address in repository.links(name, SOMEWHERE).values())


def test_the_cell_that_installs_does_nothing_where_the_project_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)  # would be an error
    for address in ("", SOMEWHERE):
        exec(repository.install_cell(address), {})


def test_the_cell_fetches_and_installs_where_the_project_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: ran.append([str(word) for word in command]))
    monkeypatch.setattr(sys, "path", list(sys.path))
    exec(repository.install_cell(SOMEWHERE), {})
    folder = str(tmp_path / "zero-full")
    assert ran == [
        ["git", "clone", "--quiet", "--depth", "1", SOMEWHERE, folder],
        [sys.executable, "-m", "pip", "install", "--quiet", "-e", f"{folder}[learn]"],
    ]
    assert sys.path[0] == folder
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e \.\[learn\]"):
        exec(repository.install_cell(""), {})


def test_one_notebook_s_reader_may_set_the_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cell = repository.install_cell("", asks=True)
    exec(cell, {})  # the project is here, so nothing happens
    ran: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: ran.append([str(word) for word in command]))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ModuleNotFoundError, match="set REPOSITORY above"):
        exec(cell, {})
    exec(cell.replace('REPOSITORY = ""', f'REPOSITORY = "{SOMEWHERE}"'), {})
    assert [command[0] for command in ran] == ["git", sys.executable] and SOMEWHERE in ran[0]
    assert f'REPOSITORY = "{SOMEWHERE}"' in repository.install_cell(SOMEWHERE, asks=True)


def test_the_address_stands_in_one_place() -> None:
    known = repository.REPOSITORY
    for text in (ROOT / "pyproject.toml", ROOT / "site" / "mkdocs.yml"):
        assert "github.com" not in text.read_text(encoding="utf-8"), f"{text.name}: see lessons/repository.py"
    assert not known or known.startswith("https://")
