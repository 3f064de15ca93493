"""Run a DeepSpeed script on zero_full with one line changed: the import.

    torchrun --standalone --nproc-per-node 2 -m zero_full.examples.from_deepspeed --dtype bf16

A small convolutional network learns to classify synthetic 32 x 32 pictures of ten kinds. The configuration is
an unchanged DeepSpeed JSON file (`ds_config.json` in this folder).
"""

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import zero_full as deepspeed  # was: import deepspeed

CONFIG = Path(__file__).with_name("ds_config.json")


class Net(nn.Module):
    """Network of two convolutions and three linear layers: 62,006 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures = nn.Sequential(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.answers = nn.Sequential(
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return a score for each of ten patterns."""
        scores: Tensor = self.answers(self.pictures(x).flatten(1))
        return scores


def pictures(count: int = 1600) -> TensorDataset:
    """Make pictures of ten patterns with strong noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (count,), generator=generator)
    return TensorDataset(patterns[labels] + 2 * torch.randn(count, 3, 32, 32, generator=generator), labels)


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    """Return the file's configuration with the precision and stage of the command line."""
    config: dict[str, Any] = json.loads(CONFIG.read_text(encoding="utf-8"))
    config["bf16"]["enabled"] = args.dtype == "bf16"
    config["fp16"]["enabled"] = args.dtype == "fp16"
    config["zero_optimization"]["stage"] = args.stage
    return config


def main() -> int:
    """Train, and print the loss and the accuracy."""
    parser = argparse.ArgumentParser(description="a DeepSpeed script on zero_full")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    deepspeed.init_distributed()
    torch.manual_seed(0)
    net = Net()
    model_engine, _, trainloader, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=pictures(),
        config=configuration(args),
    )
    dtype = next(model_engine.parameters()).dtype
    for epoch in range(args.epochs):
        total, right, seen = 0.0, 0, 0
        for inputs, labels in trainloader:
            inputs = inputs.to(model_engine.device, dtype)
            labels = labels.to(model_engine.device)
            outputs = model_engine(inputs)
            loss = nn.functional.cross_entropy(outputs.float(), labels)
            model_engine.backward(loss)
            model_engine.step()
            total, seen = total + float(loss.detach()) * len(labels), seen + len(labels)
            right += int((outputs.argmax(1) == labels).sum())
        if model_engine.global_rank == 0:
            print(f"epoch {epoch}: loss {total / seen:.4f}, {right / seen:.1%} right", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
