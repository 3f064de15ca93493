"""Where a check runs: a rank of a few processes that were forked for it."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import zero_full
from tests.gpu.day.rows import say
from zero_min.gpt import GPTConfig

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
RELEASES = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}
SHAPES = {  # beside those of the step benchmark
    "tiny": GPTConfig(context=32, layers=2, heads=2, width=32),
    "60M": GPTConfig(vocabulary=512, context=512, layers=20, heads=8, width=512),
}


@dataclass(frozen=True)
class Place:
    """One rank."""

    device: torch.device
    rank: int
    world: int
    tiny: bool  # sizes of a rehearsal

    def say(self, **row: Any) -> None:
        """Print a row, on the first rank."""
        if self.rank == 0:
            say(ranks=self.world, **row)


class Tower(nn.Module):
    """Equal layers, one after the other; deterministic on every device. Returns the loss."""

    def __init__(self, width: int, layers: int, device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, device=device) for _ in range(layers))
        generator = torch.Generator(device).manual_seed(0)
        for p in self.parameters():
            nn.init.normal_(p, std=width**-0.5, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean square of what comes out."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


def engine_of(model: nn.Module, stage: int, precision: str = "bf16", **more: Any) -> Any:
    """An engine that steps by AdamW; `zero_optimization` is merged, other keys are put in."""
    zero = {"stage": stage, "reduce_bucket_size": 5_000_000, **RELEASES, **more.pop("zero_optimization", {})}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": ADAMW,
        "zero_optimization": zero,
        **PRECISIONS[precision],
        **more,
    }
    return zero_full.initialize(model=model, config=config)[0]


def batch_of(place: Place, width: int, step: int, rows: int = 64) -> torch.Tensor:
    """Numbers of this rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + place.rank)
    return torch.randn(rows, width, generator=generator).to(place.device)


def one_step(engine: Any, x: torch.Tensor) -> None:
    """Forward, backward, step."""
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(x.to(dtype)))
    engine.step()


def deterministic() -> None:
    """From now on, in this process: the same bits for the same work."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)  # what differs is found by comparing
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs a sweep for each new tensor
