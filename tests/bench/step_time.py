"""How long a training step takes: every peer and every stage of ours, side by side on gloo ranks.

    python -m tests.bench.step_time --sizes 10M 50M --dtypes fp32 bf16 --rounds 8
    python -m tests.bench.step_time --device cuda --sizes 125M --dtypes bf16 --one-at-a-time --throughput

Each round visits every row, in an order that rotates; a visit warms up and then times a few steps. Two ranks
(`--ranks`) with one thread each; the step of a round is over when its slower rank is. Identical weights, data
and AdamW everywhere, and the losses are compared, so that a fast row that computes something else is seen.
For bf16 the matrix products of a CPU hide everything else, so there the *added* time is compared: the step
minus forward and backward of the same model without any engine. Bytes sent stand there twice: what the kernel
saw on the loopback, headers included (anything else that talks over it during the run is in there, too), and
what the row itself counts. Ranks of one host that hand each other data through shared memory leave the
loopback empty; in the rows "messages" they send all over it, as the peers do. On GPUs there is a rank for
each, over NCCL; times are the devices', and whole steps are compared in bf16, too. The last line is JSON. See
`peers.py` for how to install DeepSpeed; what is missing is left out.
"""

import argparse
import gc
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.bench import interleave, peers
from tests.bench.interleave import Ratio, Series
from tests.bench.peers import ROWS, NotInstalled, Row, Setup, Trainee
from tests.worlds import Pool
from zero_min.gpt import GPTConfig, batch, load_text

