"""The disk's part of the offload benchmark: its rank, the bandwidth beside it, and the memory of a row."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tests.bench import interleave
from tests.bench.interleave import Series
from tests.bench.offload_rows import DISK, IN_MEMORY, of_disk
from tests.bench.step_time import Found, Plan, Rank, leave_with_parent
from zero_full.kernels.files import BlockIO, Transfer, aligned_empty
from zero_full.offload.spill_file import SpillFile

BANDWIDTH = "bandwidth"  # what is visited as if it were a row
PIECE = 2**26  # bytes that are one transfer, if there are so many
STEPS = 4  # while memory is watched


@dataclass(frozen=True)
class Limits:
    """How the disk is measured."""

    directory: str
    mib: int
    in_memory: int = IN_MEMORY  # elements of which the state stays in memory


@dataclass
class DiskFound:
    """What the rank has seen: rows, bytes a second alone by round, and bytes a step."""

    rows: dict[str, Found] = field(default_factory=dict)
    reads: Series = field(default_factory=list)
    writes: Series = field(default_factory=list)
    read: int = 0
    written: int = 0

    def moving(self) -> list[float]:
        """Seconds that a step's bytes take alone, at the bandwidth of each round."""
        rates = zip(self.reads, self.writes, strict=True)
        return [self.read / median(reading) + self.written / median(writing) for reading, writing in rates]


class DiskRank(Rank):
    """Its rows, and between them the disk alone."""

    def __init__(self, plan: Plan, limits: Limits) -> None:
        rows = of_disk(limits.directory, limits.in_memory)
        super().__init__(Plan(**{**vars(plan), "rows": tuple(rows)}), rows)
        self.file = SpillFile(Path(limits.directory), BlockIO())
        self.size = limits.mib * 2**20
        self.file.take(self.size)
        self.buffer = aligned_empty(min(PIECE, self.size), torch.uint8)
        self.buffer.copy_(torch.randint(256, self.buffer.shape, dtype=torch.uint8))
        self.moved(self.file.write)
        self.bytes = DiskFound(rows=self.found)

    def run_all(self) -> DiskFound:
        """Every round visits the rows and the disk."""
        interleave.run([*self.plan.rows, BANDWIDTH], self.plan.rounds, self.visit_any)
        self.file.end()
        return self.bytes

    def visit_any(self, name: str, number: int) -> list[float]:
        """A row or the disk."""
        if name == BANDWIDTH:
            self.bytes.writes.append([self.size / self.moved(self.file.write)])
            self.bytes.reads.append([self.size / self.moved(self.file.read)])
            return []
        times = self.visit(name, number)
        if name == DISK:
            tier = self.alive[name].owner.optimizer.settings.tier
            before = tier.read_bytes, tier.written_bytes
            self.one_more(name)
            self.bytes.read = tier.read_bytes - before[0]
            self.bytes.written = tier.written_bytes - before[1]
        return times

    def one_more(self, name: str) -> None:
        """A step that is not timed, of data that it knows."""
        trainee = self.alive[name]
        trainee.backward(*(each.to(self.setup.device) for each in self.data[0]))
        trainee.update()

    def moved(self, move: Callable[[Tensor, int], Transfer]) -> float:
        """Seconds until all of the file is written or read."""
        began = time.perf_counter()
        for begin in range(0, self.size, self.buffer.numel()):
            move(self.buffer[: self.size - begin], begin).wait()
        return time.perf_counter() - began


def anonymous() -> int | None:
    """Bytes of this process that no file stands behind; None where the system does not say."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else []:
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return None


def peak_memory(_: Any, plan: Plan, directory: str, row: str) -> int | None:
    """By how much the anonymous memory of a process grows that has nothing but this row."""
    leave_with_parent()
    before = anonymous()
    if before is None:
        return None
    rank = Rank(Plan(**{**vars(plan), "rows": (row,), "rounds": 1}), of_disk(directory))
    most, over = [before], threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            most[0] = max(most[0], anonymous() or 0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    trainee = rank.build(row)
    assert trainee is not None
    for x, y in rank.data[:STEPS]:
        trainee.backward(x.to(rank.setup.device), y.to(rank.setup.device))
        trainee.update()
    over.set()
    watcher.join()
    trainee.close()
    return most[0] - before
