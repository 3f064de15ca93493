"""What it costs to keep the optimizer's state on the host or on a disk, and how much of that is hidden.

    python -m tests.bench.offload
    python -m tests.bench.offload --topics disk --directory /a/fast/disk
    python -m tests.bench.offload --device cuda

`peers`: a step at each stage, beside no offload, DeepSpeed's and FSDP2's. `disk`: state on a disk, beside the
longer of computing and of moving as many bytes with the same I/O. `overlap`: how much of the copies' time is
hidden, on a simulated device. `tiers`: a step on every tier, and what a trace says of its copies. `largest`:
the largest model that trains, by bisection. Every round visits every row, in an order that rotates; two ranks
for the peers, one for all else, with one thread each.

A CPU's host memory is its device's memory. So `peers` copies nothing there, and `overlap` is a simulation: a
copy sleeps as long as it would take at that bandwidth, and needs no core meanwhile. Hidden is that part of
their time by which a step does not get longer than without a limit. On a GPU copies are real, and `tiers`
takes its place; no GPU has run that yet. The last line is JSON.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from tests.bench import interleave, offload_gpu, offload_rows, step_time
from tests.bench.interleave import Ratio
from tests.bench.offload_disk import DiskFound, DiskRank, Limits, peak_memory
from tests.bench.offload_rows import DISK, HOST, STAGES, away, here, linked, of_links, theirs
from tests.bench.step_time import SIZES, Found, Plan, Rank, leave_with_parent
from tests.gpu.day.overlap import length, union
from tests.worlds import Pool
from zero_full.kernels.files import describe

PEER_TARGET, DISK_TARGET, STEP_TARGET = (
    0.75,
    1.25,
    1.5,
)  # the last one: a step on the disk over one on the host
TOPICS = {"cpu": ("peers", "disk", "overlap"), "cuda": ("peers", "disk", "tiers", "largest")}
ALL_TOPICS = ("peers", "disk", "overlap", "tiers", "largest")
BUCKETS = {"peers": 5_000_000, "disk": 5_000_000, "overlap": 1_000_000, "tiers": 10_000_000}  # elements
Sections = tuple[list[str], list[Ratio]]  # what is printed, and the ratios


def in_ranks(main: Callable[..., Any], ranks: int, plan: Plan, *more: Any, limit: float = 600) -> list[Any]:
    """Call it on ranks of their own."""
    pool = Pool()
    try:
        backend = "gloo" if plan.device == "cpu" else "cpu:gloo,cuda:nccl"
        return pool.run(main, ranks, plan, *more, limit=limit, collective=min(limit, 120), backend=backend)
    finally:
        pool.stop()


# Peers -------------------------------------------------------------------------------------------


def peers_main(_: Any, plan: Plan) -> dict[str, Found]:
    """The life of a rank."""
    leave_with_parent()
    return Rank(plan, offload_rows.of_peers()).run()


def peers_topic(plan: Plan, limit: float) -> Sections:
    """Every stage."""
    rows = offload_rows.of_peers()
    plan = replace(plan, rows=tuple(rows))
    ranks = in_ranks(peers_main, plan.world, plan, limit=limit)
    found = {name: step_time.together([rank[name] for rank in ranks]) for name in rows}
    differences = step_time.loss_differences(found, rows)
    lines = [_line(name, row, differences.get(name)) for name, row in found.items()]
    ratios = peer_ratios(found)
    return [interleave.table(HEAD, lines)], ratios


HEAD = ["row", "step, ms", "range", "backward, ms", "losses differ by"]


def _line(name: str, row: Found, difference: float | None) -> list[str]:
    if row.missing:
        return [name, row.missing, *[""] * (len(HEAD) - 2)]
    low, high = interleave.spread(row.step)
    backward = f"{1e3 * interleave.middle(row.backward):.1f}"
    return [
        name,
        f"{1e3 * interleave.middle(row.step):.1f}",
        f"{1e3 * low:.1f}-{1e3 * high:.1f}",
        backward,
        step_time.how_far(row, difference),
    ]


def peer_ratios(found: dict[str, Found]) -> list[Ratio]:
    """Over no offload, and over each peer; the aim is about the better one."""
    result = []
    for stage in STAGES:
        ours = found[away(stage)].step
        result.append(interleave.ratio(f"{away(stage)} / {here(stage)}", ours, found[here(stage)].step))
        rivals = [name for name in theirs(stage) if found[name].step]
        best = min(rivals, key=lambda name: interleave.middle(found[name].step), default=None)
        for name in rivals:
            target = PEER_TARGET if name == best else None
            result.append(interleave.ratio(f"{away(stage)} / {name}", ours, found[name].step, target))
    return result


# Disk --------------------------------------------------------------------------------------------


def disk_main(_: Any, plan: Plan, limits: Limits) -> DiskFound:
    """The life of a rank."""
    leave_with_parent()
    return DiskRank(plan, limits).run_all()


def disk_topic(plan: Plan, limit: float, directory: str, mib: int) -> Sections:
    """One rank, which has the disk for itself."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        place, limits = str(describe(folder)), Limits(folder, mib)
        (found,) = in_ranks(disk_main, 1, plan, limits, limit=limit)
        rows = offload_rows.of_disk(folder)
        memory = {row: in_ranks(peak_memory, 1, plan, folder, row, limit=limit)[0] for row in rows}
    numel = found.rows[DISK].parameters
    lines = []
    for name, row in found.rows.items():
        update = interleave.minus(row.step, row.backward)
        lines.append([*_line(name, row, None)[:4], f"{1e3 * interleave.middle(update):.1f}"])
        lines[-1].append("" if memory[name] is None else f"{memory[name] / numel:.1f}")
    head = [*HEAD[:4], "update, ms", "memory, B/p"]
    read, written = found.read / numel, found.written / numel
    rates = " and ".join(f"{interleave.middle(series) / 1e9:.2f}" for series in (found.reads, found.writes))
    said = (
        f"{place}. Alone, {mib} MiB are read and written at {rates} GB/s (medians). A step reads {read:.1f} "
        f"and writes {written:.1f} bytes per parameter. memory: the most anonymous memory of the process, "
        "less what it had without a model."
    )
    return [said, interleave.table(head, lines)], disk_ratios(found)


