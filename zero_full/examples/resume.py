"""Train, save and stop on a signal, and resume with any number of ranks.

    torchrun --standalone --nproc-per-node 3 -m zero_full.examples.resume --out run
    torchrun --standalone --nproc-per-node 2 -m zero_full.examples.resume --out run --stage 1

Stop the first run in any way. On Ctrl-C or `kill` it finishes its step, saves and exits. After `kill -9` its
last checkpoint remains. The second run resumes from it, even in the middle of an epoch. A step is 12 samples
with any number of ranks, so the losses equal those of an uninterrupted run, except for rounding.

    torchrun --standalone --nproc-per-node 2 -m zero_full.examples.resume --out run --config ds.json

reads your own configuration, to try another optimizer, precision or stage.
"""

import argparse
import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import zero_full

CONFIG: dict[str, Any] = {
    "train_batch_size": 12,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 20}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "checkpoint": {"keep_last": 2},
}


def samples(count: int = 132) -> TensorDataset:
    """Make random inputs and the outputs of a fixed random network, as targets."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 16, generator=generator)
    return TensorDataset(inputs, torch.tanh(inputs @ torch.randn(16, 4, generator=generator)))


def mean_of_ranks(loss: Tensor) -> float:
    """Return the mean loss of all ranks, for the log."""
    total = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return float(total)


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    """Return the file's configuration or the default one, with the stage of the command line if given."""
    config: dict[str, Any] = json.loads(args.config.read_text(encoding="utf-8")) if args.config else CONFIG
    stage = {} if args.stage is None else {"stage": args.stage}
    return config | {"zero_optimization": config.get("zero_optimization", {}) | stage}


def main() -> int:
    """Resume from a checkpoint, or start."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder that all hosts share")
    parser.add_argument("--config", type=Path, help="a JSON file")
    parser.add_argument("--stage", type=int, help="default: the configuration's, or 3")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=5, help="steps")
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds after each step, to leave time for a kill"
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")

    zero_full.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    engine, _, loader, _ = zero_full.initialize(
        model=model, config=configuration(args), training_data=samples()
    )
    dtype = next(engine.parameters()).dtype

    progress: dict[str, Any] = {"epoch": 0}
    _, saved = engine.load_checkpoint(args.out)  # (None, None) without a checkpoint
    progress |= saved or {}
    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    engine.on_signal(args.out, signals, client_state=progress)
    while progress["epoch"] < args.epochs:
        for inputs, wanted in loader:  # continues after the last batch before the save
            made = engine(inputs.to(engine.device, dtype))
            loss = nn.functional.mse_loss(made.float(), wanted.to(engine.device))
            engine.backward(loss)
            shown = mean_of_ranks(loss)
            if engine.global_rank == 0:
                print(f"step {engine.global_steps}: loss {shown:.6f}, {engine.world_size} ranks", flush=True)
            engine.step()  # after a signal, it saves and exits
            if engine.global_steps % args.save_every == 0:
                engine.save_checkpoint(args.out, client_state=progress)
            time.sleep(args.pause)
        progress["epoch"] += 1
    engine.destroy()
    return 0


if __name__ == "__main__":
    sys.exit(main())