WORLD = 2
SIZES = {
    "50k": GPTConfig(layers=4, heads=2, width=32),
    "10M": GPTConfig(layers=6, heads=6, width=384),
    "50M": GPTConfig(layers=10, heads=10, width=640),
    "125M": GPTConfig(vocabulary=50304, context=1024, layers=12, heads=12, width=768),
    "1.3B": GPTConfig(vocabulary=50304, context=2048, layers=24, heads=16, width=2048),
}
BATCHES = {"125M": (8, 1024), "1.3B": (4, 2048)}  # sequences, tokens; else one of `TOKENS`
# FLOP/s of dense bf16 products, from the data sheets, by a part of the device's name. MFU is a part of them.
PEAKS = {
    **{"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12},
    **{"H200 NVL": 835e12, "H200": 989e12, "A100": 312e12},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOKENS = {"fp32": 64, "bf16": 16}  # a batch is one sequence
COMPARED = 8  # losses, from the first step on; later ones amplify rounding
TOLERANCE = 1e-5
ON_A_GPU = 1e-3  # of bf16: kernels add in another order, and their atomic sums in another one each time


@dataclass(frozen=True)
class Plan:
    """One run: one size in one precision."""

    size: str
    dtype: str
    rows: tuple[str, ...]
    rounds: int = 8
    warmup: int = 2
    steps: int = 3
    bucket: int = 5_000_000
    overlap: bool | None = None  # `overlap_comm`; None: as zero_full derives it
    keep: bool = True  # all rows alive at once; otherwise each visit builds and destroys its row
    device: str = "cpu"
    recompute: bool = False
    ranks: int = WORLD  # on GPUs there is one for each

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.ranks if self.device == "cpu" else torch.cuda.device_count()

    @property
    def batch(self) -> tuple[int, int]:
        """Sequences of a rank, and their tokens."""
        return BATCHES.get(self.size, (1, TOKENS[self.dtype]))


@dataclass
class Found:
    """What one rank saw of one row. Times by round, in seconds; bytes of one rank."""

    missing: str = ""
    parameters: int = 0
    device: str = "a CPU"
    step: Series = field(default_factory=list)
    backward: Series = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    held: dict[str, dict[str, int]] = field(default_factory=dict)
    loopback: list[int] = field(default_factory=list)  # a step and rank, by round
    logical: int | None = None  # a step


class Rank:
    """One rank of a run: its rows, its data and its clock."""

    def __init__(self, plan: Plan, rows: Mapping[str, Row] = ROWS) -> None:
        self.plan, self.rows = plan, rows
        rank, world = dist.get_rank(), dist.get_world_size()
        device = torch.device(plan.device, rank if plan.device == "cuda" else None)
        if plan.device == "cuda":
            torch.cuda.set_device(device)
        alone = [dist.new_group([one]) for one in range(world)][rank]
        dtype = DTYPES[plan.dtype]
        rest = (plan.bucket, plan.overlap, device, plan.recompute)
        self.setup = Setup(SIZES[plan.size], dtype, world, alone, *rest)
        generator = torch.Generator().manual_seed(rank)
        needed = plan.rounds * (plan.warmup + plan.steps)
        self.data = [batch(load_text(), *plan.batch, generator) for _ in range(needed)]
        self.alive: dict[str, Trainee] = {}
        named = torch.cuda.get_device_name(device) if plan.device == "cuda" else Found.device
        self.found = {name: Found(device=named) for name in plan.rows}
        self.taken = dict.fromkeys(plan.rows, 0)

    def run(self) -> dict[str, Found]:
        """Every round visits every row."""
        interleave.run(self.plan.rows, self.plan.rounds, self.visit)
        return self.found

    def visit(self, name: str, number: int) -> list[float]:
        """Warm up, then time a few steps."""
        found = self.found[name]
        if dist.get_rank() == 0 and name == interleave.order(self.plan.rows, number)[0]:
            print(f"{self.plan.size} {self.plan.dtype}: round {number + 1}", file=sys.stderr)
        trainee = None if found.missing else self.alive.get(name) or self.build(name)
        if trainee is None:
            return []
        for i in range(self.plan.warmup):
            self.one_step(name, trainee, measure=number == 0 and i == self.plan.warmup - 1)
        gc.collect()
        gc.disable()
        sent, said = self.quiet(trainee)
        times = [self.one_step(name, trainee) for _ in range(self.plan.steps)]
        sent_after, said_after = self.quiet(trainee)
        gc.enable()
        found.step.append([whole for _, whole in times])
        found.backward.append([part for part, _ in times])
        if sent is not None and sent_after is not None:
            found.loopback.append((sent_after - sent) // self.plan.steps // self.setup.world)
        if said is not None and said_after is not None:
            found.logical = (said_after - said) // self.plan.steps
        if not self.plan.keep:
            trainee.close()
            self.alive.clear()
            del trainee
            gc.collect()
        return found.step[-1]

    def build(self, name: str) -> Trainee | None:
        """Make the row, or note why it cannot be made."""
        try:
            self.alive[name] = self.rows[name].build(self.setup)
        except NotInstalled as reason:
            self.found[name].missing = str(reason)
            return None
        self.taken[name] = 0
        self.found[name].parameters = sum(p.numel() for p in self.alive[name].model.parameters())
        return self.alive[name]

    def one_step(self, name: str, trainee: Trainee, measure: bool = False) -> tuple[float, float]:
        """The time of forward and backward, and of the whole step."""
        found = self.found[name]
        x, y = (each.to(self.setup.device) for each in self.data[self.taken[name]])
        self.taken[name] += 1
        dist.barrier()
        start = self.now()
        loss = trainee.backward(x, y)
        middle = self.now()
        if measure:
            found.held["after backward"] = peers.held(trainee)
        trainee.update()
        end = self.now()
        if measure:
            found.held["between steps"] = peers.held(trainee)
        if len(found.losses) < COMPARED and len(found.losses) == self.taken[name] - 1:  # its first life
            found.losses.append(loss.item())
        if self.plan.device == "cuda":
            end.synchronize()
            return start.elapsed_time(middle) / 1e3, start.elapsed_time(end) / 1e3
        return middle - start, end - start

    def now(self) -> Any:
        """The time; on a GPU a mark behind what is queued there."""
        if self.plan.device == "cpu":
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def quiet(self, trainee: Trainee) -> tuple[int | None, int | None]:
        """Bytes on the loopback and bytes the row says it sent, while nobody sends."""
        dist.barrier()
        said = sum(trainee.traffic().values()) if trainee.traffic else None
        sent = interleave.loopback_bytes()
        dist.barrier()
        return sent, said


def leave_with_parent() -> None:
    """A rank does not outlive whoever started it, not even one that was killed."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def rank_main(_: Any, plan: Plan) -> dict[str, Found]:
    """The life of a rank."""
    leave_with_parent()
    return Rank(plan).run()


def available_memory() -> float:
    """Bytes; where the system does not say, enough."""
    file = Path("/proc/meminfo")
    for line in file.read_text().splitlines() if file.exists() else []:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return float("inf")


def fits(size: str, rows: int, ranks: int) -> bool:
    """Can all rows stay alive at once? 16 bytes per parameter each, some scratch, half of it left free."""
    config = SIZES[size]
    return 12 * config.layers * config.width**2 * 20 * rows * ranks < available_memory() * 0.9


def measure(plan: Plan, limit: float) -> dict[str, Found]:
    """Run one plan on ranks of its own; the results of all ranks as one."""
    pool = Pool()
    try:
        backend = "gloo" if plan.device == "cpu" else "cpu:gloo,cuda:nccl"
        patience = min(limit, 120)
        ranks = pool.run(rank_main, plan.world, plan, limit=limit, collective=patience, backend=backend)
    finally:
        pool.stop()
    return {name: together([rank[name] for rank in ranks]) for name in plan.rows}


def together(ranks: list[Found]) -> Found:
    """The slower rank's times, the mean of the losses, the larger of the bytes."""
    first = ranks[0]
    both = Found(first.missing, first.parameters, first.device)
    both.loopback, both.logical = first.loopback, first.logical
    both.step = interleave.slowest([rank.step for rank in ranks])
    both.backward = interleave.slowest([rank.backward for rank in ranks])
    both.losses = [sum(step) / len(ranks) for step in zip(*[rank.losses for rank in ranks], strict=True)]
    both.held = max(
        (rank.held for rank in ranks), key=lambda held: sum(held.get("between steps", {}).values())
    )
    return both


def added(found: dict[str, Found], name: str) -> Series:
    """A row's step minus forward and backward without an engine."""
    return interleave.minus(found[name].step, found["forward+backward"].step)


def ratios(plan: Plan, found: dict[str, Found]) -> list[Ratio]:
    """Ours over each peer's, with the targets."""
    fp32, gpu = plan.dtype == "fp32", plan.device == "cuda"
    pairs: list[tuple[str, str, float | None]] = [("zero_full 2 alone", "loop", 1.02 if gpu else 1.03)]
    for stage in (0, 1, 2):
        ours, aims = f"zero_full {stage}", stage > 0 and not gpu  # those of a CPU say nothing about a GPU
        pairs.append((ours, f"DeepSpeed {stage}", (0.65 if fp32 else 0.5) if aims else None))
        pairs.append((ours, "ZeroRedundancyOptimizer", 0.85 if aims else None))
        pairs.append((ours, "DDP", (1.0 if fp32 else 0.7) if aims else None))
        pairs.append((f"{ours}, messages", f"DeepSpeed {stage}", None))
        pairs.append((f"{ours}, messages", "DDP", None))
    pairs += [("zero_full 3, messages", other, None) for other in ("DeepSpeed 3", "FSDP2", "DDP")]
    pairs.append(("zero_full 3", "DeepSpeed 3", 0.55 if fp32 else None))
    pairs.append(("zero_full 3", "FSDP2", 1.0 if gpu else 0.8 if fp32 else 0.5))
    done = {name for name, row in found.items() if row.step}
    result = []
    for ours, theirs, target in pairs:
        if not {ours, theirs} <= done:
            continue
        if fp32 or gpu or theirs == "loop":
            one, other, what = found[ours].step, found[theirs].step, ""
        elif "forward+backward" in done:
            one, other, what = added(found, ours), added(found, theirs), "added time, "
        else:
            continue
        name = f"{plan.size} {plan.dtype}: {what}{ours} / {theirs}"
        result.append(interleave.ratio(name, one, other, target))
    return result


def loss_differences(found: dict[str, Found], rows: Mapping[str, Row] = ROWS) -> dict[str, float]:
    """How far each row's losses are from those it must reproduce, at most."""
    result = {}
    for name, row in found.items():
        other = found.get(rows[name].compared_with)
        if row.losses and other is not None and other.losses:
            pairs = zip(row.losses, other.losses, strict=True)
            result[name] = max(abs(mine - theirs) for mine, theirs in pairs)
    return result


def how_far(row: Found, difference: float | None) -> str:
    """The difference of the losses as a table's cell, marked if it is more than rounding."""
    if difference is None:
        return ""
    allowed = TOLERANCE if row.device == Found.device else ON_A_GPU
    return f"{difference:.0e}" + " DIFFERS" * (difference > allowed)


HEAD = ["row", "step, ms", "range", "/ DDP", "backward, ms", "added, ms", "losses differ by"]
HEAD += ["held after backward, B/p", "between steps", "on the loopback", "it says"]


def report(found: dict[str, Found]) -> str:
    """The table of one run; bytes are those of one rank, per parameter."""
    differences = loss_differences(found)
    return interleave.table(HEAD, [_line(name, found, differences.get(name)) for name in found])


def _line(name: str, found: dict[str, Found], difference: float | None) -> list[str]:
    row = found[name]
    if row.missing:
        return [name, row.missing, *[""] * (len(HEAD) - 2)]
    low, high = interleave.spread(row.step)
    middle = interleave.middle(row.step)
    reference, base = found.get("DDP"), found.get("forward+backward")
    parameters = max(other.parameters for other in found.values())  # DeepSpeed 3 shows empty ones
    per = [sum(row.held.get(when, {}).values()) for when in ("after backward", "between steps")]
    wire = [min(row.loopback) if row.loopback else None, row.logical]
    return [
        name,
        f"{1e3 * middle:.1f}",
        f"{1e3 * low:.1f}-{1e3 * high:.1f}",
        f"{middle / interleave.middle(reference.step):.2f}" if reference else "",
        f"{1e3 * interleave.middle(row.backward):.1f}",
        f"{1e3 * interleave.middle(added(found, name)):.1f}" if base else "",
        how_far(row, difference),
        *[f"{bytes_held / parameters:.2f}" for bytes_held in per],
        *["" if sent is None else f"{sent / parameters:.2f}" for sent in wire],
    ]


def flops_a_token(config: GPTConfig, parameters: int, tokens: int) -> int:
    """Operations of forward and backward for one token, in sequences of `tokens`.

    Counted as in the paper about PaLM: 6 for each parameter, and attention over the whole sequence. What is
    computed again in backward does not count.
    """
    return 6 * parameters + 12 * config.layers * config.width * tokens


def throughput(plan: Plan, found: dict[str, Found]) -> dict[str, dict[str, float | None]]:
    """Tokens per second and TFLOP/s of one rank, and MFU, by row. None: the device's peak is not known."""
    result = {}
    for name, row in found.items():
        if row.step:
            peak = next((flops for part, flops in PEAKS.items() if part in row.device), None)
            sequences, tokens = plan.batch
            rate = sequences * tokens / interleave.middle(row.step)
            flops = rate * flops_a_token(SIZES[plan.size], row.parameters, tokens)
            mfu = None if peak is None else round(flops / peak, 4)
            result[name] = {"tokens/s": round(rate, 1), "TFLOP/s": round(flops / 1e12, 3), "MFU": mfu}
    return result


def throughput_table(rows: Mapping[str, Mapping[str, float | None]]) -> str:
    """A line for each row."""
    head = ["row", "tokens/s a rank", "TFLOP/s", "MFU"]
    cells = [
        [
            name,
            f"{row['tokens/s']:.0f}",
            f"{row['TFLOP/s']:.1f}",
            "" if row["MFU"] is None else f"{row['MFU']:.3f}",
        ]
        for name, row in rows.items()
    ]
    return interleave.table(head, cells)


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["10M", "50M"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--ranks", type=int, default=WORLD, help="on a CPU")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="timed steps a visit")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument(
        "--bucket", type=int, default=5_000_000, help="elements; zero_full derives its own on CPUs"
    )
    parser.add_argument("--no-overlap", action="store_true", help="zero_full without overlap_comm")
    parser.add_argument("--one-at-a-time", action="store_true", help="rebuild a row for each visit")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--recompute", action="store_true", help="activations, in backward")
    parser.add_argument("--throughput", action="store_true", help="also tokens per second and MFU")
    parser.add_argument("--limit", type=float, default=1200, help="seconds for one size in one precision")
    return parser.parse_args()


def main() -> None:
    """Measure every size in every precision, print tables, end with one JSON line."""
    asked = arguments()
    print(interleave.heading())
    all_ratios: list[Ratio] = []
    losses: dict[str, dict[str, float]] = {}
    rates: dict[str, Any] = {}
    for size in asked.sizes:
        for dtype in asked.dtypes:
            keep = not asked.one_at_a_time and fits(size, len(asked.rows), asked.ranks)
            plan = Plan(size, dtype, tuple(asked.rows), asked.rounds, asked.warmup, asked.steps)
            plan = replace(plan, bucket=asked.bucket, overlap=False if asked.no_overlap else None, keep=keep)
            plan = replace(plan, device=asked.device, recompute=asked.recompute, ranks=asked.ranks)
            found = measure(plan, asked.limit)
            here = ratios(plan, found)
            life = "all rows alive at once" if keep else "one row alive at a time"
            many = f"batch {plan.batch[0]} x {plan.batch[1]}, {plan.world} rank{'s' * (plan.world > 1)}"
            print(f"\n## {size} parameters, {dtype}, {many}, {life}\n")
            print(report(found))
            if asked.throughput:
                rates[f"{size} {dtype}"] = throughput(plan, found)
                print("\n" + throughput_table(rates[f"{size} {dtype}"]))
            if here:
                print("\n" + interleave.table(interleave.RATIO_HEAD, [r.cells() for r in here]))
            all_ratios += here
            losses[f"{size} {dtype}"] = loss_differences(found)
    about = {"versions": interleave.versions(), "cpus": os.cpu_count(), "rounds": asked.rounds}
    about |= {
        "steps": asked.steps,
        "device": asked.device,
        "bucket": asked.bucket,
        "losses differ by": losses,
    }
    about |= {"throughput": rates} if rates else {}
    print("\n" + interleave.json_line(all_ratios, **about))


if __name__ == "__main__":
    main()
