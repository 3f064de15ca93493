"""The control groups of this process: folders with files of its limits. Only Linux has them."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")


class ControlGroup(NamedTuple):
    """One of this process's control groups, or an ancestor that it can see."""

    folder: Path  # with the files
    base: Path  # the folder of the outermost group
    path: str  # of the process's own group, as the kernel names it
    is_v2: bool  # the version of control groups, which decides the names of files


def control_groups(controller: str, root: Path = ROOT) -> Iterator[ControlGroup]:
    """Yield the process's group for a controller ("cpu", "memory"), then its ancestors, in each version."""
    for line in read_text(root / "proc/self/cgroup").splitlines():  # number:controllers:path
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_v2, inside = number == "0", Path(path.lstrip("/"))
        if not is_v2 and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("" if is_v2 else controller)
        for folder in (base / inside, *(base / above for above in inside.parents)):
            yield ControlGroup(folder, base, path, is_v2)


def read_text(path: Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
