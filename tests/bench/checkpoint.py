"""How fast a training state goes to the disk and comes back, and how long an asynchronous save blocks.

    python -m tests.bench.checkpoint --directory . --size 50M --rounds 6

Two gloo ranks with one thread each, at one stage of ZeRO, in fp32. Each round visits every row, in an order
that rotates. "GB/s" are bytes of state (a parameter's master and two moments: 12) over the time of the slower
rank; so a row that writes anything twice is slower by that. A save writes new files and counts until it would
survive a crash: who does not flush, is flushed. Before a load the page cache is asked to forget the files;
what the host of a virtual disk remembers is beyond reach. zero_full computes a checksum of all that it
writes, and verifies it before a load changes anything; the others do not. What each row loads is compared,
bit by bit, with what it has saved.

An asynchronous save stands beside a copy of as many bytes from one tensor to another that is there. Its first
time, in which memory for the copy is made, stands by itself. The last line is JSON. See `peers.py` for how to
install DeepSpeed; what is missing is left out.
"""

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.bench import interleave
from tests.bench.checkpoint_rows import (
    Dcp,
    DeepSpeed,
    Pickled,
    Saver,
    ZeroFull,
    check,
    forget_all,
    remove,
)
from tests.bench.interleave import Ratio, Series
from tests.bench.peers import NotInstalled, Setup
from tests.bench.step_time import SIZES, leave_with_parent
from tests.worlds import Pool

WORLD = 2
OURS, COPY, BESIDE = "zero_full", "a copy of the same bytes", "zero_full, asynchronous: until it returns"
DEEPSPEED = "DeepSpeed"
PEERS = (DEEPSPEED, "DCP", "torch.save and load")
SAVE, LOAD = "save: ", "load: "
TARGET = 1.3  # of a copy's time


@dataclass(frozen=True)
class Plan:
    """One run."""

    directory: str
    size: str
    stage: int
    rounds: int


@dataclass
class Found:
    """What one rank has seen."""

    nbytes: int = 0  # of its state
    first_s: float = 0.0  # of the first asynchronous save
    missing: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, Series] = field(default_factory=dict)


class Rank:
    """One rank of a run: who saves, where, and its clock."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.folder, self.found = plan, Path(plan.directory), Found()
        alone = [dist.new_group([one]) for one in range(WORLD)][dist.get_rank()]
        setup = Setup(SIZES[plan.size], torch.float32, WORLD, alone, bucket=5_000_000, overlap=False)
        self.ours = ZeroFull(setup, plan.stage)
        self.savers: dict[str, Saver] = {OURS: self.ours}
        try:
            self.savers[DEEPSPEED] = DeepSpeed(setup, plan.stage)
        except NotInstalled as reason:
            self.found.missing[DEEPSPEED] = str(reason)
        self.savers |= {"DCP": Dcp(self.ours), "torch.save and load": Pickled(self.ours)}
        self.found.nbytes = self.ours.size()
        self.source = torch.ones(self.found.nbytes, dtype=torch.uint8)
        self.copy = self.source.clone()

    def run(self) -> Found:
        """Check everything, then measure everything."""
        for name, saver in self.savers.items():
            check(saver, self.folder / name)  # what is loaded later, too
        self.found.first_s = self.asynchronous()[0]
        acts: dict[str, Callable[[], list[float]]] = {COPY: self.copied, BESIDE: self.asynchronous}
        for name, saver in self.savers.items():
            acts[SAVE + name] = lambda saver=saver: self.saved(saver)
            acts[LOAD + name] = lambda saver=saver, name=name: self.loaded(saver, name)

        def visit(name: str, number: int) -> list[float]:
            if dist.get_rank() == 0 and name == interleave.order(list(acts), number)[0]:
                print(f"round {number + 1}", file=sys.stderr)
            return acts[name]()

        self.found.seconds = interleave.run(list(acts), self.plan.rounds, visit)
        for saver in self.savers.values():
            saver.close()
        return self.found

    def timed(self, act: Callable[[], object]) -> list[float]:
        """Seconds of one call, which all ranks begin together."""
        gc.collect()
        dist.barrier()
        start = time.perf_counter()
        act()
        return [time.perf_counter() - start]

    def saved(self, saver: Saver) -> list[float]:
        """One save into a folder that goes again."""
        seconds = self.timed(lambda: saver.save(self.folder / "new"))
        remove(self.folder / "new")
        return seconds

    def loaded(self, saver: Saver, name: str) -> list[float]:
        """One load of what was saved first."""
        forget_all(self.folder / name)
        return self.timed(lambda: saver.load(self.folder / name))

    def asynchronous(self) -> list[float]:
        """How long one blocks; it is waited for, and goes again."""
        seconds = self.timed(lambda: self.ours.save_beside(self.folder / "new"))
        self.ours.engine.wait_for_checkpoint()
        remove(self.folder / "new")
        return seconds

    def copied(self) -> list[float]:
        """One copy between tensors that are there."""
        return self.timed(lambda: self.copy.copy_(self.source))


def rank_main(_: Any, plan: Plan) -> Found:
    """The life of a rank."""
    leave_with_parent()
    return Rank(plan).run()


def measure(plan: Plan, limit: float) -> Found:
    """All ranks' findings as one: a save is over when its slowest rank is."""
    pool = Pool()
    try:
        ranks: list[Found] = pool.run(rank_main, WORLD, plan, limit=limit, collective=min(limit, 120))
    finally:
        pool.stop()
    nbytes, first_s = sum(rank.nbytes for rank in ranks), max(rank.first_s for rank in ranks)
    names = ranks[0].seconds
    together = {name: interleave.slowest([rank.seconds[name] for rank in ranks]) for name in names}
    return Found(nbytes, first_s, ranks[0].missing, together)


