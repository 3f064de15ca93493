"""Compiled operators of a day: libraries that were carried along, or that an earlier call has compiled."""

import gzip
import os
import shutil
import tempfile
from collections.abc import Container, Iterable
from io import BytesIO
from pathlib import Path
from typing import IO

COMPILED = "operators"  # in the folder of the results: libraries that a part has compiled, as .so.gz


def private_cache(sources: Iterable[Path]) -> Path:
    """Return a folder of this user's with the libraries of all sources, to be used as ZERO_FULL_CACHE.

    A library is loaded only from a folder that no other user can write to, which a checkout may not be. The
    folder stays until the machine is given back, with the libraries that parts compile into it.
    """
    cache = Path(tempfile.gettempdir()) / f"gpu-day-operators-{os.geteuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    for file in (file for source in sources if source.is_dir() for file in sorted(source.iterdir())):
        library = cache / file.name.removesuffix(".gz")
        if library.suffix == ".so" and not library.exists():
            with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as given:
                _write(library, given)
    return cache


def _write(file: Path, content: IO[bytes]) -> None:
    """Write a file that is complete, even if this process is killed meanwhile, or not there."""
    partial = file.with_suffix(".partial")
    with partial.open("wb") as made:
        shutil.copyfileobj(content, made)
    partial.chmod(0o600)
    partial.replace(file)


def keep_compiled(cache: Path, known: Container[str], folder: Path) -> None:
    """Copy libraries that were compiled into the cache to the results. `known`: names that are not new."""
    for library in sorted(cache.glob("*.so")):
        kept = folder / COMPILED / f"{library.name}.gz"
        if library.name in known or kept.exists():
            continue
        kept.parent.mkdir(exist_ok=True)
        _write(kept, BytesIO(gzip.compress(library.read_bytes())))
