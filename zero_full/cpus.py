"""The CPUs that this process may use."""

import os
from collections.abc import Iterator
from math import ceil
from pathlib import Path

ROOT = Path("/")


def usable_cpus(root: Path = ROOT) -> int:
    """Return the number of CPUs: those of the affinity mask, or fewer by a quota of a control group."""
    known = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([known, *map(ceil, _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quotas, in CPUs, of this process's control groups and of their visible ancestors."""
    for line in _text(root / "proc/self/cgroup").splitlines():  # number:controllers:path
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_v2, inside = number == "0", Path(path.lstrip("/"))
        if not is_v2 and "cpu" not in controllers.split(","):
            continue
        base = root / ("sys/fs/cgroup" if is_v2 else "sys/fs/cgroup/cpu")
        for place in (base / inside, *(base / above for above in inside.parents)):
            names = ("cpu.max",) if is_v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            numbers = " ".join(_text(place / name) for name in names).split()
            if len(numbers) == 2 and all(each.isdigit() for each in numbers):  # "max" and -1 are no quota
                yield int(numbers[0]) / int(numbers[1])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
