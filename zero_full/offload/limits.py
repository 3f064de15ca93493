"""Check host memory before it is allocated, because the kernel kills processes that exceed it later.

Each rank reports its need and the limits that it sees. Ranks that name the same `shared_by` share a limit: a
machine's free memory, a control group's, or a process's own. A value that is missing in the system's files is
no limit.
"""

import mmap
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from zero_full.control_groups import ROOT, control_groups, read_text


class CgroupFiles(NamedTuple):
    """Names of the memory files in one version of control groups."""

    limit: str
    usage: str
    reclaimable: tuple[str, ...]  # lines of memory.stat: memory that the kernel can reclaim


CGROUP_V2 = CgroupFiles("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable"))
CGROUP_V1 = CgroupFiles(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)


@dataclass(frozen=True)
class Limit:
    """A limit on the memory that the processes with this `shared_by` use together."""

    name: str  # for a message
    shared_by: str  # equal for all processes that share the limit
    free: int  # bytes
    remedy: str


@dataclass(frozen=True)
class Need:
    """One rank's need, in bytes, and the limits on it."""

    size: int
    limits: tuple[Limit, ...]


def shortage_message(needs: Mapping[int, Need]) -> str | None:
    """Return the error message if needs exceed a limit, equal on all ranks; None if memory is enough."""
    under: dict[str, list[tuple[int, Limit]]] = {}
    for need in needs.values():
        for limit in need.limits:
            under.setdefault(limit.shared_by, []).append((need.size, limit))
    for sharing in under.values():
        sizes = [size for size, _ in sharing]
        least = min((limit for _, limit in sharing), key=lambda limit: limit.free)
        if sum(sizes) > least.free:
            each = f" ({len(sizes)} ranks, up to {gib(max(sizes))} each)" if len(sizes) > 1 else ""
            return (
                f"offload to the host (offload_optimizer, offload_param) needs {gib(sum(sizes))}{each}, but "
                f"{gib(least.free)} are free ({least.name}). Use more hosts, a smaller ratio of "
                f"offload_optimizer, or {least.remedy}."
            )
    return None


def gib(size: int) -> str:
    """Format bytes in GiB, or in MiB below one GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def memory_limits(host: str, root: Path = ROOT) -> Iterator[Limit]:
    """Yield the limits on this process. `host`: a unique name of the machine."""
    free = re.search(r"MemAvailable:\s+(\d+) kB", read_text(root / "proc/meminfo"))
    if free:
        yield Limit("MemAvailable", host, int(free[1]) * 1024, "free memory on this host")
    yield from _of_control_groups(host, root)
    yield from _of_process(host, root)


def _of_control_groups(host: str, root: Path) -> Iterator[Limit]:
    """Yield the limits of this process's control group and of its visible ancestors."""
    try:
        namespace = str((root / "proc/self/ns/cgroup").readlink())
    except OSError:
        namespace = ""
    for place, base, path, is_v2 in control_groups("memory", root):
        files = CGROUP_V2 if is_v2 else CGROUP_V1
        limit, used = _number(place / files.limit), _used(place, files)
        if limit is not None and used is not None:
            group = f"control group /{place.relative_to(base).as_posix().strip('.')}"
            # Without a namespace a container sees its own group as the outermost, with any path.
            shared_by = f"{host} {namespace} {place} {path if place == base else ''}"
            name = f"{group}: limit {gib(limit)}, in use {gib(used)}"
            yield Limit(name, shared_by, max(0, limit - used), "give the container more memory")


def _used(place: Path, files: CgroupFiles) -> int | None:
    """Return the bytes in use that the kernel cannot reclaim."""
    usage, stat = _number(place / files.usage), read_text(place / "memory.stat")
    if usage is None:
        return None
    found = dict(line.split(maxsplit=1) for line in stat.splitlines() if " " in line)
    return max(0, usage - sum(int(found.get(name, 0)) for name in files.reclaimable))


def _of_process(host: str, root: Path) -> Iterator[Limit]:
    limit = re.search(r"Max address space\s+(\d+)", read_text(root / "proc/self/limits"))
    pages = read_text(root / "proc/self/statm").partition(" ")[0]
    if limit and pages.isdigit():
        size, used = int(limit[1]), int(pages) * mmap.PAGESIZE
        name = f"ulimit -v: limit {gib(size)}, in use {gib(used)}"
        yield Limit(name, f"{host} process {os.getpid()}", max(0, size - used), "lift ulimit -v")


def _number(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit
