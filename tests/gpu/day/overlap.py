"""How much of the communication runs while something else does: read from a trace of torch's profiler.

Communication are NCCL's kernels, and copies between the device and the host, which is what ranks that share a
card exchange by. Hidden is the part of their time in which another kernel of this rank runs. Ranks on one
card also take turns on it, which a trace of one rank does not show.
"""

import gzip
import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from tests.gpu.day.place import Place, Tower, batch_of, engine_of, one_step
from tests.gpu.day.rows import STAND_IN, finish

Span = tuple[float, float]
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
COMMUNICATION = re.compile("nccl|Memcpy (DtoH|HtoD)", re.IGNORECASE)
INSTEAD = re.compile("aten::copy_")  # on a CPU
STEPS = 2
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 2, no overlap": (2, {"overlap_comm": False}),
    "stage 2, overlap": (2, {"overlap_comm": True}),
    "stage 3, no overlap": (3, {"overlap_comm": False}),
    "stage 3, overlap, prefetch 5e7": (3, {"overlap_comm": True, "stage3_prefetch_bucket_size": 50_000_000}),
    "stage 3, overlap, prefetch 1e9": (
        3,
        {"overlap_comm": True, "stage3_prefetch_bucket_size": 1_000_000_000},
    ),
}


@dataclass(frozen=True)
class Hidden:
    """Microseconds in which something ran: communication, other work, and both."""

    communication: float
    other: float
    both: float

    @property
    def fraction(self) -> float | None:
        """Of the communication; None if there was none."""
        return self.both / self.communication if self.communication else None


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time, in spans that neither touch nor overlap."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def length(spans: Iterable[Span]) -> float:
    """All of them together."""
    return sum(end - start for start, end in spans)


def both(one: Sequence[Span], other: Sequence[Span]) -> float:
    """How long two unions run at the same time."""
    return length(one) + length(other) - length(union([*one, *other]))


def hidden(
    trace: dict[str, Any], kinds: Sequence[str] = ON_DEVICE, named: "re.Pattern[str]" = COMMUNICATION
) -> Hidden:
    """Read a chrome trace. `kinds`: of the events that count; `named`: those among them that communicate."""
    sent: list[Span] = []
    computed: list[Span] = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in kinds:
            start = float(event["ts"])
            into = sent if named.search(event["name"]) else computed
            into.append((start, start + float(event["dur"])))
    communication, other = union(sent), union(computed)
    return Hidden(length(communication), length(other), both(communication, other))


def check(place: Place) -> None:
    """A row for each run; the first rank's trace is kept beside the results."""
    width, layers, rows = (16, 3, 8) if place.tiny else (7168, 12, 8192)
    folder = Path(os.environ["GPU_DAY"]) / "traces" if "GPU_DAY" in os.environ else Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    for name, (stage, zero) in RUNS.items():
        model = Tower(width, layers, place.device)
        engine = engine_of(model, stage, zero_optimization={"reduce_bucket_size": 2 * width * width, **zero})
        x = batch_of(place, width, 0, rows)
        for _ in range(2):
            one_step(engine, x)
        finish(place.device)
        trace = folder / f"{name.replace(', ', '-').replace(' ', '_')}-rank{place.rank}.json.gz"
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (place.device.type == "cuda")
        with profile(activities=activities) as profiled:
            for _ in range(STEPS):
                one_step(engine, x)
            finish(place.device)
        profiled.export_chrome_trace(str(trace))
        engine.destroy()
        said(place, name, trace)
        if place.rank:
            trace.unlink()


def read(trace: Path) -> dict[str, Any]:
    """Read a trace that torch's profiler has compressed, as browsers' viewers do, too."""
    told: dict[str, Any] = json.loads(gzip.decompress(trace.read_bytes()))
    return told


def said(place: Place, name: str, trace: Path) -> None:
    """The row of a run."""
    told: dict[str, Any] = {}
    if place.device.type == "cpu":
        found, told = hidden(read(trace), ("cpu_op",), INSTEAD), {STAND_IN: "copies on a CPU"}
    else:
        found = hidden(read(trace))
    part = None if found.fraction is None else round(found.fraction, 3)
    place.say(
        run=name,
        **{"communication, ms a step": round(found.communication / 1e3 / STEPS, 2)},
        **{"other work, ms a step": round(found.other / 1e3 / STEPS, 2)},
        **{"hidden": part, "trace": trace.name},
        **told,
    )
