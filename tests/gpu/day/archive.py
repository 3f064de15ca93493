"""The archive of a day: one file with everything, which is brought back, and from which a later call goes on.

It is written before and after every part. So a call that is killed loses the part that was running, and a
later call knows which one that was.
"""

import json
import os
import zipfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

NAME = "gpu-day.zip"
VARIABLE = "OUT"  # a folder: the archive is written there instead of into the folder of the results
LIMIT = 15 * 2**20  # bytes: a machine may hand back only small files
NOT_ARCHIVED = ("packages", "page.md", "charts")  # in the folder; they can be made again


def target(folder: Path) -> Path:
    """Return the path of the archive of this folder's results."""
    return Path(os.environ.get(VARIABLE) or folder).absolute() / NAME


def save(folder: Path) -> list[str]:
    """Write the archive. Returns the names of files that would have made it larger than `LIMIT`."""
    file, left_out, total = target(folder), list[str](), 0
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in _contents(folder):
            name, is_compressed = path.relative_to(folder).as_posix(), path.suffix == ".gz"
            if is_compressed and total + path.stat().st_size > LIMIT:
                left_out.append(name)
                continue
            packed.write(path, name, zipfile.ZIP_STORED if is_compressed else zipfile.ZIP_DEFLATED)
            total += packed.getinfo(name).compress_size
    partial.replace(file)  # a reader sees the old archive or the new one
    return left_out


def _contents(folder: Path) -> Iterator[Path]:
    """Yield the files to be archived: results and logs, then compressed files from the smallest on."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".partial", ".zip")]
    found = [path for path in found if path.relative_to(folder).parts[0] not in NOT_ARCHIVED]
    yield from sorted(found, key=lambda path: (path.suffix == ".gz", path.stat().st_size, path))


def load(archive: Path, folder: Path, rehearsal: bool) -> list[str]:
    """Unpack results that are newer than those in the folder, and all else that the folder lacks.

    Results of a rehearsal are no results of a day: they are not taken. Returns the names of the parts.
    """
    taken = []
    with zipfile.ZipFile(archive) as packed:
        names = sorted(packed.namelist())
        for name in (name for name in names if name.endswith(".json") and "/" not in name):
            result = json.loads(packed.read(name))
            if result["rehearsal"] == rehearsal and _is_newer(result, folder / name):
                taken.append(Path(name).stem)
                for mine in {name, f"{taken[-1]}.log"} & {*names}:
                    packed.extract(mine, folder)
        for name in names if taken else []:
            if "/" in name and not (folder / name).exists():
                packed.extract(name, folder)
    return taken


def _is_newer(result: dict[str, Any], file: Path) -> bool:
    began = datetime.fromisoformat(result["began"])
    return not file.exists() or datetime.fromisoformat(json.loads(file.read_text())["began"]) < began
