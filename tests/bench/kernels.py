"""How fast are the CPU's operators? Beside what memory allows, and beside torch and DeepSpeed.

    python -m tests.bench.kernels --rows adam unscale --threads 1 2

Rows and what they do: kernel_rows.py. Whatever is there to do the same as another row is first checked for
giving the same. All rows take turns in one run; arrays are larger than caches and shared by the rows of a
topic. Other work on the machine makes all of this useless: the column CPU, processors used on average, shows
it (1.00 for one thread that nobody has disturbed). The last line is JSON.
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass, field
from statistics import median

import torch

from tests.bench import interleave
from tests.bench.interleave import Ratio, Series
from tests.bench.kernel_rows import MULTIPLE, TOPICS, Row, Topic
from tests.kernels.cases import ops

SAMPLES, SECONDS = 5, 0.1  # of one row in one round: at most so many, in about so long
CHECKED = 10_000 // MULTIPLE * MULTIPLE  # elements
HEAD = ["row", "ms", "range", "CPU", "ns / element", "GB/s"]


@dataclass
class Times:
    """Of one row with so many threads."""

    seconds: Series = field(default_factory=list)  # of a call
    processors: list[float] = field(default_factory=list)  # CPU time over time, a round


Found = dict[tuple[str, int, str], Times]  # by topic, threads and row


def check(name: str) -> None:
    """Every row that has a like gives what that one does, from the same start."""
    for row, told in TOPICS[name](CHECKED).rows.items():
        if told.like:
            mine, other = (TOPICS[name](CHECKED).rows[each].call() for each in (told.like, row))
            for number, (expected, got) in enumerate(zip(mine, other, strict=True)):
                relative = 1e-2 if expected.dtype == torch.bfloat16 else 1e-4
                if not torch.allclose(got, expected, rtol=relative, atol=1e-6):
                    raise ArithmeticError(f"{name}: result {number} of {row} is not that of {told.like}")


def measure(topics: dict[str, Topic], threads: list[int], rounds: int) -> Found:
    """Every row with every number of threads, in turn."""
    keys = [(name, n, row) for name, topic in topics.items() for n in threads for row in topic.rows]
    labels = {" ".join(map(str, key)): key for key in keys}
    found = {key: Times() for key in keys}

    def visit(label: str, number: int) -> list[float]:
        name, n, row = key = labels[label]
        torch.set_num_threads(n)
        times, processors = sample(topics[name].rows[row])
        found[key].processors.append(processors)
        return times

    before = torch.get_num_threads()
    try:
        for label, series in interleave.run(list(labels), rounds, visit).items():
            found[labels[label]].seconds = series
    finally:
        torch.set_num_threads(before)
    return found


def sample(row: Row) -> tuple[list[float], float]:
    """One call to wake threads and leave others' data behind, then a few timed ones, and their CPU use."""
    row.call()
    times: list[float] = []
    began = time.process_time()
    while not times or (len(times) < SAMPLES and sum(times) < SECONDS):
        start = time.perf_counter()
        row.call()
        times.append(time.perf_counter() - start)
    return times, (time.process_time() - began) / sum(times)


def report(topics: dict[str, Topic], numel: int, found: Found) -> str:
    """A table for each topic and number of threads."""
    lines: dict[str, list[list[str]]] = {}
    for (name, threads, row), times in found.items():
        seconds, (low, high) = interleave.middle(times.seconds), interleave.spread(times.seconds)
        moved = topics[name].rows[row].bytes
        rate = f"{moved * numel / seconds / 1e9:.1f}" if moved else ""
        times_ms = [f"{1e3 * seconds:.2f}", f"{1e3 * low:.2f}-{1e3 * high:.2f}"]
        busy = f"{median(times.processors):.2f}"
        cells = [row, *times_ms, busy, f"{1e9 * seconds / numel:.3f}", rate]
        lines.setdefault(f"{name}, {counted(threads)}", []).append(cells)
    return "\n\n".join(f"## {title}\n\n{interleave.table(HEAD, rows)}" for title, rows in lines.items())


def counted(threads: int) -> str:
    """In words."""
    return f"{threads} thread{'s' if threads > 1 else ''}"


def ratios(topics: dict[str, Topic], threads: list[int], found: Found) -> list[Ratio]:
    """Ours over the fastest of theirs, where there is one."""
    result = []
    for name, topic in topics.items():
        for n in threads:
            for versus in topic.versus:
                there = [row for row in versus.theirs if row in topic.rows]
                if there:
                    best = min(there, key=lambda row: interleave.middle(found[name, n, row].seconds))
                    title = f"{name}, {counted(n)}: {versus.ours} / {best}"
                    pair = found[name, n, versus.ours].seconds, found[name, n, best].seconds
                    result.append(interleave.ratio(title, *pair, versus.target))
    return result


def main() -> None:
    """Check, measure, print tables and one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=TOPICS, default=list(TOPICS))
    parser.add_argument("--numel", type=int, default=20_000_000)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    print(interleave.heading())
    numel = max(asked.numel // MULTIPLE, 1) * MULTIPLE
    for name in asked.rows:
        check(name)
    print("every row gives what it should; measuring", file=sys.stderr)
    topics = {name: TOPICS[name](numel) for name in asked.rows}
    found = measure(topics, asked.threads, asked.rounds)
    every = ratios(topics, asked.threads, found)
    print("\n" + report(topics, numel, found))
    print("\n" + interleave.table(interleave.RATIO_HEAD, [r.cells() for r in every]))
    about = {"versions": interleave.versions(), "cpus": os.cpu_count(), "isa": f"x86-64-v{ops().cpu_isa(0)}"}
    print("\n" + interleave.json_line(every, numel=numel, rounds=asked.rounds, **about))


if __name__ == "__main__":
    main()