EXPORT = r"""
import re, sys
from pathlib import Path
from zero_full.checkpoint import export_checkpoint

def peak():
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

before = peak()
made = export_checkpoint(sys.argv[1], sys.argv[2])
print(made.nbytes, peak() - before)
"""


def exported(checkpoint: Path, out: Path) -> tuple[int, int] | None:
    """Bytes of an export, and by how many the memory of its process has grown; None: nobody tells."""
    if not sys.platform.startswith("linux"):
        return None
    command = [sys.executable, "-c", EXPORT, str(checkpoint), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    nbytes, grown = done.stdout.split()
    return int(nbytes), int(grown)


HEAD = ["row", "ms", "range", "GB/s"]


def report(found: Found) -> str:
    """The table."""
    lines = []
    for name, series in sorted(found.seconds.items(), key=lambda row: row[0].partition(": ")[0] != "save"):
        low, high = interleave.spread(series)
        middle = interleave.middle(series)
        times = [f"{1e3 * middle:.0f}", f"{1e3 * low:.0f}-{1e3 * high:.0f}"]
        lines.append([name, *times, f"{found.nbytes / middle / 1e9:.2f}"])
    lines.append([f"{BESIDE}, the first time", f"{1e3 * found.first_s:.0f}", "", ""])
    lines += [[f"save and load: {name}", why, "", ""] for name, why in found.missing.items()]
    return interleave.table(HEAD, lines)


def ratios(found: Found) -> list[Ratio]:
    """Ours over each peer's; what an asynchronous save blocks over a copy."""
    seconds = found.seconds
    result = [
        interleave.ratio(
            "time that an asynchronous save blocks / a copy", seconds[BESIDE], seconds[COPY], TARGET
        )
    ]
    for what in (SAVE, LOAD):
        result += [
            interleave.ratio(f"{what}{OURS} / {peer}", seconds[what + OURS], seconds[what + peer])
            for peer in PEERS
            if what + peer in seconds
        ]
    return result


def main() -> None:
    """Measure, print tables, end with one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--directory", default=".", help="on the disk to measure")
    parser.add_argument("--size", choices=SIZES, default="50M")
    parser.add_argument("--stage", type=int, choices=[1, 2], default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--limit", type=float, default=1200, help="seconds")
    asked = parser.parse_args()
    print(interleave.heading())
    with tempfile.TemporaryDirectory(dir=asked.directory) as directory:
        found = measure(Plan(directory, asked.size, asked.stage, asked.rounds), asked.limit)
        export = exported(Path(directory) / OURS, Path(directory) / "export")
    rank = f"{found.nbytes / 1e6:.0f} MB of state on {WORLD} ranks"
    print(f"{asked.size} parameters, fp32, stage {asked.stage}: {rank}\n\n{report(found)}")
    here = ratios(found)
    print("\n" + interleave.table(interleave.RATIO_HEAD, [r.cells() for r in here]))
    about: dict[str, object] = {"versions": interleave.versions(), "cpus": os.cpu_count()}
    about |= {"size": asked.size, "stage": asked.stage, "rounds": asked.rounds, "bytes": found.nbytes}
    if export is not None:
        nbytes, grown = export
        print(
            f"\n`python -m zero_full export` of {nbytes / 1e6:.0f} MB of fp32 weights: the process's memory "
            f"grows by {grown / 1e6:.0f} MB at most."
        )
        about |= {"export": {"bytes": nbytes, "memory": grown}}
    print("\n" + interleave.json_line(here, **about))


if __name__ == "__main__":
    main()
