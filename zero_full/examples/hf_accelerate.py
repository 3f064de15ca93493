"""A program of Hugging Face's Accelerate that does not import zero_full.

    python -m zero_full.examples.hf_accelerate
    torchrun --standalone --nproc-per-node 2 -m zero_full as-deepspeed \\
        -m zero_full.examples.hf_accelerate --stage 3

The first command trains in one process, the second at stage 3 on two ranks. Both print the same losses.
"""

import argparse
import sys
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch import Tensor, nn
from torch.utils.data import DataLoader

WORDS, BATCH, STEPS, ACCUMULATED = 50, 8, 8, 2  # BATCH: rows of a micro-batch, on all ranks together


class NextWord(nn.Module):
    """Model that predicts the next of 50 words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.think = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, WORDS))

    def forward(self, words: Tensor) -> Tensor:
        """Return the loss."""
        return nn.functional.cross_entropy(self.think(self.words(words)), (7 * words + 3) % WORDS)


def main() -> int:
    """Train, and print the losses on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, help="the ZeRO stage; default: none, without DeepSpeed's plugin")
    options = parser.parse_args()
    plugin = None
    if options.stage is not None:
        plugin = DeepSpeedPlugin(
            zero_stage=options.stage,
            gradient_accumulation_steps=ACCUMULATED,
            gradient_clipping=1.0,
            zero3_init_flag=False,
        )
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=ACCUMULATED)
    torch.manual_seed(0)
    model = NextWord()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    rows: Any = (torch.arange(BATCH * ACCUMULATED * STEPS) % WORDS).tolist()
    loader = DataLoader[Any](rows, batch_size=BATCH // accelerator.num_processes)
    model, adam, loader = accelerator.prepare(model, adam, loader)
    losses = []
    for words in loader:
        with accelerator.accumulate(model):
            loss = model(words)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            adam.zero_grad()
        losses.append(float(accelerator.gather(loss.detach()).mean()))
    accelerator.print("losses", *(f"{loss:.4f}" for loss in losses))
    return 0


if __name__ == "__main__":
    sys.exit(main())
