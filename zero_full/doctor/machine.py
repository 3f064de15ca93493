"""Report of `python -m zero_full doctor`: installed packages, libraries in use, and problems with remedies.

It only inspects: it starts no process group and allocates no device memory, except with --measure. It must
work where the rest of the package fails, so every import may fail, including those of zero_full itself.
"""

import importlib
import json
import os
import platform
import re
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from zero_full.cpus import usable_cpus
from zero_full.formatting import table_row, terminal_width

TORCH_AT_LEAST = (2, 11)
PYDANTIC_AT_LEAST = (2, 0)
Rows = list[tuple[str, str]]


def sections() -> dict[str, Rows]:
    """Return the rows of all sections, by title."""
    return {
        "zero_full": package(),
        "machine": machine(),
        "accelerators": accelerators(),
        "torch.distributed": distributed(),
        "launcher": launcher(),
        "optional packages": [
            ("numpy", installed("numpy") or "not installed"),
            ("deepspeed", f"{installed('deepspeed') or 'not installed'} (not needed)"),
        ],
        "compiled ops": compiled_ops(),
    }


def report() -> str:
    """Return all sections as plain text in two columns, wrapped to the terminal's width."""
    found, width = sections(), terminal_width()
    column = 4 + max(len(name) for rows in found.values() for name, _ in rows)
    lines: list[str] = []
    for title, rows in found.items():
        lines.append(title)
        for name, value in rows:
            lines += table_row(f"  {name}", value, column, width)
        lines.append("")
    return "\n".join(lines)


def problems() -> list[str]:
    """Return the problems that prevent the package from running, each with its remedy."""
    found = requirement_problems("torch", TORCH_AT_LEAST)
    torch, _ = imported("torch")
    if torch is not None and not distributed_available(torch):
        found.append("this torch has no torch.distributed, remedy: install a build from pytorch.org")
    found += requirement_problems("pydantic", PYDANTIC_AT_LEAST)
    return found + requirement_problems("safetensors") + launcher_problems()


def main(measure: str | bool = False, as_json: bool = False) -> int:
    """Print the report and a line for each problem. Returns the exit code: 0 without problems, else 1.

    `measure`: also measure bandwidths, of memory (True) or of memory and this directory's disk.
    """
    if as_json:
        return _print_json(measure)
    print(report())
    found = problems()
    if measure is not False:
        print("measured, by one process")
        found += measured(measure, lambda name, value: print(f"  {name}  {value}", flush=True))
        print()
    for problem in found:
        print(f"problem: {problem}")
    if not found:
        print("no problem found")
    return 1 if found else 0


def _print_json(measure: str | bool) -> int:
    """Print the report as one line of JSON. Returns the exit code."""
    rows: Rows = []
    found = problems()
    if measure is not False:
        found += measured(measure, lambda name, value: rows.append((name, value)))
    about = {title: dict(each) for title, each in sections().items()}
    print(json.dumps({"report": about, "measured": dict(rows), "problems": found}))
    return 1 if found else 0


def measured(place: str | bool, show: Callable[[str, str], None]) -> list[str]:
    """Measure bandwidths, and show each at once, as it takes seconds. Returns errors of the measurement.

    `place`: the directory of the disk to measure; True: none
    """
    bandwidth, reason = imported("zero_full.doctor.bandwidth")
    if bandwidth is None:
        return [f"nothing can be measured: {reason}"]
    try:
        of_disk = [] if place is True else [partial(bandwidth.disk_rows, place)]
        for rows in (bandwidth.memory_rows, *of_disk):
            for name, value in rows():
                show(name, value)
    except bandwidth.MeasureError as error:
        return [str(error)]
    return []


def package() -> Rows:
    """Return the versions of zero_full, Python and the required packages."""
    torch, reason = imported("torch")
    answer = f"not usable: {reason}"
    if torch is not None:
        relation = "at least" if release_of(torch.__version__) >= TORCH_AT_LEAST else "OLDER than"
        answer = f"{torch.__version__} ({relation} {'.'.join(map(str, TORCH_AT_LEAST))})"
    return [
        ("version", installed("zero-full") or "not installed, run from its source"),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("torch", answer),
        ("pydantic", installed("pydantic") or "missing"),
        ("safetensors", installed("safetensors") or "missing"),
    ]


def machine() -> Rows:
    """Return the platform, processors, threads and memory."""
    torch, _ = imported("torch")
    threads = os.environ.get("OMP_NUM_THREADS")
    rows = [
        ("platform", platform.platform()),
        ("CPUs", f"{usable_cpus()} usable of {os.cpu_count()}"),
        ("OMP_NUM_THREADS", threads or "not set (torchrun sets it to 1 for more than one process)"),
    ]
    if torch is not None:
        rows.append(("torch threads", str(torch.get_num_threads())))
    return [*rows, ("memory", memory())]


