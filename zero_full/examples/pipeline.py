"""Train a list of layers as a pipeline, and go on with another number of stages.

    torchrun --standalone --nproc-per-node 4 -m zero_full.examples.pipeline --out run --stages 2 --steps 6
    torchrun --standalone --nproc-per-node 4 -m zero_full.examples.pipeline --out run --stages 4 --steps 12

The first run has 2 pipelines of 2 stages, the second one pipeline of 4. A step is 16 samples in both, so the
losses equal those of an uninterrupted run, except for rounding. The embedding and the last layer share their
weights, on the first and the last stage.

    torchrun --standalone --nproc-per-node 2 -m zero_full.examples.pipeline --out other --stages 2 \
        --stages-per-rank 2 --schedule interleaved_1f1b

gives each rank two stages, so that a rank waits less.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import zero_full
from zero_full import LayerSpec, PipelineModule, TiedLayerSpec

WORDS, LENGTH, WIDTH, BLOCKS = 32, 8, 16, 6


def config(schedule: str) -> dict[str, Any]:
    """Return the configuration."""
    return {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 1},
        "pipeline": {"schedule": schedule},
    }


class MixBlock(nn.Module):
    """A layer that mixes each position with the mean of all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the inputs plus this layer's output."""
        normed = self.norm(x)
        around = torch.cat([normed, normed.mean(1, keepdim=True).expand_as(normed)], -1)
        return x + torch.tanh(self.mix(around))


def to_logits(embedding: nn.Embedding, x: Tensor) -> Tensor:
    """Return a score for each word: the last layer, with the embedding's weights."""
    return x @ embedding.weight.t()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss over all positions."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def layers() -> list[Any]:
    """Return the layers. Each rank builds those of its stages only."""
    return [
        TiedLayerSpec("embedding", nn.Embedding, WORDS, WIDTH),
        *(LayerSpec(MixBlock, WIDTH) for _ in range(BLOCKS)),
        TiedLayerSpec("embedding", nn.Embedding, WORDS, WIDTH, forward_fn=to_logits),
    ]


def samples(count: int = 128) -> TensorDataset:
    """Make random sequences of words; the label of each word is the word before it."""
    words = torch.randint(0, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    return TensorDataset(words, words.roll(1, 1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Resume from a checkpoint, or start; train up to a number of steps, and save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder that all hosts share")
    parser.add_argument("--stages", type=int, default=2, help="ranks of a pipeline")
    parser.add_argument("--stages-per-rank", type=int, default=1)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")

    model = PipelineModule(
        layers(),
        num_stages=args.stages,
        loss_fn=loss_of,
        partition_method="type:MixBlock",
        stages_per_rank=args.stages_per_rank,
        placement="v" if args.schedule == "zbv" else "loop",
        base_seed=0,
    )
    engine = zero_full.initialize(model=model, config=config(args.schedule), training_data=samples())[0]
    engine.load_checkpoint(args.out)  # (None, None) without a checkpoint
    while engine.global_steps < args.steps:
        loss = engine.train_batch()
        if engine.global_rank == 0:
            print(f"step {engine.global_steps}: loss {loss:.5f}, {args.stages} stages", flush=True)
    engine.save_checkpoint(args.out)
    engine.destroy()
    return 0


if __name__ == "__main__":
    sys.exit(main())
