"""Notebooks, executed while the site is built, as pages.

A run is kept in build/notebook_pages until the notebook or code that it may call changes; tests/notebooks
look at the same run. A notebook that fails stops the build. A picture becomes a file, and its description
comes from the cell's metadata: "alt", a string, or a list of them if the cell shows several pictures.

ZERO_FULL_NOTEBOOKS names those that are run, if not all are: a test run takes one. The page of another
notebook shows the last run, or its cells without results.
"""

import base64
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from places import ROOT, SiteError, relinked, unfolded

from lessons import repository

log = logging.getLogger("mkdocs.notebooks")  # mkdocs prints what it is told
NOTEBOOKS = ROOT / "notebooks"
CACHE = ROOT / "build" / "notebook_pages"
CALLED = ("zero_min", "zero_full", "lessons", "tests/lessons")  # a change may change what a notebook shows
AT_A_TIME = 2
TIMEOUT_S = 300  # for a cell
ONLY = "ZERO_FULL_NOTEBOOKS"  # the variable: names with spaces between them
HEAD = "---\nsearch: {boost: 0.5}\n---\n\n"  # the lesson about the same comes first
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
PICTURES = {"image/svg+xml": "svg", "image/png": "png"}


def names() -> list[str]:
    """The notebooks there are, without their suffix."""
    return sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def folders() -> dict[str, Path]:
    """Each notebook's folder with page.md, its pictures and executed.ipynb. An error if a notebook fails."""
    run = os.environ[ONLY].split() if ONLY in os.environ else names()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        results = {name: pool.submit(folder, name, name in run) for name in names()}
    return {name: result.result() for name, result in results.items()}


def folder(name: str, run: bool = True) -> Path:
    """The notebook's folder, from its last run or a new one. Without `run` its cells may have no results."""
    path = NOTEBOOKS / f"{name}.ipynb"
    kept = CACHE / f"{name}-{_key(path)}"
    if kept.exists():
        return kept
    if not run:
        import nbformat  # as in `_executed`

        return _made(name, nbformat.read(path, as_version=4), CACHE / "not_run" / kept.name)
    place, began = f"notebook {name}, {names().index(name) + 1} of {len(names())}", time.perf_counter()
    log.info("%s: running", place)
    notebook = _executed(path)
    log.info("%s: done after %.0f s", place, time.perf_counter() - began)
    return _made(name, notebook, kept)


