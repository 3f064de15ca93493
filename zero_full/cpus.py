"""The CPUs that this process may use."""

import os
from collections.abc import Iterator
from math import ceil
from pathlib import Path

from zero_full.control_groups import ROOT, control_groups, read_text


def usable_cpus(root: Path = ROOT) -> int:
    """Return the number of CPUs: those of the affinity mask, or fewer by a quota of a control group."""
    known = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([known, *map(ceil, _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quotas of control groups, in CPUs."""
    for group in control_groups("cpu", root):
        names = ("cpu.max",) if group.is_v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        numbers = " ".join(read_text(group.folder / name) for name in names).split()
        if len(numbers) == 2 and all(each.isdigit() for each in numbers):  # "max" and -1 are no quota
            yield int(numbers[0]) / int(numbers[1])
