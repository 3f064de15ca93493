"""What sign scales are worth to rules at one bit: one for each parameter or one for all, and of which size.

    python -m tests.bench.scales

Model, text, seeds and training are those of `tests.bench.optimizers`. There is one scale for each
parameter, or one for the model. It is the root of the mean square of the numbers that it stands for ("rms",
what optimizers use), or their mean size, which leaves least unsaid of a single average. "more" is how much
higher a seed's last loss is than in the first row of the same optimizer: the mean, and from the lowest to
the highest. "unsaid" is what there is to say after an average over what was asked for in it (the norm of
one over that of the other): the median of all averages, for the model and for that parameter of which it is
largest. The last line is JSON.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Any, NamedTuple

from torch import Tensor

from tests.bench import interleave, optimizers
from tests.bench.optimizers import ROWS, Found, Row
from tests.worlds import Pool
from zero_full.comm.compressed import CompressedReduce, Errors
from zero_full.optim.step import Peers

RULES = ["1-bit Adam", "1-bit LAMB, large batch", "0/1 Adam, scaler 64"]
Range = tuple[int, int]


class Scales(NamedTuple):
    """How many there are, and what one is."""

    per_tensor: bool
    l1: bool

    @property
    def words(self) -> str:
        """For a table."""
        return f"{'one each' if self.per_tensor else 'one'}, {'mean size' if self.l1 else 'rms'}"


KINDS = [Scales(per_tensor, l1) for per_tensor in (True, False) for l1 in (False, True)]


@dataclass
class Unsaid:
    """By average: what there is to say of all, and of each parameter, over what was asked for."""

    whole: list[float] = field(default_factory=list)
    each: list[list[float]] = field(default_factory=list)

    def add(self, other: "Unsaid") -> None:
        """Those of another training."""
        self.whole += other.whole
        self.each += other.each

    def medians(self) -> list[float]:
        """Of all, and of the parameter of which it is largest."""
        return [median(self.whole), max(map(median, zip(*self.each, strict=True)))]


class Heard:
    """An average that is listened to."""

    def __init__(self, by: CompressedReduce, ranges: Sequence[Range], unsaid: Unsaid) -> None:
        self.by, self.sent, self.ranges, self.unsaid = by, by.sent, ranges, unsaid

    def new_errors(self) -> Errors:
        """Those of the average."""
        return self.by.new_errors()

    def average(self, x: Tensor, out: Tensor, errors: Errors, what: str) -> None:
        """The same, and what there is to say after it."""
        asked = list(self._norms(x))
        self.by.average(x, out, errors, what)
        left = list(self._norms(errors.worker))
        shares = [one / of if of else 0.0 for one, of in zip(left, asked, strict=True)]
        self.unsaid.whole.append(shares[0])
        self.unsaid.each.append(shares[1:])

    def _norms(self, x: Tensor) -> Iterator[float]:
        """Of all, and of each parameter."""
        for start, stop in [(0, len(x)), *self.ranges]:
            yield float(x[start:stop].norm())


class Listening(Peers):
    """Peers whose averages have the scales that are asked for, and are listened to."""

    def __init__(self, of: Any, ranges: Sequence[Range], l1: bool) -> None:
        self.of, self.ranges, self.l1, self.unsaid = of, ranges, l1, Unsaid()

    def compressed(
        self, numel: int, tensors: Sequence[Range] | None = None, mask: Tensor | None = None
    ) -> Heard:
        """Among the same ranks."""
        by = CompressedReduce(self.of.alike, numel, tensors, mask, self.l1)
        return Heard(by, self.ranges, self.unsaid)


def train(comm: Any, row: Row, seed: int, scales: Scales) -> tuple[Found, Unsaid]:
    """One seed, as one rank sees it."""
    row = replace(row, params={**row.params, "per_tensor_scales": scales.per_tensor})
    engine = optimizers.engine_of(row, seed)
    stepper: Any = engine.optimizer.contents.stepper
    stepper.peers = listening = Listening(stepper.peers, stepper.layout.ranges, scales.l1)
    return optimizers.trained(engine, comm, row, seed), listening.unsaid


@dataclass
class Line:
    """One row: the last loss of each seed, and what rank 0 had to say."""

    ends: list[float] = field(default_factory=list)
    unsaid: Unsaid = field(default_factory=Unsaid)


def measure(rules: Sequence[str], seeds: Sequence[int], limit: float) -> dict[str, dict[Scales, Line]]:
    """Every optimizer with all kinds of scales, from every seed."""
    pool, found = Pool(), {name: {scales: Line() for scales in KINDS} for name in rules}
    try:
        for name, lines in found.items():
            for scales, line in lines.items():
                print(f"{name}, {scales.words}", file=sys.stderr)
                for seed in seeds:
                    given = (ROWS[name], seed, scales)
                    ranks = pool.run(train, optimizers.WORLD, *given, limit=limit, collective=limit)
                    line.ends += optimizers.agreed([each for each, _ in ranks], f"{name}, seed {seed}").ends
                    line.unsaid.add(ranks[0][1])
    finally:
        pool.stop()
    return found


def report(found: dict[str, dict[Scales, Line]]) -> str:
    """The table."""
    head = ["optimizer", "scales", "mean loss", "more", "more, seeds", "unsaid", "of the worst"]
    rows = []
    for name, lines in found.items():
        base = lines[KINDS[0]].ends
        for scales, line in lines.items():
            more = [mine - theirs for mine, theirs in zip(line.ends, base, strict=True)]
            told = ["", ""]
            if scales != KINDS[0]:
                told = [f"{mean(more):+.3f}", f"{min(more):+.3f} to {max(more):+.3f}"]
            unsaid = [f"{each:.2f}" for each in line.unsaid.medians()]
            rows.append([name, scales.words, f"{mean(line.ends):.3f}", *told, *unsaid])
    return interleave.table(head, rows)


def main() -> None:
    """Train, print a table, end with one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rows", nargs="+", choices=RULES, default=RULES, metavar="ROW")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one seed of one row")
    asked = parser.parse_args()
    print(interleave.heading())
    found = measure(asked.rows, asked.seeds, asked.limit)
    print(report(found))
    lines = {
        name: {scales.words: [round(loss, 4) for loss in line.ends] for scales, line in of.items()}
        for name, of in found.items()
    }
    about = {"versions": interleave.versions(), "cpus": os.cpu_count(), "seeds": asked.seeds}
    print("\n" + interleave.json_line([], **about, ends=lines))


if __name__ == "__main__":
    main()
