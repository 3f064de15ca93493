"""The notebooks: stored without results, of one shape, and each runs from top to bottom.

Their numbers are tested by the asserts in their own cells. `make test` runs one of them, another one for each
commit; `make test-all` runs all.
"""

import ast
import importlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import notebook_pages
import pytest

from lessons import repository
from tests import rotation

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
OURS = ("lessons", "zero_full", "zero_min")
ON_THREADS = [path for path in NOTEBOOKS if path.stem[:2] <= "10"]  # whose ranks live in the kernel

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
each_run = pytest.mark.parametrize("path", rotation.one_of(NOTEBOOKS), ids=lambda path: path.stem)


def read(path: Path) -> Any:
    import nbformat  # its checks of addresses take two seconds to import

    return nbformat.read(path, as_version=4)


def code(path: Path) -> list[str]:
    """The sources of the code cells, but for the one that installs the project."""
    return [cell.source for cell in cells_of_code(read(path))]


def cells_of_code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.id != repository.CELL]


def executed(path: Path) -> Any:
    """The notebook with its outputs, from the run that the site shows; an error if a cell fails."""
    return read(notebook_pages.folder(path.stem) / "executed.ipynb")


def outputs(path: Path) -> Iterator[tuple[Any, Any]]:
    """(cell, output) of everything that a reader of the executed notebook sees."""
    for cell in executed(path).cells:
        for output in cell.get("outputs", []):
            yield cell, output


def text(output: Any) -> str:
    """All text of an output."""
    return " ".join([output.get("text", ""), *map(str, output.get("data", {}).values())])


def test_all_steps_have_a_notebook_and_the_readme_names_them() -> None:
    assert {path.stem[:2] for path in NOTEBOOKS} >= {f"0{step}" for step in range(7)}
    readme = (FOLDER / "README.md").read_text()
    assert not [path.name for path in NOTEBOOKS if f"({path.name})" not in readme]


@each_notebook
def test_no_results_are_stored(path: Path) -> None:
    for cell in read(path).cells:
        assert not cell.get("outputs"), f"{cell.id}: jupyter nbconvert --clear-output --inplace"
        assert cell.get("execution_count") is None, cell.id


@each_notebook
def test_the_file_is_of_the_format_with_readable_ids(path: Path) -> None:
    import nbformat

    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    unreadable = [cell.id for cell in notebook.cells if not re.fullmatch(r"[a-z]+(-[a-z0-9]+)*", cell.id)]
    assert not unreadable, "an id is a few words: it stays when the cell changes"


@each_notebook
def test_what_it_imports_is_there(path: Path) -> None:
    """Without a run: most notebooks are run in `make test-all` only."""
    cells = [
        cell for cell in code(path) if not cell.startswith("%%") or re.match(r"%%writefile .*\.py\n", cell)
    ]
    lines = [line for cell in cells for line in cell.splitlines() if not re.match(r" *[%!]", line)]
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in OURS:
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")


@each_notebook
def test_at_least_three_asserts_compare_something(path: Path) -> None:
    lines = [line for cell in code(path) if not cell.startswith("%%") for line in cell.splitlines()]
    tree = ast.parse("\n".join(line for line in lines if not line.lstrip().startswith(("%", "!"))))
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert sum(any(isinstance(part, ast.Compare) for part in ast.walk(node.test)) for node in asserts) >= 3


@each_run
def test_the_reader_predicts_before_it_is_shown(path: Path) -> None:
    shown = [output.get("data", {}).get("text/html", "") for _, output in outputs(path)]
    asked = [html for html in shown if 'class="zero-predict"' in html]
    assert asked
    assert not [html for html in asked if "<details open" in html or "Measured" in html.split("<details>")[0]]


@each_run
def test_some_number_has_a_slider(path: Path) -> None:
    sliders = "".join(text(output) for _, output in outputs(path)).count('class="zero-slider"')
    assert sliders >= 1


@each_notebook
def test_the_first_cell_is_short(path: Path) -> None:
    assert len(code(path)[0].splitlines()) < 20


def checks(cell: Any) -> bool:
    """Whether it asserts something; what it writes into a file does not count."""
    return (
        not cell.source.startswith("%%") and re.search(r"^ *assert ", cell.source, re.MULTILINE) is not None
    )


@each_notebook
def test_cells_that_check_are_out_of_sight_and_do_nothing_else(path: Path) -> None:
    for cell in cells_of_code(read(path)):
        hidden = "remove-cell" in cell.metadata.get("tags", [])
        assert hidden == checks(cell) == (cell.id.startswith("assert-")), cell.id
        assert hidden == cell.metadata.get("jupyter", {}).get("source_hidden", False), cell.id


@each_run
def test_cells_that_check_show_nothing(path: Path) -> None:
    for cell in cells_of_code(executed(path)):
        assert not (checks(cell) and cell.outputs), f"{cell.id}: nobody would see that"


@each_notebook
def test_it_ends_with_a_script_that_real_processes_run(path: Path) -> None:
    cells = code(path)
    written = max(i for i, cell in enumerate(cells) if cell.startswith("%%writefile"))
    last = "\n".join(cells[written + 1 :])
    assert "torchrun" in last and "assert" in last
    assert "torchrun(" in last or "timeout" in last, "without a limit a hang would be for ever"


@pytest.mark.parametrize("path", ON_THREADS, ids=lambda path: path.stem)
def test_the_first_cell_runs_a_world(path: Path) -> None:
    assert "run_world(" in code(path)[0]


@each_run
def test_it_runs_and_the_first_cell_shows_something(path: Path) -> None:
    first = cells_of_code(executed(path))[0]
    assert any(text(output).strip() for output in first.outputs)


@each_run
def test_every_picture_says_what_is_seen(path: Path) -> None:
    pictures = 0
    for cell, output in outputs(path):
        data = output.get("data", {})
        for kind in (kind for kind in data if kind.startswith("image/")):
            alt = output.metadata.get(kind, {}).get("alt") or cell.metadata.get("alt")
            assert alt, f"{cell.id}: {kind} without alt; lessons.plots.picture asks for one"
            pictures += 1
        for svg in re.findall(r"<svg[^>]*>", data.get("text/html", "")):
            assert 'role="img"' in svg, cell.id
            assert re.search(r'aria-label="[^"]{40,}"', svg), f"{cell.id}: say in a sentence what is seen"
            pictures += 1
        for img in re.findall(r"<img[^>]*>", data.get("text/html", "")):
            assert re.search(r'alt="[^"]+"', img), cell.id
            pictures += 1
    assert pictures >= 1


@each_run
def test_pictures_of_a_notebook_do_not_share_names(path: Path) -> None:
    html = " ".join(output.get("data", {}).get("text/html", "") for _, output in outputs(path))
    names = re.findall(r'\bid="([^"]+)"', html)
    assert sorted(names) == sorted(set(names)), "the second picture would use parts of the first"


@each_run
def test_no_output_names_a_folder_of_this_machine(path: Path) -> None:
    for cell, output in outputs(path):
        assert str(ROOT) not in text(output), cell.id
        assert tempfile.gettempdir() + "/" not in text(output), cell.id
