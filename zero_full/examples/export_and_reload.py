"""Train a sharded model, export its weights, and load them in plain PyTorch without zero_full.

    torchrun --standalone --nproc-per-node 2 -m zero_full.examples.export_and_reload --out weights
    python -m zero_full.examples.export_and_reload --reload weights

The first command prints the trained model's loss. The second loads the files in plain PyTorch and prints the
same loss.
"""

import argparse
import sys
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 32,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
}


class Next(nn.Module):
    """Model that predicts the next of 50 words, with tied input and output embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.think = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.out = nn.Linear(32, 50)
        self.out.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        """Return the loss."""
        scores = self.out(self.think(self.words(words)))
        return nn.functional.cross_entropy(scores, (7 * words + 3) % 50)


def sentence(number: int) -> Tensor:
    """Return 32 random words."""
    return torch.randint(50, (32,), generator=torch.Generator().manual_seed(number))


def train(out: Path) -> float | None:
    """Train ten steps at stage 3 and export the weights. Returns the final loss on rank 0, else None."""
    import zero_full
    from zero_full.checkpoint import save_weights

    zero_full.init_distributed()
    torch.manual_seed(0)
    engine, optimizer, _, _ = zero_full.initialize(model=Next(), config=CONFIG)
    for step in range(10):
        engine.backward(engine(sentence(100 * step + engine.global_rank).to(engine.device)))
        engine.step()
    save_weights(engine.module, optimizer, out)
    with torch.no_grad():
        loss = float(engine(sentence(0).to(engine.device)))
    return loss if engine.global_rank == 0 else None


def reload(folder: Path) -> float:
    """Load the weights in plain PyTorch, and return the loss of the same sentence."""
    model = Next()
    safetensors.torch.load_model(model, folder / "model.safetensors")
    with torch.no_grad():
        return float(model(sentence(0)))


def main() -> int:
    """Train or reload, and print the loss."""
    parser = argparse.ArgumentParser(description="train sharded, export, reload in plain PyTorch")
    parser.add_argument(
        "--out", type=Path, default=Path("weights"), metavar="DIR", help="folder of the exported weights"
    )
    parser.add_argument("--reload", type=Path, metavar="DIR", help="read this folder instead of training")
    args = parser.parse_args()
    loss = reload(args.reload) if args.reload else train(args.out)
    if loss is not None:
        print(f"loss {loss:.6f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