def disk_ratios(found: DiskFound) -> list[Ratio]:
    """The update and the whole step, over the longer of computing and moving in the same round."""
    moving = found.moving()
    result = []
    for what, series in (("update", updates(found.rows)), ("step", steps(found.rows))):
        floor = [
            [max(median(compute), seconds)] for compute, seconds in zip(series[HOST], moving, strict=True)
        ]
        name = f"{what} on the disk / max(on the host, bytes / bandwidth)"
        result.append(interleave.ratio(name, series[DISK], floor, DISK_TARGET))
        target = STEP_TARGET if what == "step" else None
        result.append(
            interleave.ratio(f"{what} on the disk / on the host", series[DISK], series[HOST], target)
        )
    return result


def steps(rows: dict[str, Found]) -> dict[str, interleave.Series]:
    """Whole steps."""
    return {name: row.step for name, row in rows.items()}


def updates(rows: dict[str, Found]) -> dict[str, interleave.Series]:
    """What comes behind backward."""
    return {name: interleave.minus(row.step, row.backward) for name, row in rows.items()}


# Overlap -----------------------------------------------------------------------------------------


@dataclass
class Linked(Found):
    """A row whose copies have been noted: seconds of a step in which one was under way, by round."""

    copying: list[float] | None = None


class LinkRank(Rank):
    """Notes the copies of each visit."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, of_links())
        self.copying: dict[str, list[float]] = {name: [] for name in plan.rows}

    def visit(self, name: str, number: int) -> list[float]:
        """A visit, and how long copies took in a step of it, on average."""
        known = self.alive.get(name)
        begin = len(known.owner[1].done) if known else 0
        times = super().visit(name, number)
        done = self.alive[name].owner[1].done[begin:]
        spent = length(union((copy.began, copy.ended) for copy in done))
        self.copying[name].append(spent / (self.plan.warmup + self.plan.steps))
        return times


def link_main(_: Any, plan: Plan) -> tuple[dict[str, Found], dict[str, list[float]]]:
    """The life of a rank."""
    leave_with_parent()
    rank = LinkRank(plan)
    return rank.run(), rank.copying


def overlap_topic(plan: Plan, limit: float) -> Sections:
    """One rank, whose second core is the host's."""
    rows = of_links()
    plan = replace(plan, rows=tuple(rows))
    ((found, copying),) = in_ranks(link_main, 1, plan, limit=limit)
    differences = step_time.loss_differences(found, rows)
    lines = []
    for name, row in found.items():
        hidden = hidden_part(found, copying, name)
        share = "" if hidden is None else f"{hidden:.2f}"
        lines.append([*_line(name, row, differences.get(name)), f"{1e3 * median(copying[name]):.1f}", share])
    said = "A simulated device: copies sleep, and cost no core. No number here is a GPU's."
    return [said, interleave.table([*HEAD, "copies, ms", "hidden"], lines)], []


