"""Packs what a bare machine lacks: wheels and, if asked for, compiled operators, into a folder git ignores.

    python -m tests.gpu.pack                                  where there is a network
    python -m tests.gpu.pack --arch 90 --python build/matrix/torch-2.11-python3.12/bin/python

A bare machine has Python 3.12, torch 2.11 for CUDA 13.0, nvcc, pytest, hypothesis, rich, safetensors and
matplotlib, and no network. Take the checkout there with this folder in it, and `make gpu-day PYTHON=python3`
finds both: wheels are unpacked beside the results, nothing is installed. An archive of an earlier call, put
into the same folder, is what the next call goes on from.

A library of operators fits one version of torch: `--python` is an interpreter that has the one of that
machine. `make test-matrix` makes such an environment. What does not fit is compiled there.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ".wheels"
OPERATORS = "operators"  # inside it
THERE = ("torch", "safetensors")  # of the package's dependencies
MISSING = "pydantic"  # where this can be imported, wheels are not needed
LIMIT = 60 * 2**20  # bytes, of the folder and the tracked files together
GLIBC = range(17, 29)  # 2.17 to 2.28: pip takes the names of platforms literally


def wanted() -> list[str]:
    """The package's own dependencies that are not there."""
    project = (ROOT / "pyproject.toml").read_text()
    needed = re.search(r"^dependencies = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert needed is not None
    each = re.findall(r'^  "(([\w-]+).*?)"', needed[1], re.MULTILINE)
    return [requirement for requirement, name in each if name not in THERE]


def download(folder: Path) -> list[str]:
    """pip's arguments: wheels of those and of what they need, for that machine whatever this one is."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in reversed(GLIBC)] + ["manylinux2014_x86_64"]
    return [
        *("download", "--quiet", "--dest", str(folder), "--constraint", str(ROOT / "constraints.txt")),
        *("--only-binary", ":all:", "--python-version", "3.12", "--implementation", "cp", "--abi", "cp312"),
        *(argument for platform in platforms for argument in ("--platform", platform)),
        *wanted(),
    ]


def unpack(wheels: Path, target: Path) -> Path | None:
    """Where the wheels' packages can be imported from; None if nothing is missing.

    A wheel is a zip file of what is to be on the path: pip is not needed.
    """
    if find_spec(MISSING) is not None:
        return None
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise SystemExit(
            f"{MISSING} is missing here, and there are no wheels in {wheels}: run python -m tests.gpu.pack "
            f"where there is a network, or pip install {' '.join(wanted())}"
        )
    for wheel in found:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(target)
    return target


def build(arch: str, python: str, folder: Path) -> None:
    """Compile the operators for one architecture, against that interpreter's torch.

    A library that is there already, such as an editable installation's, is copied instead.
    """
    python = str(Path(shutil.which(python) or python).absolute())  # a link stays one: it has an environment
    given = {"ZERO_FULL_CUDA_ARCHS": arch, "ZERO_FULL_CACHE": str(folder), "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(
        [python, "-m", "zero_full", "build"],
        env={**os.environ, **given},
        cwd=tempfile.gettempdir(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    print(printed, end="")
    folder.mkdir(exist_ok=True)
    for library in map(Path, re.findall(r"(?m)^\w+: (/.*\.so)$", printed)):
        if library.parent != folder:
            shutil.copyfile(library, folder / library.name)
    for part in ("cpu", "cuda"):
        if not list(folder.glob(f"zf_{part}-*.so")):
            raise SystemExit(f"no operators for {part} came into {folder}: the lines above say why")


def size_of(folder: Path) -> int:
    """Bytes of the folder, and of what git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = [ROOT / name for name in listed.stdout.split("\0") if name]
    files = [*tracked, *folder.rglob("*")]
    return sum(file.stat().st_size for file in files if file.is_file())


def main(given: Sequence[str] | None = None) -> int:
    """Fill the folder, and say how large everything is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--arch", help="compile the operators for this one, such as 90, and take them along")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with that machine's torch")
    parser.add_argument("--folder", type=Path, default=ROOT / FOLDER)
    asked = parser.parse_args(given)
    asked.folder.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-m", "pip", *download(asked.folder)], check=True)
    if asked.arch:
        build(asked.arch, asked.python, (asked.folder / OPERATORS).absolute())
    size = size_of(asked.folder)
    for file in sorted(asked.folder.rglob("*")):
        if file.is_file():
            print(f"{file.stat().st_size / 2**20:7.2f} MiB  {file.relative_to(asked.folder)}")
    print(f"{size / 2**20:7.2f} MiB  with the tracked files, of {LIMIT / 2**20:.0f}")
    return int(size > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
