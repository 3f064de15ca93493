"""Training steps of ranks that send messages, as ranks of several hosts do: every peer and stage, in turns.

    python -m tests.bench.wire --worlds 2 4 --links loopback "1 Gbit" "10 Gbit"

Ranks reach each other over the loopback, or through cables of a given rate (`link.py`). zero_full has its
defaults, except that shared memory is off. Rows of stage 3 keep nothing whole, except those with `keeps`:
they keep parameters from forward until backward, as zero_full and DeepSpeed do by default. A round visits
every row, and a visit warms up and then times steps; medians. Beside each step stand the bytes that one rank
sent or received, whichever is more, as the kernel counted them (headers included), the time that these bytes
alone take at the rate of one stream, and that time plus forward and backward. A step below this sum hides
messages behind forward and backward. Over the loopback the cores of the model also copy the messages, so the
rate of a stream, which has a core at each end, is more than they get. The last line is JSON. See `peers.py`
for how to install DeepSpeed; what is missing is left out.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.bench import interleave, limited_steps, link, peers
from tests.bench.interleave import Ratio, Series
from tests.bench.peers import NotInstalled, Row, Setup, Trainee
from tests.worlds import Pool
from zero_min.gpt import batch, load_text

ALONE, DDP = "forward+backward", "DDP"


@dataclass(frozen=True)
class Ours:
    """A row of zero_full: its stage, its aim as a part of DDP's step, and the peers that shard as much."""

    stage: int
    aim: float
    peers: tuple[str, ...]
    keeps: bool = False  # parameters from forward until backward


OURS = {
    "zero_full 0": Ours(0, 1.0, ("DeepSpeed 0",)),
    "zero_full 1": Ours(1, 0.95, ("ZeroRedundancyOptimizer", "DeepSpeed 1")),
    "zero_full 2": Ours(2, 0.95, ("ZeroRedundancyOptimizer", "DeepSpeed 2")),
    "zero_full 3": Ours(3, 1.15, ("FSDP2",)),
    "zero_full 3, keeps": Ours(3, 1.15, ("FSDP2, keeps", "DeepSpeed 3"), keeps=True),
}
ROWS: dict[str, Row] = {
    **{name: peers.ROWS[name] for name in (ALONE, DDP, "ZeroRedundancyOptimizer", "FSDP2")},
    "FSDP2, keeps": Row(partial(peers.fsdp2, reshard=False), DDP),
    **{f"DeepSpeed {stage}": peers.ROWS[f"DeepSpeed {stage}"] for stage in (0, 1, 2, 3)},
    **{
        name: Row(peers.zero_full(ours.stage, messages=True, keeps=ours.keeps), DDP)
        for name, ours in OURS.items()
    },
}
LOOPBACK = "loopback"


@dataclass(frozen=True)
class Case:
    """A link, and the model and batch with which forward and backward take about as long as its messages."""

    rate: int | None  # bits a second; None: no limit
    size: str
    sequences: int  # of 64 tokens each
    bucket: int  # elements of DeepSpeed's buckets; zero_full derives its own


CASES = {
    LOOPBACK: Case(None, "10M", 1, 2_500_000),
    "1 Gbit": Case(link.RATES["1 Gbit"], "3M", 6, 800_000),
    "10 Gbit": Case(10_000_000_000, "10M", 1, 2_500_000),
}


@dataclass(frozen=True)
class Plan:
    """One run."""

    case: Case
    rows: tuple[str, ...]
    rounds: int
    steps: int


@dataclass
class Found:
    """What one rank saw."""

    parameters: int = 0
    rate: float = 0.0  # bits a second that one stream got
    missing: dict[str, str] = field(default_factory=dict)  # why a row is not here
    seconds: dict[str, Series] = field(default_factory=dict)  # a step
    wire: dict[str, float] = field(default_factory=dict)  # bytes a step
    losses: dict[str, float] = field(default_factory=dict)  # of the first step


def network_bytes(device: str, source: Path = Path("/proc/net/dev")) -> tuple[int, int]:
    """Bytes received and sent by a device: this rank's cable, or the loopback of all ranks."""
    for line in source.read_text().splitlines() if source.exists() else []:
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == device:
            fields = numbers.split()
            return int(fields[0]), int(fields[8])
    return 0, 0


class Rank:
    """One rank: its rows, all alive at once, and its clock."""

    def __init__(self, plan: Plan, rows: Mapping[str, Row]) -> None:
        torch.set_num_threads(1)
        self.plan, case, self.world = plan, plan.case, dist.get_world_size()
        self.device = "lo" if case.rate is None else "eth0"
        if case.rate is not None:  # as torchrun says on several hosts, of which zero_full derives values
            os.environ |= {"WORLD_SIZE": str(self.world), "LOCAL_WORLD_SIZE": "1"}
        self.found = Found(rate=limited_steps.measured_rate(case.rate or 10**10))
        config = limited_steps.SIZES[case.size]
        setup = Setup(config, torch.float32, self.world, None, bucket=case.bucket, overlap=None)
        self.found.parameters = sum(p.numel() for p in setup.model().parameters())
        self.alive: dict[str, Trainee] = {}
        for name in plan.rows:
            try:
                self.alive[name] = rows[name].build(setup)
            except NotInstalled as reason:
                self.found.missing[name] = str(reason)
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = case.sequences, min(64, config.context)
        self.data = [batch(load_text(), *shape, generator) for _ in range(16)]
        self.taken = 0

    def run(self) -> Found:
        """Measure in rounds. Every row's first step is on the same data."""
        for name, trainee in self.alive.items():
            self.taken = 0
            loss = self.step(trainee)
            dist.all_reduce(loss)
            self.found.losses[name] = loss.item() / self.world
        self.found.seconds = interleave.run(tuple(self.alive), self.plan.rounds, self.visit)
        return self.found

    def visit(self, name: str, number: int) -> list[float]:
        """Seconds of each step, after one to warm up."""
        trainee, times = self.alive[name], list[float]()
        self.step(trainee)
        gc.collect()
        dist.barrier()
        before = network_bytes(self.device)
        for _ in range(self.plan.steps):
            dist.barrier()
            start = time.perf_counter()
            self.step(trainee)
            times.append(time.perf_counter() - start)
        dist.barrier()
        ways = [after - earlier for after, earlier in zip(network_bytes(self.device), before, strict=True)]
        share = 1 if self.plan.case.rate else self.world  # of the loopback, which all ranks use
        self.found.wire[name] = max(ways) / share / self.plan.steps
        return times

    def step(self, trainee: Trainee) -> torch.Tensor:
        """Train on the next batch. Returns the loss."""
        loss = trainee.backward(*self.data[self.taken % len(self.data)])
        self.taken += 1
        trainee.update()
        return loss.clone()