def memory() -> str:
    """Return the memory of the machine, and the container's limit if it is lower."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return "unknown"
    answer = in_gib(total)
    free = re.search(r"MemAvailable:\s+(\d+) kB", text_of("/proc/meminfo"))
    if free:
        answer += f", {in_gib(int(free[1]) * 1024)} available"
    limit = text_of("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit() and int(limit) < total:
        answer += f", this container may use {in_gib(int(limit))}"
    return answer


def accelerators() -> Rows:
    """Return the devices that torch finds, or the reason why it finds none."""
    torch, _ = imported("torch")
    if torch is None:
        return [("none", "torch is not usable")]
    kind = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    if kind is not None and torch.accelerator.is_available():
        count = torch.accelerator.device_count()
        return [(f"{kind.type}:{index}", _properties(torch, kind, index)) for index in range(count)]
    return [("none", why_no_device(torch))]


def _properties(torch: Any, kind: Any, index: int) -> str:
    """Return name, memory and compute capability of a device, as far as its kind has them."""
    ask = getattr(torch.get_device_module(kind), "get_device_properties", None)
    known: Any = None if ask is None else ask(index)
    found = [str(known.name)] if hasattr(known, "name") else []
    found += [in_gib(known.total_memory)] if hasattr(known, "total_memory") else []
    found += [f"compute capability {known.major}.{known.minor}"] if hasattr(known, "major") else []
    return ", ".join(found) or "no properties"


def why_no_device(torch: Any) -> str:
    """Return why torch finds no accelerator: the build, the environment or the driver."""
    built_for = torch.version.cuda or torch.version.hip
    if built_for is None:
        return "this torch is built for CPU only; pytorch.org has builds for GPUs"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides every device; unset it"
    kind = "CUDA" if torch.version.cuda else "ROCm"
    return f"torch is built for {kind} {built_for} but finds no device; check that the driver is loaded"


def distributed() -> Rows:
    """Return the available backends, each with its implementation of reduce-scatter and all-gather."""
    torch, _ = imported("torch")
    if torch is None or not distributed_available(torch):
        return [("available", "no")]
    gloo = (
        "shared memory on one Linux host, else slices sent directly and summed locally; "
        "on a device, the same through the host's memory"
    )
    answers = {"gloo": gloo, **dict.fromkeys(("nccl", "mpi", "ucc", "xccl"), "the backend's own collectives")}
    asks = {name: getattr(torch.distributed, f"is_{name}_available", lambda: False) for name in answers}
    rows = [(name, answer) for name, answer in answers.items() if asks[name]()]
    return [("backends", ", ".join(name for name, _ in rows) or "none"), *rows]


def launcher() -> Rows:
    """Return the variables that a launcher sets, and the rank that follows from them."""
    launch, reason = imported("zero_full.start.launch")
    if launch is None:
        return [("unknown", reason)]
    names = (*launch.VARIABLES[:2], "LOCAL_RANK", *launch.VARIABLES[2:])
    rows = [(name, os.environ.get(name) or "not set") for name in names]
    try:
        place = launch.read_launcher(os.environ)
    except launch.LaunchError:
        return [*rows, ("this process", "not clear")]
    alone = "one process; for more: torchrun --nproc-per-node=2 train.py"
    place_text = f"rank {place.rank} of {place.world_size}, set by {place.source}" if place else alone
    return [*rows, ("this process", place_text)]


def launcher_problems() -> list[str]:
    """Return the errors that `init_distributed` would raise in this environment."""
    launch, _ = imported("zero_full.start.launch")
    if launch is None:
        return []
    try:
        place = launch.read_launcher(os.environ)
    except launch.LaunchError as error:
        return [str(error)]
    torch, _ = imported("torch")
    if place is None or not hasattr(torch, "accelerator") or not torch.accelerator.is_available():
        return []
    problem = launch.local_rank_problem(place.variables.get("LOCAL_RANK"))
    return [] if problem is None else [problem]


def requirement_problems(name: str, least: tuple[int, ...] = ()) -> list[str]:
    """Return a problem if a required package cannot be imported, or is older than release `least`."""
    wanted = f"'{name}>={'.'.join(map(str, least))}'" if least else name
    module, reason = imported(name)
    if module is None:
        return [f"{name} cannot be imported ({reason}), remedy: pip install {wanted}"]
    version = str(getattr(module, "VERSION", None) or getattr(module, "__version__", "0"))
    too_old = release_of(version) < least
    return [f"{name} {version} is too old, remedy: pip install {wanted}"] if too_old else []


def compiled_ops() -> Rows:
    """Return the implementation of each operator, and the reason if it is not compiled."""
    load, reason = imported("zero_full.kernels.load")
    return [("none", f"torch is not usable: {reason}")] if load is None else list(load.rows())


def distributed_available(torch: Any) -> bool:
    """Return whether this build of torch has torch.distributed."""
    return hasattr(torch, "distributed") and bool(torch.distributed.is_available())


def imported(name: str) -> tuple[Any, str]:
    """Import a module: return it, or None and the reason. Broken installations raise any exception."""
    try:
        return importlib.import_module(name), ""
    except Exception as error:
        return None, str(error).partition("\n")[0] or type(error).__name__


def installed(distribution: str) -> str | None:
    """Return the version of a distribution without importing it, or None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def release_of(text: str) -> tuple[int, ...]:
    """Return the major and minor release of a version: (2, 11) for "2.11.0+cpu"."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else (0,)


def in_gib(size: int) -> str:
    """Format a number of bytes in GiB."""
    return f"{size / 2**30:.1f} GiB"


def text_of(path: str) -> str:
    """Return a file's text, or an empty string if it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
