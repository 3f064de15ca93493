"""What the offload benchmark does on an accelerator only. Nobody has run it there yet."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from tests.bench import interleave, offload_rows, step_time
from tests.bench.interleave import Ratio
from tests.bench.offload_rows import DISK, HOST
from tests.bench.step_time import Plan, Rank, leave_with_parent
from tests.gpu.day.overlap import ON_DEVICE, hidden, length, union
from tests.gpu.day.rows import finish
from zero_full.doctor.bandwidth import memory_rows

COPIES = re.compile("Memcpy (DtoH|HtoD)", re.IGNORECASE)
WAYS = {"down": re.compile("Memcpy DtoH", re.IGNORECASE), "up": re.compile("Memcpy HtoD", re.IGNORECASE)}
ON_HOST = "zero_full::"  # operators by which the host steps
STEPS = 3
Sections = tuple[list[str], list[Ratio]]


def traced(plan: Plan, in_ranks: Callable[..., Any], limit: float, directory: str) -> Sections:
    """Step times on every tier, and what a trace says of their copies. `directory`: on the disk to use."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        plan = replace(plan, rows=tuple(offload_rows.of_tiers(folder)))
        ((found, traces),) = in_ranks(trace_main, 1, plan, folder, limit=limit)
    lines = []
    for name, row in found.items():
        low, high = interleave.spread(row.step)
        step = [f"{1e3 * interleave.middle(row.step):.1f}", f"{1e3 * low:.1f}-{1e3 * high:.1f}"]
        lines.append([name, *step, *of_trace(traces[name], STEPS)])
    head = ["row", "step, ms", "range", "copies, ms", "hidden", "GB/s down", "GB/s up"]
    alone = interleave.table(["copies alone", ""], memory_rows(0.5))
    return [interleave.table(head, lines), alone], tier_ratios(found)


def tier_ratios(found: dict[str, step_time.Found]) -> list[Ratio]:
    """Delayed steps over ordinary ones, and each tier of parameters over none."""
    pairs = [(offload_rows.DELAYED, HOST), (offload_rows.PARAMETERS, HOST)]
    pairs += [(offload_rows.DISK_PARAMETERS, DISK)]
    return [interleave.ratio(f"{one} / {other}", found[one].step, found[other].step) for one, other in pairs]


def trace_main(
    _: Any, plan: Plan, folder: str
) -> tuple[dict[str, step_time.Found], dict[str, dict[str, Any]]]:
    """The life of a rank: steps that are timed, then some that are traced."""
    leave_with_parent()
    rank = Rank(plan, offload_rows.of_tiers(folder))
    found = rank.run()
    return found, {name: trace_of(rank, name) for name in plan.rows}


def trace_of(rank: Rank, name: str) -> dict[str, Any]:
    """A few steps, as torch's profiler tells them."""
    trainee, device = rank.alive.get(name) or rank.build(name), rank.setup.device
    assert trainee is not None, name
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        with profile(activities=activities) as profiled:
            for x, y in rank.data[:STEPS]:
                trainee.backward(x.to(device), y.to(device))
                trainee.update()
            finish(device)
        profiled.export_chrome_trace(str(file))
        told: dict[str, Any] = json.loads(file.read_text())
    return {"traceEvents": [event for event in told["traceEvents"] if counts(event)]}


def counts(event: dict[str, Any]) -> bool:
    """Whether it is work of the device, or an operator of ours on the host."""
    on_host = event.get("cat") == "cpu_op" and event["name"].startswith(ON_HOST)
    return event.get("ph") == "X" and (event.get("cat") in ON_DEVICE or on_host)


def of_trace(trace: dict[str, Any], steps: int) -> list[str]:
    """Cells: milliseconds of copies a step, which part is beside other work, and bytes over time each way."""
    found = hidden(trace, (*ON_DEVICE, "cpu_op"), COPIES)
    cells = [f"{found.communication / 1e3 / steps:.1f}"]
    cells.append("" if found.fraction is None else f"{found.fraction:.2f}")
    for way in WAYS.values():
        copies = [event for event in trace["traceEvents"] if way.search(event["name"])]
        spans = union((float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in copies)
        moved = sum(int(event.get("args", {}).get("bytes", 0)) for event in copies)
        cells.append(f"{moved / length(spans) / 1e3:.1f}" if moved and spans else "")
    return cells


def largest(device: str, gib: float, tiny: bool) -> Sections:
    """The largest model with and without offload: `tests.gpu.day.largest`, on one rank."""
    command = [sys.executable, "-m", "tests.gpu.day.largest", "--device", device, "--ranks", "1"]
    command += ["--gib", str(gib), "--stages", "2", "3", *["--tiny"] * tiny]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    keys = ["stage", "state on the host", "parameters, M", "planned, M", "attempts"]
    lines = [[str(row[key]) for key in keys] for row in rows]
    said = "What the plan allows: on a CPU nobody runs out of a device's memory." if device == "cpu" else ""
    return [*filter(None, [said]), interleave.table(keys, lines)], []