def hidden_part(found: dict[str, Found], copying: dict[str, list[float]], name: str) -> float | None:
    """Of the time of copies: what a step does not last longer than the same without a limit."""
    base = linked(None)
    if name == base:
        return None
    longer = interleave.middle(found[name].step) - interleave.middle(found[base].step)
    return 1 - longer / (median(copying[name]) - median(copying[base]))


# All ---------------------------------------------------------------------------------------------


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=TOPICS, default="cpu")
    parser.add_argument("--topics", nargs="+", choices=ALL_TOPICS, metavar="TOPIC")
    parser.add_argument("--size", choices=SIZES, default="10M", help="of peers, overlap and tiers")
    parser.add_argument("--disk-size", choices=SIZES, default="50M")
    parser.add_argument("--dtype", choices=step_time.DTYPES, default="fp32")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="timed steps a visit")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--bucket", type=int, help="reduce_bucket_size, in elements")
    parser.add_argument("--directory", default=".", help="on the disk to measure")
    parser.add_argument("--mib", type=int, default=256, help="read and written for the disk's bandwidth")
    parser.add_argument("--gib", type=float, default=8, help="largest: what a rank may have")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one topic")
    asked = parser.parse_args(given)
    asked.topics = asked.topics or TOPICS[asked.device]
    return asked


def sections(topic: str, asked: argparse.Namespace) -> Sections:
    """One topic."""
    size = asked.disk_size if topic == "disk" else asked.size
    bucket = asked.bucket or BUCKETS.get(topic, 0)
    plan = Plan(size, asked.dtype, (), asked.rounds, asked.warmup, asked.steps, bucket, overlap=False)
    plan = replace(plan, device=asked.device)
    if topic == "peers":
        return peers_topic(plan, asked.limit)
    if topic == "disk":
        return disk_topic(plan, asked.limit, asked.directory, asked.mib)
    if topic == "overlap":
        return overlap_topic(plan, asked.limit)
    if topic == "tiers":
        return offload_gpu.traced(plan, in_ranks, asked.limit, asked.directory)
    return offload_gpu.largest(asked.device, asked.gib, asked.size == "50k")


def main(given: Sequence[str] | None = None) -> None:
    """Measure topic after topic, print tables, end with one JSON line."""
    asked = arguments(given)
    print(interleave.heading())
    every: list[Ratio] = []
    for topic in asked.topics:
        print(topic, file=sys.stderr)
        texts, ratios = sections(topic, asked)
        size = asked.disk_size if topic == "disk" else asked.size
        told = "" if topic == "largest" else f", {size} parameters, {asked.dtype}"
        print(f"\n## {topic}{told}\n\n" + "\n\n".join(texts), flush=True)
        if ratios:
            print("\n" + interleave.table(interleave.RATIO_HEAD, [r.cells() for r in ratios]), flush=True)
        every += ratios
    about = {"versions": interleave.versions(), "cpus": os.cpu_count(), "device": asked.device}
    about |= {
        "rounds": asked.rounds,
        "steps": asked.steps,
        "bucket": asked.bucket or BUCKETS,
        "torch": torch.__version__,
    }
    print("\n" + interleave.json_line(every, **about))


if __name__ == "__main__":
    main()