def rank_main(plan: Plan) -> Found:
    """The life of a rank."""
    return Rank(plan, ROWS).run()


def in_pool(_: Any, plan: Plan) -> Found:
    """The same on a rank of `tests.worlds`."""
    return rank_main(plan)


def measure(plan: Plan, world: int, limit: float) -> Found:
    """Run the ranks. A step is over when its last rank is; bytes are those of the busiest rank."""
    if plan.case.rate is not None:
        ranks = link.run(rank_main, world, plan, rate=plan.case.rate, limit=limit)
    else:
        pool = Pool(world)
        try:
            ranks = pool.run(in_pool, world, plan, limit=limit, collective=min(limit, 120))
        finally:
            pool.stop()
    first: Found = ranks[0]
    for name in first.seconds:
        first.seconds[name] = interleave.slowest([rank.seconds[name] for rank in ranks])
        first.wire[name] = max(rank.wire[name] for rank in ranks)
    return first


HEAD = ["row", "step, ms", "range", "/ DDP", "MB on the wire", "they alone, ms", "with forward+backward"]


def report(found: Found) -> str:
    """The table of one link."""
    lines = [_line(name, found) for name in found.seconds]
    lines += [[name, why, *[""] * (len(HEAD) - 2)] for name, why in found.missing.items()]
    return interleave.table(HEAD, lines)


def _line(name: str, found: Found) -> list[str]:
    series, sent = found.seconds[name], found.wire[name]
    low, high = interleave.spread(series)
    middle, ddp, alone = (interleave.middle(found.seconds.get(row, series)) for row in (name, DDP, ALONE))
    wire = 8e3 * sent / found.rate
    differs = abs(found.losses[name] - found.losses.get(DDP, found.losses[name])) > 1e-4
    return [
        name + " DIFFERS" * differs,
        f"{1e3 * middle:.1f}",
        f"{1e3 * low:.1f}-{1e3 * high:.1f}",
        f"{middle / ddp:.2f}" if DDP in found.seconds else "",
        "" if name == ALONE else f"{sent / 1e6:.1f}",
        "" if name == ALONE else f"{wire:.1f}",
        "" if name == ALONE or ALONE not in found.seconds else f"{wire + 1e3 * alone:.1f}",
    ]


def ratios(where: str, found: Found) -> list[Ratio]:
    """Each stage over DDP, with its target, and over the peers of the same stage."""
    result = []
    for name, ours in OURS.items():
        for other, aim in ((DDP, ours.aim), *((peer, 1.0) for peer in ours.peers)):
            if {name, other} <= found.seconds.keys():
                mine, theirs = found.seconds[name], found.seconds[other]
                result.append(interleave.ratio(f"{where}: {name} / {other}", mine, theirs, aim))
    return result


def cases(asked: argparse.Namespace) -> Sequence[tuple[str, Case]]:
    """The links asked for, in the size asked for."""
    found = []
    for name in asked.links:
        case = CASES[name]
        if asked.size is not None:
            case = Case(case.rate, asked.size, asked.sequences or case.sequences, asked.bucket or case.bucket)
        found.append((name, case))
    return found


def main() -> None:
    """Measure, print tables, end with one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="how many ranks")
    parser.add_argument("--links", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--size", choices=limited_steps.SIZES, help="instead of each link's own")
    parser.add_argument("--sequences", type=int, help="of 64 tokens, with --size")
    parser.add_argument("--bucket", type=int, help="elements of DeepSpeed's, with --size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--limit", type=float, default=290, help="seconds for one number of ranks and link")
    asked = parser.parse_args()
    print(interleave.heading())
    why = link.problem()
    if why is not None:
        print(f"**No link was limited: {why}.** Only the loopback is measured.\n")
    every: list[Ratio] = []
    for world in asked.worlds:
        for name, case in cases(asked):
            if case.rate is not None and why is not None:
                continue
            print(f"{world} ranks, {name}", file=sys.stderr)
            found = measure(Plan(case, tuple(asked.rows), asked.rounds, asked.steps), world, asked.limit)
            many = (
                f"{found.parameters / 1e6:.1f}M parameters, fp32, batch {case.sequences} x 64, {world} ranks"
            )
            print(f"\n## {many}, {name}; one stream gets {found.rate / 1e6:,.0f} Mbit/s\n\n{report(found)}")
            every += ratios(f"{world} ranks, {name}", found)
    print("\n" + interleave.table(interleave.RATIO_HEAD, [one.cells() for one in every]))
    about = {"versions": interleave.versions(), "cpus": os.cpu_count(), "rounds": asked.rounds}
    print("\n" + interleave.json_line(every, **about, limited=why is None))


if __name__ == "__main__":
    from tests.bench import wire  # ranks behind links import what they get by this name

    wire.main()
