"""Whether a change slows a training step: the present files beside those of an earlier commit, on two ranks.

    python -m tests.bench.compare BASE
    python -m tests.bench.compare main --rows stage3 stage3-small --rounds 20

BASE is a commit. Its files are unpacked under build/compare. The ranks of both are up at the same time. Each
round measures every row with one and then with the other, in an order that changes from round to round. A row
fails if its median ratio is more than 1.05 and three quarters of the rounds are above that, too. Exit code 1:
a row failed. With `--wire` ranks send messages, as those of two hosts do. The machine must be quiet. The last
line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import IO

from tests.bench import interleave
from tests.bench.compare_rank import ROWS

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
LIMIT = 1.05
START = """
import runpy, sys
script, rank, world, store, steps, *rows = sys.argv[1:]
runpy.run_path(script)["main"](int(rank), int(world), store, int(steps), rows)
"""


class Ranks:
    """The ranks that train with the files of one directory."""

    def __init__(self, directory: Path, rows: Sequence[str], steps: int, wire: bool, scratch: Path) -> None:
        script = str(ROOT / "tests" / "bench" / "compare_rank.py")
        store = str(scratch / f"store {directory.name}")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(directory)}
        if wire:
            environment["ZERO_FULL_SHARED_MEMORY"] = "off"
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", START, script, str(rank), str(RANKS), store, str(steps), *rows],
                cwd=directory,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]

    def wait_until_ready(self) -> None:
        """Wait until all rows are built."""
        for process in self.processes:
            assert self._line(process) == "ready"

    def seconds(self, row: str) -> list[float]:
        """Seconds of a few steps of a row. A step is over when its slower rank is."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(row + "\n")
            process.stdin.flush()
        found = [json.loads(self._line(process)) for process in self.processes]
        return [max(step) for step in zip(*found, strict=True)]

    def _line(self, process: "subprocess.Popen[str]") -> str:
        output: IO[str] | None = process.stdout
        assert output is not None
        line = output.readline().strip()
        if not line:
            raise SystemExit(f"a rank of {process.args[3]} ended with code {process.wait()}")  # type: ignore[index]
        return line

    def close(self) -> None:
        """End the ranks."""
        for process in self.processes:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Verdict:
    """How a row compares: the present files over the base, by round."""

    row: str
    base: float  # seconds, the median
    present: float
    ratios: list[float]  # by round

    @property
    def range(self) -> tuple[float, float]:
        """The lower and the upper quartile of the rounds."""
        if len(self.ratios) < 2:
            return self.ratios[0], self.ratios[0]
        low, _, high = quantiles(self.ratios, n=4, method="inclusive")
        return low, high

    @property
    def fails(self) -> bool:
        """Whether the row is slower beyond the limit and its noise."""
        return median(self.ratios) > LIMIT and self.range[0] > LIMIT

    def cells(self) -> list[str]:
        """As a row of a table."""
        low, high = self.range
        middle = median(self.ratios)
        said = "SLOWER" if self.fails else "rounds disagree" if middle > LIMIT else ""
        times = [f"{1e3 * self.base:.1f}", f"{1e3 * self.present:.1f}"]
        return [self.row, *times, f"{middle:.3f}", f"{low:.3f}-{high:.3f}", said]


HEAD = ["row", "base, ms", "present, ms", "present / base", "quartiles", ""]


def unpacked(base: str) -> tuple[str, Path]:
    """The base's commit, and a directory with its files."""
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run(
        [*git, "rev-parse", "--short", f"{base}^{{commit}}"], capture_output=True, text=True
    )
    if found.returncode:
        raise SystemExit(f"{base} is not a commit of {ROOT}: {found.stderr.strip()}")
    commit = found.stdout.strip()
    directory = ROOT / "build" / "compare" / commit
    if not (directory / "zero_full").exists():
        directory.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run([*git, "archive", commit], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(directory)], input=archive.stdout, check=True)
    return commit, directory


def compare(directory: Path, rows: Sequence[str], rounds: int, steps: int, wire: bool) -> list[Verdict]:
    """Measure every row in turn."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        both = {}
        for name, files in (("base", directory), ("present", ROOT)):
            both[name] = ranks = Ranks(files, rows, steps, wire, scratch)
            stack.callback(ranks.close)
        for ranks in both.values():
            ranks.wait_until_ready()
        found: dict[str, dict[str, list[float]]] = {row: {name: [] for name in both} for row in rows}
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            for row in interleave.order(rows, number):
                for name in interleave.order([*both], number):
                    found[row][name].append(median(both[name].seconds(row)))
    return [
        Verdict(
            row,
            median(times["base"]),
            median(times["present"]),
            [b / a for a, b in zip(times["base"], times["present"], strict=True)],
        )
        for row, times in found.items()
    ]


def main() -> int:
    """Print the table and the JSON line; 1 if a row is slower."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("base", help="a commit, as git names it")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a row in a round")
    parser.add_argument("--wire", action="store_true", help="without shared memory, as between hosts")
    asked = parser.parse_args()
    commit, directory = unpacked(asked.base)
    print(interleave.heading())
    if os.getloadavg()[0] > 1:
        print(f"other programs run on this machine (load {os.getloadavg()[0]:.1f}): the figures say little\n")
    verdicts = compare(directory, asked.rows, asked.rounds, asked.steps, asked.wire)
    print(interleave.table(HEAD, [verdict.cells() for verdict in verdicts]))
    slower = [verdict.row for verdict in verdicts if verdict.fails]
    about = {"base": commit, "rounds": asked.rounds, "slower": slower}
    print("\n" + json.dumps({"ratios": {v.row: round(median(v.ratios), 4) for v in verdicts}, **about}))
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
