"""One rank of `compare.py`. It imports `zero_full` from the directory that it is started in.

It builds all rows, prints `ready`, and then reads the name of a row from stdin, trains it for a few steps and
prints their seconds, again and again. Between rows it uses no processor.
"""

import gc
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Row:
    """A model and a configuration."""

    stage: int
    dtype: str = "fp32"
    blocks: int = 6
    width: int = 468  # 10.5M parameters in six blocks
    tokens: int = 64
    zero: dict[str, Any] = field(default_factory=dict)


SMALL = {"blocks": 100, "width": 16, "tokens": 4}  # 400 tensors: the time goes into Python
RELEASED = {"stage3_param_persistence_threshold": 0}
ROWS = {
    "stage1": Row(1),
    "stage2": Row(2),
    "stage3": Row(3),
    "stage2-bf16": Row(2, "bf16", tokens=16),
    "stage3-bf16": Row(3, "bf16", tokens=16),
    "stage2-host": Row(2, zero={"offload_optimizer": {"device": "cpu"}}),
    "stage2-small": Row(2, **SMALL),
    "stage3-small": Row(3, **SMALL, zero=RELEASED),
}


class Block(nn.Module):
    """Two layers beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + self.down(torch.relu(self.up(x)))


class Training:
    """A row's engine and batch."""

    def __init__(self, row: Row, rank: int) -> None:
        import zero_full

        torch.manual_seed(0)
        model = nn.Sequential(*[Block(row.width) for _ in range(row.blocks)])
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": row.tokens,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": row.stage, "reduce_bucket_size": 5_000_000, **row.zero},
        }
        if row.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        self.engine = zero_full.initialize(model=model, config=config)[0]
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[row.dtype]
        generator = torch.Generator().manual_seed(rank)
        self.x = torch.randn(row.tokens, row.width, generator=generator).to(dtype)

    def step(self) -> float:
        """Seconds of a training step."""
        dist.barrier()
        start = time.perf_counter()
        self.engine.backward(self.engine(self.x).float().square().mean())
        self.engine.step()
        return time.perf_counter() - start


def main(rank: int, world: int, store: str, steps: int, names: list[str]) -> None:
    """Serve until stdin ends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    trainings = {name: Training(ROWS[name], rank) for name in names}
    for training in trainings.values():
        training.step()
    print("ready", flush=True)
    for line in sys.stdin:
        training = trainings[line.strip()]
        training.step()
        gc.collect()
        gc.disable()
        print(json.dumps([training.step() for _ in range(steps)]), flush=True)
        gc.enable()
    dist.destroy_process_group()
