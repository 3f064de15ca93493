"""Tensor parallelism under ZeRO beside torch's FSDP2 over the same layers: a topic of `engines.py`.

Four ranks, a mesh of 2 data and 2 tensor-parallel ranks, fp32. Every row trains the same blocks, cut by
torch's `parallelize_module`, with torch's AdamW: FSDP2 (`fully_shard`) with and without a reshard after
forward, and zero_full at stages 3 and 2.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero_full
from tests.bench import interleave
from tests.bench.interleave import Ratio, Series

DATA, TENSOR = 2, 2
ROUNDS, STEPS = 7, 4
SIZES = (256, 4, 16)  # width, blocks, samples
PAIRS = {"zero_full 2": "FSDP2, kept after forward", "zero_full 3": "FSDP2"}
NAMES = [*PAIRS, *PAIRS.values()]


class Block(nn.Module):
    """An MLP beside a residual: `up` is cut by rows, `down` by columns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model_of(width: int, blocks: int, mesh: Any) -> nn.Sequential:
    """Blocks that are cut over the mesh's dimension `tensor`."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    plan: dict[str, Any] = {f"{place}.up": ColwiseParallel() for place in range(blocks)}
    plan |= {f"{place}.down": RowwiseParallel() for place in range(blocks)}
    parallelize_module(model, mesh["tensor"], plan)
    return model


def by_fsdp2(model: nn.Sequential, mesh: Any, x: Tensor, reshards: bool) -> Callable[[], None]:
    """A function that trains one step."""
    for block in model:
        fully_shard(block, mesh=mesh["data"], reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh["data"], reshard_after_forward=reshards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def by_zero_full(model: nn.Sequential, mesh: Any, x: Tensor, stage: int) -> Callable[[], None]:
    """The same at a stage, without clipping, as above."""
    config = {
        "train_micro_batch_size_per_gpu": len(x),
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
    }
    engine = zero_full.initialize(
        model=model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        config=config,
        mesh=mesh,
    )[0]

    def train() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    return train


def measure(comm: Any, sizes: tuple[int, int, int], rounds: int, steps: int) -> dict[str, Series]:
    """Seconds of steps by row and round on this rank."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (DATA, TENSOR), mesh_dim_names=("data", "tensor"))
    width, blocks, samples = sizes
    made = torch.Generator().manual_seed(comm.rank // TENSOR)
    x, trains = torch.randn(samples, width, generator=made), dict[str, Callable[[], None]]()
    for stage, (ours, theirs) in zip((2, 3), PAIRS.items(), strict=True):
        trains[ours] = by_zero_full(model_of(width, blocks, mesh), mesh, x, stage)
        trains[theirs] = by_fsdp2(model_of(width, blocks, mesh), mesh, x, stage == 3)

    def visit(name: str, number: int) -> list[float]:
        times = []
        for _ in range(steps + 1):
            dist.barrier()
            start = time.perf_counter()
            trains[name]()
            times.append(time.perf_counter() - start)
        return times[1:]

    return interleave.run(NAMES, rounds, visit)


def report(run: Any, small: bool) -> tuple[list[Ratio], dict[str, Any]]:
    """Measure, print a table, and return ratios and numbers. `run`: that of a pool of ranks."""
    given = ((8, 1, 2), 1, 1) if small else (SIZES, ROUNDS, STEPS)
    ranks = run(measure, DATA * TENSOR, *given, limit=600, collective=60)
    steps = {name: interleave.slowest([each[name] for each in ranks]) for name in NAMES}
    rows = [interleave.cells(name, series) for name, series in steps.items()]
    print("\n" + interleave.table([f"a mesh of {DATA} x {TENSOR}, fp32", "ms a step", "range"], rows))
    ratios = [interleave.ratio(f"{o} / {t}, 2 x 2", steps[o], steps[t]) for o, t in PAIRS.items()]
    return ratios, {"sizes": given[0]}
