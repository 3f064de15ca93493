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

from tests.bench import interleave, step_time
from tests.bench.interleave import Ratio
from tests.bench.offload_rows import on_host
from tests.bench.peers import Row
from tests.bench.step_time import Plan, Rank, leave_with_parent
from tests.gpu.day.overlap import ON_DEVICE, hidden, length, union
from tests.gpu.day.rows import finish
from zero_full.doctor.bandwidth import memory_rows

COPIES = re.compile("Memcpy (DtoH|HtoD)", re.IGNORECASE)
WAYS = {"down": re.compile("Memcpy DtoH", re.IGNORECASE), "up": re.compile("Memcpy HtoD", re.IGNORECASE)}
ON_HOST = "zero_full::"  # operators by which the host steps
PLAIN, EARLY = "on host", "on host, early steps"
STEPS = 3
Sections = tuple[list[str], list[Ratio]]


def of_host() -> dict[str, Row]:
    """With early steps and without."""
    return {PLAIN: Row(on_host(early=False)), EARLY: Row(on_host(early=True), PLAIN)}


def traced(plan: Plan, in_ranks: Callable[..., Any], limit: float) -> Sections:
    """Step times of both, and what a trace says of their copies."""
    rows = of_host()
    plan = replace(plan, rows=tuple(rows))
    ((found, traces),) = in_ranks(trace_main, 1, plan, limit=limit)
    lines = []
    for name, row in found.items():
        low, high = interleave.spread(row.step)
        step = [f"{1e3 * interleave.middle(row.step):.1f}", f"{1e3 * low:.1f}-{1e3 * high:.1f}"]
        lines.append([name, *step, *of_trace(traces[name], STEPS)])
    head = ["row", "step, ms", "range", "copies, ms", "hidden", "GB/s down", "GB/s up"]
    alone = interleave.table(["copies alone", ""], memory_rows(0.5))
    ratio = interleave.ratio(f"{EARLY} / without", found[EARLY].step, found[PLAIN].step)
    return [interleave.table(head, lines), alone], [ratio]


def trace_main(_: Any, plan: Plan) -> tuple[dict[str, step_time.Found], dict[str, dict[str, Any]]]:
    """The life of a rank: steps that are timed, then some that are traced."""
    leave_with_parent()
    rank = Rank(plan, of_host())
    found = rank.run()
    return found, {name: trace_of(rank, name) for name in plan.rows}


def trace_of(rank: Rank, name: str) -> dict[str, Any]:
    """A few steps, as torch's profiler tells them."""
    trainee, device = rank.alive[name], rank.setup.device
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
