"""Train with Ray Train, and resume from the last checkpoint with the workers that are left.

    python -m zero_full.examples.ray_train --out run --workers 2
    python -m zero_full.examples.ray_train --out run --workers 1 2

zero_full needs no code for Ray: `TorchTrainer` sets what torchrun sets, and initializes torch.distributed.
With two numbers Ray starts as many workers between them as there are CPUs for. After a failure, and where
resources for more workers have come, it starts the function again, which resumes from the last checkpoint, at
any number of workers. A step is 12 samples with 1, 2, 3 or 4 workers, so the losses equal those of an
uninterrupted run, except for rounding.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

import zero_full
from zero_full.examples.resume import CONFIG, mean_of_ranks, samples


def train(options: dict[str, Any]) -> None:
    """Train on one worker: resume from the last checkpoint in `out`, or start."""
    out = Path(options["out"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    engine, _, loader, _ = zero_full.initialize(model=model, config=CONFIG, training_data=samples())
    engine.load_checkpoint(out / "checkpoints")  # (None, None) without a checkpoint
    while engine.global_steps < options["steps"]:
        for inputs, wanted in loader:
            loss = nn.functional.mse_loss(engine(inputs.to(engine.device)), wanted.to(engine.device))
            engine.backward(loss)
            shown = mean_of_ranks(loss)
            engine.step()
            row = {"step": engine.global_steps, "loss": shown, "workers": engine.world_size}
            if engine.global_rank == 0:
                with (out / "losses.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
            if engine.global_steps % options["save_every"] == 0:
                engine.save_checkpoint(out / "checkpoints")
            ray.train.report(row)
            time.sleep(options["pause"])
            if engine.global_steps == options["steps"]:
                break
    engine.destroy()


def main() -> int:
    """Start the workers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder that all hosts share")
    parser.add_argument("--workers", type=int, nargs="+", default=[2], help="a number, or the least and most")
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument("--save-every", type=int, default=5, help="steps")
    parser.add_argument("--use-gpu", action="store_true")
    parser.add_argument(
        "--look-every", type=float, default=60.0, help="seconds between looks for resources of more workers"
    )
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds after each step, to leave time to kill"
    )
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    workers: Any = args.workers[0] if len(args.workers) == 1 else tuple(args.workers)
    trainer = TorchTrainer(
        train,
        train_loop_config={**vars(args), "out": str(out)},
        torch_config=TorchConfig(backend="nccl" if args.use_gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=args.use_gpu, elastic_resize_monitor_interval_s=args.look_every
        ),
        run_config=RunConfig(storage_path=str(out / "ray"), failure_config=FailureConfig(max_failures=2)),
    )
    trainer.fit()
    return 0


if __name__ == "__main__":
    sys.exit(main())
