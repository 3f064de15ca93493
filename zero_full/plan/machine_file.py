"""The rates of a machine that `doctor --measure --out` has measured, and the file that holds them.

All times are seconds of one rank while every rank of the machine does the same. A list of points has sizes
and seconds; seconds between two points are interpolated in the logarithm of both.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path

from zero_full.errors import PlanError

FORMAT = "zero_full machine rates"
VERSION = 1
AGAIN = "Measure again: python -m zero_full doctor --measure --out {}"
Points = Sequence[Sequence[float]]  # sizes, and the seconds last


@dataclass(frozen=True)
class MachineRates:
    """What a step is forecast from: see `measure/rates.py` for how each was measured."""

    date: str
    machine: str  # in words
    device: str  # "cpu" or "cuda"
    ranks: int  # that measured at once
    torch: str
    products: Mapping[str, Points]  # by dtype and layout: rows, inner size, columns, seconds
    attention: Mapping[str, Points]  # by dtype and direction: tokens, seconds of one head of `HEAD` elements
    passes: Mapping[str, Points]  # by kind and dtype: bytes read and written by an operation, seconds
    collectives: Mapping[str, Points]  # by transport, kind and dtype: bytes of the whole buffer, seconds
    adam: Mapping[str, float]  # by dtypes of master, gradient and copy: seconds of an element
    operations: Mapping[str, float]  # by direction: seconds of an operation besides its work
    # By stage: seconds in Python of a step, and of each parameter. "pipeline": of a step and each operation.
    runtime: Mapping[str, Sequence[float]]
    hidden: float  # share of a collective that disappears behind computation with overlap_comm
    format: str = FORMAT
    version: int = VERSION

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
    return MachineRates(**{each.name: found[each.name] for each in fields(MachineRates)})


def check_rates(rates: MachineRates, device: str, ranks: int) -> None:
    """Raise PlanError if the rates were measured for another device type or number of ranks."""
    if rates.device != device:
        raise PlanError(
            f"--machine: the rates were measured on device {rates.device}, and the plan is for {device}. "
            f"Pass --device {rates.device}, or measure on {device}"
        )
    if rates.ranks != ranks:
        raise PlanError(
            f"--machine: the rates were measured by {rates.ranks} ranks at once, and the plan has {ranks}, "
            "which share the machine's cores and memory in another way. Measure with as many: torchrun "
            f"--nproc-per-node {ranks} -m zero_full doctor --measure --out machine.json"
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
