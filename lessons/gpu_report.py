"""What a recording of `lessons/one_gpu.py` says, as tables and pictures, which name its device."""

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lessons.cells import columns
from lessons.colours import (
    ACTIVATIONS,
    ALARM,
    AWAY,
    BACKWARD,
    FORWARD,
    GRADIENTS,
    INK,
    OPTIMIZER,
    PARAMETERS,
    STEP,
)
from lessons.plots import Picture, picture
from lessons.registry import ROOT
from zero_min.allocator import Bytes, replay

KEPT = ROOT / "lessons" / "step11_one_gpu" / "recording.json"
MIB = 2**20
JSON = dict[str, Any]
PHASE_COLOURS = {
    "forward": FORWARD,
    "backward": BACKWARD,
    "bucket": GRADIENTS,
    "step": OPTIMIZER,
    "other": AWAY,
}
KIND_COLOURS = {
    "parameters": PARAMETERS,
    "optimizer": OPTIMIZER,
    "gradients": GRADIENTS,
    "forward": ACTIVATIONS,
    "backward": BACKWARD,
    "buckets": ALARM,
    "step": STEP,
}
KIND_NAMES = {
    "forward": "activations",
    "backward": "work of backward",
    "buckets": "copies for buckets",
    "step": "work of the step",
}


@cache
def recorded(path: Path = KEPT) -> JSON:
    """A recording, else the one that the project has."""
    found: JSON = json.loads(path.read_text(encoding="utf-8"))
    return found


def has_gpu(recording: JSON) -> bool:
    """Whether a GPU was recorded."""
    return bool(recording["about"]["device"] == "cuda")


def whose(recording: JSON) -> str:
    """Which device, torch and day the numbers are of."""
    about = recording["about"]
    if has_gpu(recording):
        size = f", {about['memory'] / 2**30:.0f} GiB, CUDA {about['cuda']}"
        return f"recorded on one {about['name']}{size}, torch {about['torch']}, {about['date']}"
    return f"recorded on a CPU, not on a GPU, torch {about['torch']}, {about['date']}"


def model(recording: JSON) -> str:
    """What was trained."""
    size = recording["about"]["size"]
    return (
        f"{recording['about']['parameters']:,} parameters in fp32, {size['world']} ranks as threads, "
        f"{size['rows']} x {size['context']} characters each"
    )


def mib(nbytes: float) -> str:
    """Bytes as MiB, for a table."""
    return f"{nbytes / MIB:,.1f}"


def levels(recording: JSON) -> str:
    """MiB of all ranks after a step, from the formula up to the whole card."""
    names = ("requested", "allocated", "reserved", "in use")
    known = has_gpu(recording)
    more = ("before", *names) if known else ()
    rows: list[list[object]] = [["MiB after a step", "formula", "tensors", *more]]
    for stage in (0, 1, 2):
        part = recording.get(f"bytes {stage}")
        if part is None:
            continue
        world = len(part["held"])
        cells = [world * sum(part["formula"].values()), sum(sum(held.values()) for held in part["held"])]
        after = part["moments"]["step"]
        if known:
            cells += [part["moments"]["nothing"]["requested"], *(after[name] for name in names)]
        rows.append([f"stage {stage}", *map(mib, cells)])
    return columns(rows)


def moments(recording: JSON, stage: int = 2) -> str:
    """MiB at the moments of a step, as the allocator counts them."""
    if not has_gpu(recording):
        return "no GPU was recorded: torch does not count the bytes of a CPU"
    found = recording[f"bytes {stage}"]["moments"]
    names = ("requested", "allocated", "peak", "reserved")
    rows: list[list[object]] = [["MiB", *names]]
    for moment, what in {
        "begin": "before forward",
        "forward": "after forward",
        "backward": "after backward",
        "step": "after the step",
    }.items():
        rows.append([what, *(mib(found[moment][name]) for name in names)])
    return columns(rows)


