"""Rows measured side by side: every round visits every row, and each round starts with another one.

A machine that slows down for a while then slows every row, so a ratio of two medians survives what the
two times do not. Beside each ratio stands its range over the rounds: a difference smaller than that
range has not been resolved.
"""

import json
import math
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

Series = list[list[float]]  # one list of samples a round


def order(names: Sequence[str], round_number: int) -> list[str]:
    """The rows of this round: rotated, so that nobody always comes after the same neighbour's warm-up."""
    start = round_number % len(names) if names else 0
    return [*names[start:], *names[:start]]


def run(names: Sequence[str], rounds: int, visit: Callable[[str, int], list[float]]) -> dict[str, Series]:
    """`visit(name, round)` measures a few samples of one row; returns the samples by row and round."""
    samples: dict[str, Series] = {name: [] for name in names}
    for number in range(rounds):
        for name in order(names, number):
            samples[name].append(visit(name, number))
    return samples


def wall_and_cpu(
    acts: Mapping[str, Callable[[], object]], rounds: int, ready: Callable[[str], object]
) -> tuple[dict[str, Series], dict[str, Series]]:
    """Seconds, and CPU seconds of this process, by row and round, after one round that warms up.

    `ready(name)` runs before each act and is not measured, such as a barrier between ranks.
    """
    cpu: dict[str, Series] = {name: [] for name in acts}

    def visit(name: str, number: int) -> list[float]:
        ready(name)
        start, worked = time.perf_counter(), time.process_time()
        acts[name]()
        cpu[name].append([time.process_time() - worked])
        return [time.perf_counter() - start]

    for name in acts:
        visit(name, 0)
        cpu[name].clear()
    return run(list(acts), rounds, visit), cpu


def slowest(ranks: Sequence[Series]) -> Series:
    """A step is over when its last rank is: the maximum over ranks, sample by sample."""
    rounds = zip(*ranks, strict=True)
    return [[max(step) for step in zip(*one_round, strict=True)] for one_round in rounds]


def middle(series: Series) -> float:
    """The median over all samples of all rounds."""
    return median(sample for one_round in series for sample in one_round)


def spread(series: Series) -> tuple[float, float]:
    """The lowest and the highest median of a round."""
    medians = [median(one_round) for one_round in series]
    return min(medians), max(medians)


def minus(series: Series, base: Series) -> Series:
    """What a row adds to `base`: its samples minus the median of `base` in the same round."""
    pairs = zip(series, base, strict=True)
    return [[sample - median(below) for sample in one_round] for one_round, below in pairs]


@dataclass(frozen=True)
class Ratio:
    """One comparison and, where the project has set itself one, its target (at most)."""

    name: str
    value: float
    low: float
    high: float
    target: float | None = None

    @property
    def met(self) -> bool | None:
        """None where there is no target."""
        return None if self.target is None else self.value <= self.target

    @property
    def resolved(self) -> bool:
        """Whether every round comes to the verdict of the median."""
        return self.target is not None and (self.high <= self.target if self.met else self.low > self.target)

    def cells(self) -> list[str]:
        """As a row of a table."""
        verdict = {None: "", True: "met", False: "NOT met"}[self.met]
        if self.target is not None and not self.resolved:
            verdict += ", rounds disagree"
        limit = "" if self.target is None else f"<= {self.target:.2f}"
        rounds = "noise" if math.isnan(self.low) else f"{self.low:.2f}-{self.high:.2f}"
        return [self.name, f"{self.value:.2f}", rounds, limit, verdict]

    def as_json(self) -> dict[str, object]:
        """For the last line of a benchmark."""
        numbers = {"value": round(self.value, 4), "low": round(self.low, 4), "high": round(self.high, 4)}
        return {**numbers, "target": self.target, "met": self.met, "resolved": self.resolved}


def ratio(name: str, ours: Series, theirs: Series, target: float | None = None) -> Ratio:
    """Median over median; its range is that of the rounds' own ratios."""
    pairs = zip(ours, theirs, strict=True)
    by_round = [_over(median(mine), median(peers)) for mine, peers in pairs]
    said = [value for value in by_round if value == value]  # without the rounds that say nothing
    low, high = (min(said), max(said)) if len(said) == len(by_round) else (float("nan"), float("nan"))
    return Ratio(name, _over(middle(ours), middle(theirs)), low, high, target)


def _over(above: float, below: float) -> float:
    """An added time can be lost in the noise (zero or less): such a ratio says nothing, and meets nothing."""
    return above / below if above > 0 and below > 0 else float("nan")


def heading() -> str:
    """What a benchmark prints first: the day, the machine, the versions, and how it was started."""
    about = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", about.read_text()) if about.exists() else None
    cpu = found.group(1) if found else platform.processor() or platform.machine()
    installed = [f"{name} {known}" for name, known in versions().items() if known != ABSENT]
    said = [f"{name}={os.environ[name]}" for name in SWITCHES if name in os.environ]
    spec = sys.modules["__main__"].__spec__
    module = spec.name.removesuffix(".__main__") if spec else ""
    command = shlex.join([*said, "python", "-m", module, *sys.argv[1:]])
    where = f"{date.today().isoformat()}: {cpu}, {os.cpu_count()} cores, {', '.join(installed)}"
    return f"Measured on {where}.\n\n```\n{command}\n```\n"


def versions() -> dict[str, str]:
    """Of every peer; torch's own parts have torch's."""
    found = {}
    for name in ("torch", "deepspeed"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ABSENT
    return found


ABSENT = "not installed"
SWITCHES = ("OMP_NUM_THREADS", "ZERO_FULL_KERNELS")  # from the environment
RATIO_HEAD = ["ratio", "median", "range", "target", ""]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table that also reads well in a terminal: the first column left, the others right."""
    lines = [list(head), *[list(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]

    def text(line: list[str]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "| " + " | ".join(cells) + " |"

    rule = "|" + "|".join(
        "-" * (widths[0] + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)
    )
    return "\n".join([text(lines[0]), rule + "|", *map(text, lines[1:])])


def cells(name: str, series: Series) -> list[str]:
    """A row of a table: the name, the median in milliseconds, and its range over the rounds."""
    ms = [[1e3 * seconds for seconds in times] for times in series]
    low, high = spread(ms)
    return [name, f"{middle(ms):.2f}", f"{low:.2f}-{high:.2f}"]


def json_line(ratios: Iterable[Ratio], **about: object) -> str:
    """The machine-readable end of a benchmark: every ratio, and what it was measured on. Strict JSON."""
    found = {r.name: r.as_json() for r in ratios}
    for entry in found.values():
        for key, number in entry.items():
            if number != number:  # NaN has no JSON
                entry[key] = None
    return json.dumps({"ratios": found, **about}, allow_nan=False)


def loopback_bytes(source: Path = Path("/proc/net/dev")) -> int | None:
    """All bytes that this machine's processes have sent to each other over TCP, headers included.

    None where the system does not say (only Linux does).
    """
    if not source.exists():
        return None
    for line in source.read_text().splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == "lo":
            return int(numbers.split()[8])
    return None
