"""Where this project lives in public, and what follows from that: links that open a notebook elsewhere.

REPOSITORY is the only place that says it. Set it and run `make weave`: README, the notebooks and the site
then have the links, and the site knows its own address, which GitHub gives it. While it is empty none do.
"""

import json
from pathlib import Path

REPOSITORY = ""  # as in "https://github.com/OWNER/NAME"
BRANCH = "main"
FOLDER = "zero-full"  # into which a clone goes
CELL = "install"  # the id of the cell of every notebook that installs the project where it is missing

FETCH = """\
# Colab and Binder begin here. On a machine where the project is installed, this cell does nothing.
import importlib.util

if importlib.util.find_spec("zero_min") is None:
    import subprocess
    import sys
    from pathlib import Path

    folder = Path("{folder}").resolve()
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", "{repository}", folder], check=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "-e"]
    subprocess.run([*pip, f"{{folder}}[learn]"], check=True)
    sys.path.insert(0, str(folder))  # this kernel started before it was installed
"""
ASKING = """\
# Colab and Kaggle begin here. On a machine where the project is installed, this cell does nothing.
import importlib.util

REPOSITORY = "{repository}"  # the only setting: the address of the project, as in https://github.com/OWNER/NAME

if importlib.util.find_spec("zero_min") is None:
    import subprocess
    import sys
    from pathlib import Path

    if not REPOSITORY:
        raise ModuleNotFoundError("set REPOSITORY above to the project's address, and run the cell again")
    folder = Path("{folder}").resolve()
    if not folder.exists():
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", REPOSITORY, folder], check=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "-e"]
    subprocess.run([*pip, f"{{folder}}[learn]"], check=True)
    sys.path.insert(0, str(folder))  # this kernel started before it was installed
"""
ASKS = "11_one_gpu"  # the notebook whose reader may set the address
MISSING = """\
# On a machine where the project is installed, this cell does nothing.
import importlib.util

if importlib.util.find_spec("zero_min") is None:
    raise ModuleNotFoundError("in the project's folder: python -m pip install -e .[learn]")
"""


def install_cell(repository: str = REPOSITORY, asks: bool = False) -> str:
    """The code of the cell that installs the project where it is missing; it may ask for the address."""
    if asks:
        return ASKING.format(repository=repository, folder=FOLDER).rstrip()
    return (FETCH.format(repository=repository, folder=FOLDER) if repository else MISSING).rstrip()


def links(notebook: str, repository: str = REPOSITORY) -> dict[str, str]:
    """Where `notebooks/NAME.ipynb` opens without an installation: a name and an address each."""
    if not repository:
        return {}
    place = f"notebooks/{notebook}.ipynb"
    return {
        "Colab": f"https://colab.research.google.com/github/{name(repository)}/blob/{BRANCH}/{place}",
        "Binder": f"https://mybinder.org/v2/gh/{name(repository)}/{BRANCH}?labpath={place}",
    }


def name(repository: str = REPOSITORY) -> str:
    """OWNER/NAME; empty without an address."""
    return "/".join(repository.rstrip("/").removesuffix(".git").split("/")[-2:])


def pages(repository: str = REPOSITORY) -> str:
    """Where GitHub serves a repository's site; empty without an address."""
    owner, _, project = name(repository).partition("/")
    return f"https://{owner.lower()}.github.io/{project}/" if repository else ""


def edit(path: str, repository: str = REPOSITORY) -> str:
    """Where a reader can change a file of the repository, and offer the change; empty without an address."""
    return f"https://github.com/{name(repository)}/edit/{BRANCH}/{path}" if repository else ""


def clone(repository: str = REPOSITORY) -> str:
    """The commands that fetch the project, and what ADDRESS is if nobody knows it yet."""
    lines = ["```", f"git clone {repository or 'ADDRESS'} {FOLDER}", f"cd {FOLDER}", "```"]
    if not repository:
        lines += ["", "ADDRESS is where you read this: the repository's own address."]
    return "\n".join(lines)


def elsewhere(names: list[str], repository: str = REPOSITORY) -> str:
    """For the list of notebooks: a line with links for each place that opens them without an installation."""
    lines: dict[str, list[str]] = {}
    for name in names:
        for place, address in links(name, repository).items():
            lines.setdefault(place, []).append(f"[{name.partition('_')[0]}]({address})")
    return "\n\n".join(
        f"In {place}, without an installation: {', '.join(them)}." for place, them in lines.items()
    )


def with_install_cell(notebook: Path, repository: str = REPOSITORY) -> str:
    """The notebook's file, whose first code cell installs the project where it is missing."""
    made = json.loads(notebook.read_text(encoding="utf-8"))
    cells = [cell for cell in made["cells"] if cell["id"] != CELL]
    first = next(i for i, cell in enumerate(cells) if cell["cell_type"] == "code")
    asks = notebook.stem == ASKS
    source = install_cell(repository, asks).splitlines(keepends=True)
    # The site leaves it out, and JupyterLab folds it, unless the reader has something to set there.
    metadata = {} if asks else {"jupyter": {"source_hidden": True}, "tags": ["remove-cell"]}
    cell = {"cell_type": "code", "execution_count": None, "id": CELL, "metadata": metadata, "outputs": []}
    made["cells"] = [*cells[:first], {**cell, "source": source}, *cells[first:]]
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"
