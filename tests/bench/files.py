"""How fast tensors go to files and come back: block I/O in its variants beside torch.save and torch.load.

    python -m tests.bench.files --directory . --mib 256 --rounds 8

Every row has its own file, which is there already, as in training: block I/O writes over it, and torch.save
cuts it and writes it anew. A write counts until the file would survive a crash (fdatasync). Before a read the
page cache is asked to forget the file; what the host of a virtual disk remembers is beyond reach. Block I/O
reads into a tensor that is there, torch.load makes one. CPU time is that of all threads of this process.
The last line is JSON.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tests.bench import interleave
from tests.bench.interleave import Series
from zero_full.kernels import load
from zero_full.kernels.files import BlockIO, aligned_empty, describe

BLOCKS = {
    "compiled, direct": {"compiled": True, "direct": True},
    "compiled, page cache": {"compiled": True, "direct": False},
    "Python threads, direct": {"compiled": False, "direct": True},
    "Python threads, page cache": {"compiled": False, "direct": False},
}
TORCH = "torch.save and load"
OURS = "compiled, direct"


class Row:
    """One way to write a tensor into a file, and to read it."""

    def __init__(self, path: Path, values: Tensor, io: BlockIO | None) -> None:
        self.path, self.values, self.io = path, values, io
        self.back = aligned_empty(values.numel(), values.dtype).zero_()  # all its pages are there
        self.cpu: dict[str, Series] = {"write": [], "read": []}

    def write(self) -> None:
        """Until it would survive a crash."""
        if self.io is not None:
            self.io.write(self.path, self.values)
            self.io.sync(self.path)
            return
        torch.save(self.values, self.path)
        flush(self.path)

    def read(self) -> None:
        """Into memory."""
        if self.io is not None:
            self.io.read(self.path, self.back).wait()
        else:
            self.back = torch.load(self.path)

    def timed(self, what: str) -> list[float]:
        """One sample of "write" or "read" in seconds."""
        forget(self.path)
        began, cpu = time.perf_counter(), time.process_time()
        getattr(self, what)()
        self.cpu[what].append([time.process_time() - cpu])
        return [time.perf_counter() - began]


def on_file(path: Path, action: Callable[[int], object]) -> None:
    """Open, act, close."""
    file = os.open(path, os.O_RDONLY)
    try:
        action(file)
    finally:
        os.close(file)


def flush(path: Path) -> None:
    """Everything to the disk."""
    on_file(path, os.fdatasync)


def forget(path: Path) -> None:
    """Ask the page cache to; it forgets only what is on the disk."""
    flush(path)
    on_file(path, lambda file: os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED))


def measure(directory: Path, plan: argparse.Namespace) -> tuple[dict[str, Row], dict[str, dict[str, Series]]]:
    """Seconds by row and round, first of all writes and then of all reads."""
    values = aligned_empty(plan.mib * 2**18, torch.float32).normal_()
    rows = {TORCH: Row(directory / "torch", values, None)}
    for number, (name, settings) in enumerate(BLOCKS.items()):
        io = BlockIO(plan.threads, plan.block_kib * 1024, **settings)
        rows[name] = Row(directory / f"{number}", values, io)
    for row in rows.values():
        row.write()
    found = {
        what: interleave.run(list(rows), plan.rounds, lambda name, _, what=what: rows[name].timed(what))
        for what in ("write", "read")
    }
    for name, row in rows.items():
        assert torch.equal(row.back, values), f"{name}: something else came back"
        if row.io is not None:
            row.io.close()
    return rows, found


def main() -> None:
    """Print the tables and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--directory", default=".", help="on the disk to measure")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    plan = parser.parse_args()
    print(interleave.heading())
    load.load(torch.device("cpu"))  # so that nothing is compiled later
    with tempfile.TemporaryDirectory(dir=plan.directory) as directory:
        place = str(describe(directory))
        rows, found = measure(Path(directory), plan)
    print(f"{plan.mib} MiB in blocks of {plan.block_kib} KiB, {plan.threads} threads; {place}\n")
    lines, ratios = [], []
    for what, by_row in found.items():
        for name, series in by_row.items():
            speeds = [[plan.mib / 1024 / seconds for seconds in one_round] for one_round in series]
            low, high = interleave.spread(speeds)
            cpu = 1000 * interleave.middle(rows[name].cpu[what])
            lines.append(
                [f"{what}: {name}", f"{interleave.middle(speeds):.2f}", f"{low:.2f}-{high:.2f}", f"{cpu:.0f}"]
            )
            if name != OURS:
                target = 1.0 if name == TORCH else None
                ratios.append(interleave.ratio(f"{what}: {OURS} / {name}", by_row[OURS], series, target))
    print(interleave.table(["row", "GiB/s", "range", "CPU ms"], lines))
    print("\n" + interleave.table(interleave.RATIO_HEAD, [r.cells() for r in ratios]))
    print("\n" + interleave.json_line(ratios, place=place, **vars(plan) | {"directory": None}))


if __name__ == "__main__":
    main()
