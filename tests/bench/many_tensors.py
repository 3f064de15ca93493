"""How the number of parameters changes a training step of a model that stays equally large.

    python -m tests.bench.many_tensors
    python -m tests.bench.many_tensors --counts 40 400 --rounds 9

Four million elements in 40, 400 or 4,000 square matrices, each a module of its own, on two ranks. "3, all
released" keeps no small parameter whole and gathers again for backward, so that every module is gathered
twice a step. FSDP2 gets a unit for each module, and is left out above 400. "initialize" is the time until the
row is ready. The last line is JSON.
"""

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zero_full
from tests.bench import interleave
from tests.bench.interleave import Ratio, Series
from tests.worlds import POOL

RANKS, ELEMENTS, STEPS = 2, 4_000_000, 3
COUNTS = (40, 400, 4_000)
FSDP2_LIMIT = 400
LEARNING_RATE = 1e-4
RELEASED = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
STAGES: dict[str, dict[str, Any]] = {
    "zero_full 1": {"stage": 1},
    "zero_full 2": {"stage": 2},
    "zero_full 3": {"stage": 3},
    "zero_full 3, all released": {"stage": 3, **RELEASED},
}
DDP, FSDP2 = "DDP", "FSDP2"
TARGETS = {"zero_full 1": 1.0, "zero_full 2": 1.0, "zero_full 3, all released": 1.5}  # of DDP's step
READY_S = 1.0  # aim for initialize


class Layer(nn.Module):
    """One square matrix, beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) * 0.1 / width)

    def forward(self, x: Tensor) -> Tensor:
        """A step of a tower."""
        return x + F.linear(x, self.weight)


def tower(count: int, elements: int) -> nn.Sequential:
    """`count` layers with so many elements together."""
    torch.manual_seed(0)
    width = isqrt(elements // count)
    return nn.Sequential(*[Layer(width) for _ in range(count)])


@dataclass
class Row:
    """A model that is ready to be trained."""

    step: Callable[[Tensor], Tensor]
    seconds: float  # until it was ready


def build(name: str, count: int, elements: int) -> Row:
    """Make a row, and measure how long that takes without the model."""
    model = tower(count, elements)
    dist.barrier()
    start = time.perf_counter()
    if name in STAGES:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
            "zero_optimization": STAGES[name],
        }
        engine, *_ = zero_full.initialize(model=model, config=config)

        def step(x: Tensor) -> Tensor:
            loss: Tensor = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return Row(step, time.perf_counter() - start)
    wrapped: nn.Module = model
    if name == DDP:
        wrapped = DistributedDataParallel(model)
    else:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=LEARNING_RATE, fused=True)

    def plain(x: Tensor) -> Tensor:
        loss: Tensor = wrapped(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Row(plain, time.perf_counter() - start)


def measure(
    comm: Any, count: int, elements: int, names: list[str], rounds: int
) -> tuple[dict[str, Series], dict[str, float], dict[str, float]]:
    """Seconds of steps by row and round, seconds until a row is ready, and last losses."""
    torch.set_num_threads(1)
    rows = {name: build(name, count, elements) for name in names}
    torch.manual_seed(dist.get_rank())
    x = torch.randn(32, isqrt(elements // count))
    losses: dict[str, float] = {}

    def visit(name: str, number: int) -> list[float]:
        rows[name].step(x)
        found = []
        for _ in range(STEPS):
            dist.barrier()
            start = time.perf_counter()
            loss = rows[name].step(x)
            found.append(time.perf_counter() - start)
        losses[name] = loss.item()
        return found

    gc.disable()
    series = interleave.run(names, rounds, visit)
    gc.enable()
    return series, {name: row.seconds for name, row in rows.items()}, losses


def tables(count: int, elements: int, rounds: int) -> list[Ratio]:
    """Print the table of one number of tensors; return the ratios."""
    names = [DDP, *([FSDP2] if count <= FSDP2_LIMIT else []), *STAGES]
    ranks = POOL.run(measure, RANKS, count, elements, names, rounds, limit=600, collective=120)
    series = {name: interleave.slowest([rank[0][name] for rank in ranks]) for name in names}
    ready = {name: max(rank[1][name] for rank in ranks) for name in names}
    ratios, rows = [], []
    for name in names:
        ratio = interleave.ratio(
            f"{count} tensors: {name} / DDP", series[name], series[DDP], TARGETS.get(name)
        )
        differs = abs(ranks[0][2][name] - ranks[0][2][DDP])
        rows.append(
            [
                *interleave.cells(name, series[name]),
                f"{ratio.value:.2f}",
                f"{ready[name]:.2f}",
                f"{differs:.0e}",
            ]
        )
        if name != DDP:
            ratios.append(ratio)
    ready_s = [[ready[name]] for name in STAGES]
    aims = [[READY_S] for _ in STAGES]
    ratios.append(interleave.ratio(f"{count} tensors: initialize / {READY_S:.0f} s", ready_s, aims, 1.0))
    head = ["row", "step, ms", "range", "/ DDP", "initialize, s", "loss differs by"]
    print(f"\n## {elements / 1e6:.0f}M fp32 in {count} tensors, {RANKS} ranks\n")
    print(interleave.table(head, rows), flush=True)
    return ratios


def main() -> None:
    """Print a table for each number of tensors, the ratios, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    print(interleave.heading())
    ratios = [ratio for count in asked.counts for ratio in tables(count, asked.elements, asked.rounds)]
    print("\n" + interleave.table(interleave.RATIO_HEAD, [r.cells() for r in ratios]))
    print("\n" + interleave.json_line(ratios, elements=asked.elements, rounds=asked.rounds, steps=STEPS))


if __name__ == "__main__":
    main()