def seconds(recording: JSON) -> str:
    """Milliseconds of a step, the median of five."""
    rows: list[list[object]] = [["", "ms a step"]]
    names = {"bytes alone": "one rank", "bytes 0": "4 ranks, stage 0"}
    names |= {"bytes 1": "4 ranks, stage 1", "bytes 2": "4 ranks, stage 2"}
    for part, name in names.items():
        if part in recording:
            times = sorted(recording[part]["seconds"])
            rows.append([name, f"{1000 * times[len(times) // 2]:.1f}"])
    return columns(rows)


def lines_at_peak(recording: JSON, stage: int = 2, count: int = 10) -> str:
    """The lines of Python whose tensors were there at the peak, from torch's memory snapshot."""
    snapshot = recording.get(f"snapshot {stage}", {"missing": "this part of the recording failed"})
    if "missing" in snapshot:
        return str(snapshot["missing"])
    rows: list[list[object]] = [["line", "MiB"]]
    rows += [[place, mib(nbytes)] for place, nbytes in snapshot["at peak"][:count]]
    rest = sum(nbytes for _, nbytes in snapshot["at peak"][count:])
    return columns([*rows, ["all others", mib(rest)], ["together", mib(snapshot["peak"])]])


def history(recording: JSON) -> tuple[list[int], list[list[int]]]:
    """All requests and frees in order; on a GPU also the segments that torch's own allocator took."""
    if has_gpu(recording):
        found = recording["snapshot 2"]["history"]
        return found["order"], found["segments"]
    return recording["over time 2"]["order"], []


@cache
def _sums(path: Path) -> tuple[Bytes, ...]:
    return tuple(replay(history(recorded(path))[0]))


def sums(recording: JSON) -> Sequence[Bytes]:
    """The three sums of `zero_min/allocator.py` after each event of the recorded history."""
    if recording is recorded():
        return _sums(KEPT)
    return tuple(replay(history(recording)[0]))


def torchs_reserved(recording: JSON) -> list[int]:
    """Bytes of torch's own segments after each event."""
    order, segments = history(recording)
    changes = Counter[int]()
    for place, nbytes in segments:
        changes[place] += nbytes
    reserved, found = 0, []
    for place in range(len(order)):
        reserved += changes[place]
        found.append(reserved)
    return found


def beside_torch(recording: JSON) -> str:
    """The most of each sum in the replay, and what torch's own allocator took."""
    found = sums(recording)
    rows: list[list[object]] = [["the most, in MiB", "this allocator", "torch's"]]
    theirs = torchs_reserved(recording) if has_gpu(recording) else []
    for name in ("requested", "allocated", "reserved"):
        most = max(getattr(each, name) for each in found)
        known = mib(max(theirs)) if name == "reserved" and has_gpu(recording) else "-"
        rows.append([name, mib(most), known])
    lost = max(each.reserved - each.allocated for each in found)
    table = columns([*rows, ["reserved, and no tensor's", mib(lost), "-"]])
    same = sum(each.reserved == torchs for each, torchs in zip(found, theirs, strict=True)) if theirs else 0
    said = f"reserved is torch's after {same:,} of {len(found):,} requests and frees"
    return f"{table}\n{said}" if theirs else table


def work(recording: JSON) -> str:
    """Milliseconds of one step under the profiler: Python's of each rank, and the GPU's for it."""
    trace = recording.get("trace 2")
    if trace is None:
        return "this part of the recording failed"
    phases = trace["phases"]
    spent: Counter[tuple[int, str]] = Counter()
    for _, duration, rank, phase in trace["spans"]:
        spent[rank, phases[phase]] += duration
    ranks = sorted({rank for rank, _ in spent})
    known = bool(trace["kernels"])
    rows: list[list[object]] = [["ms of one step", *(f"rank {rank}" for rank in ranks)]]
    for phase in phases:
        inside = " (in backward)" if phase == "bucket" else ""
        rows.append([f"Python in {phase}{inside}", *(f"{spent[r, phase] / 1000:.1f}" for r in ranks)])
    if known:
        by = trace["by rank and phase"]
        for phase in phases:
            cells = [f"{by.get(f'rank {r} {phase}', 0) / 1000:.1f}" for r in ranks]
            rows.append([f"GPU for {phase}", *cells])
    return columns(rows)


