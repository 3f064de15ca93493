"""The rates of a machine that `doctor --measure --out` has measured, and the file that holds them.

All times are seconds of one rank while every rank of the machine does the same. A list of points has sizes
and seconds; seconds between two points are interpolated in the logarithm of both.

[Note: facts] Each entry of the file is a rate, a caption, or a fact. Rates depend on the facts, which must be
those of the machine and run that are planned: else the forecast would silently be another machine's. Captions
are for readers only.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

from zero_full.errors import PlanError
from zero_full.plan.machine_facts import machine_facts

FORMAT = "zero_full machine rates"
VERSION = 2
AGAIN = "Measure again: python -m zero_full doctor --measure --out {}"
Points = Sequence[Sequence[float]]  # sizes, and the seconds last
FACT, CAPTION, RATE, ENVELOPE = "fact", "caption", "rate", "envelope"  # kinds of entries: see [Note: facts]


def _entry(kind: str, differs: str = "") -> Any:
    """Describe an entry of the file. `differs`: of a fact, words for an error, with the two values."""
    return field(metadata={"kind": kind, "differs": differs})


@dataclass(frozen=True)
class MachineRates:
    """What a step is forecast from: see `measure/rates.py` for how each was measured."""

    date: str = _entry(CAPTION)
    device: str = _entry(FACT, "on device {}, and the plan is for {}")
    ranks: int = _entry(FACT, "by {} ranks at once, and the plan has {}")
    threads: int = _entry(FACT, "with {} threads a rank, and a rank of the plan has {} (OMP_NUM_THREADS)")
    torch: str = _entry(FACT, "with torch {}, and this is torch {}")
    cpu: str = _entry(FACT, "on {}, and this machine is {}")
    cpus: int = _entry(FACT, "on {} CPUs, and this process may use {}")
    instructions: str = _entry(FACT, "with instructions {}, and torch has {} here")
    operators: str = _entry(FACT, "with {} operators, and they are {} here (python -m zero_full build)")
    products: Mapping[str, Points] = _entry(RATE)  # by dtype and layout: rows, inner size, columns, seconds
    # By dtype and direction: tokens, and seconds of one head of `HEAD` elements.
    attention: Mapping[str, Points] = _entry(RATE)
    passes: Mapping[str, Points] = _entry(RATE)  # by kind and dtype: bytes read and written, seconds
    # By transport, kind and dtype: bytes of the whole buffer, seconds.
    collectives: Mapping[str, Points] = _entry(RATE)
    adam: Mapping[str, float] = _entry(RATE)  # by dtypes of master, gradient, copy: seconds of an element
    # By direction: seconds of a pass, and of each of its operations, besides their work.
    operations: Mapping[str, Sequence[float]] = _entry(RATE)
    # By stage: seconds in Python of a step, and of each parameter. "pipeline": of a step and each operation.
    runtime: Mapping[str, Sequence[float]] = _entry(RATE)
    hidden: float = _entry(RATE)  # share of a collective that disappears behind computation with overlap_comm
    waiting: float = _entry(RATE)  # share of computation by which the slowest rank is later than the mean
    format: str = field(default=FORMAT, metadata={"kind": ENVELOPE})
    version: int = field(default=VERSION, metadata={"kind": ENVELOPE})

    @property
    def machine(self) -> str:
        """The machine in words."""
        return f"{self.cpu}, {self.cpus} CPUs, {self.ranks} ranks with {self.threads} threads"

    def write(self, path: str | Path) -> None:
        """Write the rates as JSON."""
        try:
            Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")
        except OSError as error:
            raise PlanError(f"--out: {path} cannot be written: {error.strerror}") from error


def read_rates(path: str | Path) -> MachineRates:
    """Read a machine file. Raises PlanError if it is none, or of another version."""
    again = AGAIN.format(path)
    try:
        found = json.loads(Path(path).read_text())
    except OSError as error:
        raise PlanError(f"--machine: {path} cannot be read: {error.strerror}. {again}") from error
    except ValueError as error:
        raise PlanError(f"--machine: {path} is not JSON ({error}). {again}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise PlanError(f'--machine: {path} has no "format": "{FORMAT}", so it is no machine file. {again}')
    if found.get("version") != VERSION:
        raise PlanError(
            f"--machine: {path} is of version {found.get('version')}, and this zero_full reads version "
            f"{VERSION}. {again}"
        )
    missing = [each.name for each in fields(MachineRates) if each.name not in found]
    if missing:
        raise PlanError(f"--machine: {path} lacks {', '.join(missing)}. {again}")
    rates = (each.name for each in fields(MachineRates) if each.metadata["kind"] == RATE)
    if wrong := [name for name in rates if not _are_rates(found[name])]:
        raise PlanError(
            f"--machine: {path} has values that were not measured, in {', '.join(wrong)}. {again}"
        )
    return MachineRates(**{each.name: found[each.name] for each in fields(MachineRates)})


def _are_rates(value: object) -> bool:
    """Return whether all numbers in a nested structure are finite and not negative, and no list is empty."""
    if isinstance(value, dict):
        return all(map(_are_rates, value.values()))
    if isinstance(value, list):
        return bool(value) and all(map(_are_rates, value))
    return isinstance(value, int | float) and 0 <= value < math.inf


def check_rates(rates: MachineRates, device: str, ranks: int) -> None:
    """Raise PlanError if a fact of the file is not that of this machine and run: see [Note: facts]."""
    here = machine_facts(device, ranks)
    facts = (each for each in fields(MachineRates) if each.metadata["kind"] == FACT)
    differ = {
        each.name: each.metadata["differs"].format(getattr(rates, each.name), here[each.name])
        for each in facts
        if getattr(rates, each.name) != here[each.name]
    }
    if not differ:
        return
    measure = "python -m zero_full doctor --measure --out machine.json"
    if ranks > 1:
        measure = f"torchrun --nproc-per-node {ranks} -m {measure.removeprefix('python -m ')}"
    remedy = f"Pass --device {rates.device}" if "device" in differ else f"Measure here: {measure}"
    raise PlanError(
        f"--machine: the rates were measured {'; '.join(differ.values())}. The forecast would be that of "
        f"another machine or run. {remedy}"
    )


def seconds_at(points: Points, *sizes: float) -> float:
    """Return the seconds at these sizes, interpolated between the nearest points in the logarithm.

    Beyond the largest measured size, seconds grow with the size; below the smallest they stay.
    """
    known = {tuple(point[:-1]): point[-1] for point in points}
    scale, weighted = 1.0, list[list[tuple[float, float]]]()
    for place, size in enumerate(sizes):
        axis = sorted({sizes_known[place] for sizes_known in known})
        scale *= max(1.0, size / axis[-1])
        weighted.append([*_weights(axis, min(max(size, axis[0]), axis[-1]))])
    logarithm = 0.0
    for corner in product(*weighted):
        share = math.prod(weight for _, weight in corner)
        logarithm += share * math.log(known[tuple(size for size, _ in corner)])
    return scale * math.exp(logarithm)


def _weights(axis: Sequence[float], size: float) -> Iterator[tuple[float, float]]:
    """Yield the measured sizes on both sides of `size`, with the weight of each."""
    low = bisect_right(axis, size) - 1
    if axis[low] == size:
        yield axis[low], 1.0
        return
    share = math.log(size / axis[low]) / math.log(axis[low + 1] / axis[low])
    yield axis[low], 1 - share
    yield axis[low + 1], share
