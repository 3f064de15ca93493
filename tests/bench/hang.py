"""A run that goes wrong, recorded for the site: one of three ranks leaves out a backward pass, and all hang.

torchrun --standalone --nproc-per-node 3 -m tests.bench.hang site/records/recording_hang.json
"""

import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import zero_full

STEPS, WIDTH, LAYERS = 4, 256, 4
BAD = (4, 1, 2)  # the step, the micro-batch and the rank that does not like its batch
CONFIG = {
    "train_micro_batch_size_per_gpu": 32,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": WIDTH * WIDTH},
}


class Model(nn.Module):
    """A few layers, each with a bucket for its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def main(path: Path) -> None:
    """Train until it fails; the recording is there then."""
    torch.set_num_threads(1)
    engine = zero_full.initialize(model=Model(), config=CONFIG)[0]
    rank = torch.distributed.get_rank()
    engine.record(path, steps=1)
    for step in range(1, STEPS + 1):
        for micro in (1, 2):
            loss = engine(torch.randn(32, WIDTH))
            if (step, micro, rank) != BAD:
                engine.backward(loss)
            engine.step()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        main(Path(sys.argv[1]))
    except RuntimeError as error:
        sys.exit(f"as it should: {error}")