def busy(recording: JSON) -> str:
    """How much of the step the GPU worked, in a sentence."""
    trace = recording.get("trace 2")
    if not trace or not trace["kernels"]:
        return "no GPU was recorded, so nothing says when one worked"
    end = trace["work ends"]
    return (
        f"{trace['kernels']:,} kernels and copies on {trace['streams']} stream; the GPU works "
        f"{trace['busy'] / 1000:.1f} of {end / 1000:.1f} ms, which is {trace['busy'] / end:.0%}"
    )


def report(recording: JSON) -> str:
    """All tables with their titles."""
    parts = {
        "": whose(recording) + "\n" + model(recording),
        "From the formula to the card": levels(recording),
        "During a step of stage 2": moments(recording),
        "Lines that have memory at the peak": lines_at_peak(recording),
        "The history, replayed by zero_min/allocator.py": beside_torch(recording),
        "Python and the GPU": f"{work(recording)}\n{busy(recording)}",
        "Without the profiler": seconds(recording),
    }
    failed = [f"not recorded: {name}: {why}" for name, why in recording["failures"].items()]
    told = [f"{title}\n\n{text}" if title else text for title, text in parts.items()]
    return "\n\n".join([*told, *failed])


def over_time(recording: JSON, stage: int = 2) -> Picture:
    """Bytes of all ranks by kind during one step, from the tensors that operations make."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    plot = figure.subplots()
    said = draw_over_time(plot, recording, stage)
    figure.legend(frameon=False, ncols=4, loc="outside upper center", fontsize="small")
    return picture(figure, said)


def draw_over_time(plot: Any, recording: JSON, stage: int) -> str:
    """The same on a plot that is there. Returns what is seen."""
    part = recording[f"over time {stage}"]
    kinds = part["kinds"]
    times = [row[0] / 1000 for row in part["curve"]]
    order = [kind for kind in KIND_COLOURS if kind in kinds]
    stacked = [[row[1 + kinds.index(kind)] / 1024 for row in part["curve"]] for kind in order]
    names = [KIND_NAMES.get(kind, kind) for kind in order]
    plot.stackplot(times, *stacked, labels=names, colors=[KIND_COLOURS[kind] for kind in order])
    parts = [recording[name] for name in ("over time 1", "over time 2") if name in recording]
    highest = max(sum(row[1:]) for each in parts for row in each["curve"]) / 1024
    plot.set_ylim(0, 1.05 * highest)  # one scale for both stages
    for moment, when in last_of_each(part["marks"]).items():
        plot.axvline(when / 1000, linestyle=":", color="black", linewidth=0.8)
        if moment != "step":  # the end
            plot.text(when / 1000, plot.get_ylim()[1], moment, rotation=90, ha="right", va="top", fontsize=7)
    world = recording["about"]["size"]["world"]
    formula = world * sum(recording[f"bytes {stage}"]["formula"].values()) / MIB
    plot.axhline(formula, linestyle="--", color=INK, linewidth=0.8, label="formula between steps")
    plot.set(xlabel="ms, measured under a counter of tensors", ylabel="MiB of all ranks", xlim=(0, times[-1]))
    plot.set_title(f"Stage {stage}: {whose(recording)}", fontsize=8)
    plot.spines[["top", "right"]].set_visible(False)
    most = max(sum(row[1:]) for row in part["curve"]) / 1024
    tops = ", ".join(f"{name} {max(values):.0f}" for name, values in zip(names, stacked, strict=True))
    return (
        f"Bytes over one step of stage {stage}, {whose(recording)}. The most of each kind in MiB: {tops}; "
        f"together at most {most:.0f}. The formula between steps says {formula:.0f}."
    )


def last_of_each(marks: Sequence[Sequence[Any]]) -> dict[str, float]:
    """When the last rank was at each moment but the first."""
    found: dict[str, float] = {}
    for when, _, moment in marks:
        if moment != "begin":
            found[moment] = max(found.get(moment, 0), when)
    return found


def timeline(recording: JSON) -> Picture:
    """When each rank's Python was in which phase, and below it what the GPU worked on."""
    world = recording["about"]["size"]["world"]
    figure = Figure(figsize=(9, 1.6 + 0.35 * (world + 1)), layout="constrained")
    said = draw_timeline(figure.subplots(), recording)
    figure.legend(frameon=False, ncols=5, loc="outside upper center", fontsize="small")
    return picture(figure, said)