def _made(name: str, notebook: Any, folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(mkdtemp(dir=folder.parent))
    try:
        (fresh / "executed.ipynb").write_text(json.dumps(notebook))
        (fresh / "page.md").write_text(_Page(name, fresh).text(notebook))
        for old in folder.parent.glob(f"{name}-*"):
            shutil.rmtree(old, ignore_errors=True)
        with suppress(OSError):  # another build was as fast
            fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def _key(path: Path) -> str:
    digest = hashlib.sha256(_code_key().encode())
    digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _code_key() -> str:
    """Stands for everything that a notebook may call, and for this file."""
    digest = hashlib.sha256(f"torch {version('torch')} matplotlib {version('matplotlib')}".encode())
    files = [
        file
        for package in CALLED
        for file in (ROOT / package).rglob("*")
        if file.suffix in (".py", ".js", ".txt", ".json")
    ]
    for file in sorted([*files, Path(__file__)]):
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _executed(path: Path) -> Any:
    # Imported here because that takes seconds, and most builds have nothing to run.
    from nbmake.nb_run import NotebookRun

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a rank is one worker
    os.environ["IPYTHONDIR"] = str(_ipython())
    result = NotebookRun(path, TIMEOUT_S).execute()  # in its own folder, as JupyterLab would
    if result.error:
        raise SiteError(f"notebooks/{path.name} fails:\n{ANSI.sub('', result.error.trace)}")
    return result.nb


def _ipython() -> Path:
    """Settings that are not the reader's own, and spare a warning for every kernel that starts."""
    settings = CACHE / "ipython" / "profile_default" / "ipython_kernel_config.py"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text("c.IPKernelApp.log_level = 40\n")
    return CACHE / "ipython"


class _Page:
    """One notebook as Markdown."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.pictures = name, folder, 0
        self.home, self.page = f"notebooks/{name}.ipynb", f"notebooks/{name}.md"

    def text(self, notebook: Any) -> str:
        """All cells with their outputs."""
        parts = [part for number, cell in enumerate(notebook.cells, 1) for part in self._cell(number, cell)]
        title, _, rest = "\n\n".join(parts).partition("\n")
        if not title.startswith("# "):
            raise SiteError(f"{self.home}: the first cell must begin with a title, `# ...`")
        elsewhere = repository.links(self.name).items()
        opens = "".join(f" It opens in [{place}]({address})." for place, address in elsewhere)
        run = "run when" if any(cell.get("outputs") for cell in notebook.cells) else "which was not run when"
        facts = f"This page is `{self.home}`, {run} the site was built. `make lab` opens it.{opens}"
        return f'{HEAD}{title}\n\n<p class="facts" markdown="span">{facts}</p>\n\n{rest}\n'

    def _cell(self, number: int, cell: Any) -> Iterator[str]:
        if "remove-cell" in cell.metadata.get("tags", []) or not cell.source.strip():
            return
        if cell.cell_type == "markdown":
            yield relinked(unfolded(cell.source), self.home, self.page)
        elif cell.cell_type == "code":
            if "hide-input" not in cell.metadata.get("tags", []):
                yield _fenced(cell.source, "ipython3")
            yield from self._outputs(number, cell)

    def _outputs(self, number: int, cell: Any) -> Iterator[str]:
        alts = cell.metadata.get("alt", [])
        alts = [alts] if isinstance(alts, str) else list(alts)
        printed = ""
        for output in cell.outputs:
            if output.output_type == "stream":
                printed += output.text
                continue
            if printed:
                yield _printed(printed)
                printed = ""
            yield self._shown(number, output, alts)
        if printed:
            yield _printed(printed)

    def _shown(self, number: int, output: Any, alts: list[str]) -> str:
        if output.output_type == "error":
            return _printed("\n".join(output.traceback))
        for kind, suffix in PICTURES.items():
            if kind in output.data:
                if not alts:
                    raise SiteError(
                        f"{self.home}, cell {number}: a picture without a description; give it one as "
                        '"alt" in the metadata of the cell'
                    )
                return self._picture(output.data[kind], suffix, alts.pop(0))
        if "text/markdown" in output.data:
            return str(output.data["text/markdown"])
        if "text/html" in output.data:
            shown = re.sub("\n+", "\n", output.data["text/html"])  # an empty line would end raw HTML
            return f'<div class="output" data-search-exclude>\n{shown}\n</div>'
        return _printed(output.data.get("text/plain", ""))

    def _picture(self, data: str, suffix: str, alt: str) -> str:
        self.pictures += 1
        file = self.folder / f"{self.name}_{self.pictures}.{suffix}"
        file.write_bytes(data.encode() if suffix == "svg" else base64.b64decode(data))
        return f"![{alt}]({file.name})"


def _fenced(code: str, language: str) -> str:
    fence = "`" * max(3, 1 + max((len(m) for m in re.findall(r"`{3,}", code)), default=2))
    return f"{fence}{language}\n{code}\n{fence}"


def _printed(text: str) -> str:
    lines = [line.rpartition("\r")[2].rstrip() for line in ANSI.sub("", text).split("\n")]
    block = _fenced("\n".join(lines).rstrip(), "text")
    return f'<div class="output" data-search-exclude markdown="1">\n\n{block}\n\n</div>'


def titles() -> dict[str, str]:
    """Each notebook's title: the first line of its first cell."""
    found = {}
    for name in names():
        cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
        found[name] = "".join(cells[0]["source"]).partition("\n")[0].lstrip("# ") if cells else name
    return found
