"""Tables of the papers' numbers, computed by zero_min/formula.py when the site is built."""

import importlib.util
import sys
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from types import ModuleType

from places import ROOT

PSI = 7_500_000_000  # the ZeRO paper's example
RANKS = (1, 4, 16, 64, 256, 1024)
SMALL = (1, 2, 4, 8, 64)


@cache
def _formula() -> ModuleType:
    """The file by itself: importing zero_min would import torch as well, which the tables do not need."""
    spec = importlib.util.spec_from_file_location("formula", ROOT / "zero_min" / "formula.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["formula"] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


def _table(head: list[str], rows: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows]) + "\n"


def _number(value: float) -> str:
    """Three digits, halves rounded up, as papers do."""
    exact = Decimal(str(value))
    digits = exact.quantize(Decimal(1).scaleb(exact.adjusted() - 2), ROUND_HALF_UP)
    return f"{digits.normalize():f}"


def memory() -> str:
    """GB a rank holds for the paper's model in its mixed precision."""
    f = _formula()
    rows = []
    for ranks in RANKS:
        held = [sum(f.held(stage, [PSI], ranks, f.MIXED).values()) / 1e9 for stage in range(4)]
        rows.append([f"{ranks:,}", *(_number(gigabytes) for gigabytes in held)])
    return _table(["ranks", "stage 0", "stage 1", "stage 2", "stage 3"], rows)


def widths() -> str:
    """Bytes per parameter under the three ways to count."""
    f = _formula()
    kinds = {"fp32": f.FP32, "the paper's mixed precision": f.MIXED, "bf16, gradients add up in fp32": f.BF16}
    rows = [
        [name, str(b.parameter), str(b.gradient), str(b.state), str(b.parameter + b.gradient + b.state)]
        for name, b in kinds.items()
    ]
    return _table(["training in", "parameter", "gradient", "master and Adam's averages", "together"], rows)


def traffic() -> str:
    """Elements a rank sends in a step, in multiples of the model, for four ranks."""
    f = _formula()
    one = f.Bytes(1, 1, 0)
    rows = []
    for stage in range(4):
        sent = [f.sent(stage, [64], 4, m, one) / 4 / 64 for m in (1, 2, 4)]
        rows.append([f"stage {stage}", *(f"{x:.2f}" for x in sent)])
    return _table(["", "m = 1", "m = 2", "m = 4"], rows)


def offload() -> str:
    """Bytes that cross between device and host in a step of offloading, a parameter."""
    f = _formula()
    psi = 1 << 20
    down, up = (moved / psi for moved in f.moved([psi], 1))
    row = ["bytes per parameter", f"{down:g}", f"{up:g}", f"{down + up:g}"]
    return _table(["", "down", "up", "together"], [row])


def one_bit() -> str:
    """How much smaller a compressed round is than an exact one."""
    f = _formula()
    sizes = [1 << 20]
    rows = []
    for ranks in (2, 4, 8, 64):
        small = f.compressed_round(sizes, ranks)
        exact = f.sent(0, sizes, ranks)
        rows.append(
            [
                f"{ranks}",
                f"{small / ranks / sizes[0]:.4f}",
                f"{exact / ranks / sizes[0]:.3f}",
                f"{exact / small:.1f}",
            ]
        )
    return _table(
        ["ranks", "one bit a value: bytes per parameter", "fp32 all-reduce: bytes per parameter", "ratio"],
        rows,
    )


def rounds() -> str:
    """What 0/1 Adam's schedule does in runs of several lengths, before the variance is frozen."""
    f = _formula()
    rows = []
    for steps in (1_000, 10_000, 100_000):
        made = f.zero_one_rounds(steps, kappa=16, freeze_step=steps, local_kappa=1, local_clip=1)
        rows.append([f"{steps:,}", f"{made['exact']:,}", f"{made['one bit']:,}"])
    return _table(["steps", "exact averages", "averages of one bit"], rows)


def one_bit_adam() -> str:
    """1-bit Adam's saving over fp16 for several lengths of its warm-up."""
    rows = [[f"{w:.0%}", f"{1 / (w + (1 - w) / 16):.2f}"] for w in (0.15, 0.2, 0.25)]
    return _table(["part of the steps that warm up", "times fewer bytes than fp16"], rows)


def held_small() -> str:
    """Bytes per parameter in fp32 for few ranks: what the lessons measure."""
    f = _formula()
    psi = 1 << 20
    rows = [
        [f"stage {stage}", *(f"{sum(f.held(stage, [psi], n).values()) / psi:g}" for n in SMALL)]
        for stage in range(4)
    ]
    return _table(["", *(f"{n} ranks" if n > 1 else "1 rank" for n in SMALL)], rows)


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table
    for table in (memory, widths, traffic, offload, one_bit, rounds, one_bit_adam, held_small)
}