def draw_timeline(plot: Any, recording: JSON) -> str:
    """The same on a plot that is there. Returns what is seen."""
    trace = recording["trace 2"]
    world = recording["about"]["size"]["world"]
    phases, labelled = [*trace["phases"], "other"], set[str]()

    def bars(y: float, rows: Sequence[Sequence[int]], high: float) -> None:
        for phase in phases:
            boxes = [(a / 1000, d / 1000) for a, d, _, number, *_ in rows if phases[number] == phase]
            if boxes:
                name = None if phase in labelled else phase
                labelled.add(phase)
                plot.broken_barh(boxes, (y - high / 2, high), facecolor=PHASE_COLOURS[phase], label=name)

    for rank in range(world):
        bars(rank, [span for span in trace["spans"] if span[2] == rank], 0.7)
    rows = [f"Python of rank {rank}" for rank in range(world)]
    if trace["kernels"]:
        bars(world, trace["runs"], 0.7)
        rows.append("GPU, all ranks")
    plot.set_yticks(range(len(rows)), rows)
    plot.invert_yaxis()
    plot.set_xlabel("ms")
    plot.set_title(f"One step of stage 2 under torch's profiler: {whose(recording)}", fontsize=8)
    plot.spines[["top", "right"]].set_visible(False)
    buckets = sum(trace["phases"][span[3]] == "bucket" for span in trace["spans"]) // max(world, 1)
    return (
        f"A timeline of one step of stage 2, {whose(recording)}. Each rank's Python goes through forward, "
        f"backward with {buckets} buckets in it, and the step; {busy(recording)}."
    )


def draw_sums(plot: Any, recording: JSON) -> str:
    """Requested, allocated and reserved bytes over the recorded history. Returns what is seen."""
    found = sums(recording)
    each = max(1, len(found) // 600)
    at = range(0, len(found), each)
    for name, colour, dash in (("reserved", ALARM, "-"), ("allocated", AWAY, "-"), ("requested", INK, ":")):
        heights = [max(getattr(one, name) for one in found[i : i + each]) / MIB for i in at]
        plot.plot(at, heights, dash, color=colour, linewidth=1.2, label=f"{name}, replayed")
    theirs = torchs_reserved(recording) if has_gpu(recording) else []
    if theirs:
        heights = [theirs[i] / MIB for i in at]
        plot.plot(at, heights, "--", color=PARAMETERS, linewidth=1.2, label="reserved by torch")
    plot.set(xlabel="requests and frees, in order", ylabel="MiB", ylim=0)
    plot.set_title("The allocator, from an empty card", fontsize=9)
    plot.spines[["top", "right"]].set_visible(False)
    plot.legend(fontsize="x-small")
    tops = {
        name: max(getattr(one, name) for one in found) / MIB
        for name in ("requested", "allocated", "reserved")
    }
    told = ", ".join(f"{name} {value:.0f}" for name, value in tops.items())
    beside = f"; torch's own reserved {max(theirs) / MIB:.0f}" if theirs else ""
    return f"Three sums over a recorded history, {whose(recording)}. The most of each in MiB: {told}{beside}."
