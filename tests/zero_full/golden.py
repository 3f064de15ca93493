"""The losses of 100 steps, written down: `python -m tests.zero_full.golden` writes them anew.

A change that leaves the maths alone leaves these files alone. On the machine, torch and instruction set
that wrote them a run must repeat them bit for bit; elsewhere other kernels round differently, and it must
come close.
"""

import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import zero_full
from tests.worlds import POOL
from zero_min.gpt import GPT, GPTConfig, batch, load_text

FILE = Path(__file__).with_name("golden_losses.json")
STEPS = 100
WORLD = 2
TINY = GPTConfig(context=16, layers=2, heads=2, width=16)
SHARED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 10}},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale_window": 20}},
}
CONFIGS: dict[str, dict[str, Any]] = {
    f"stage {stage}, {name}": {**SHARED, **keys, "zero_optimization": {"stage": stage}}
    for stage in (0, 1, 2, 3)
    for name, keys in PRECISIONS.items()
} | {
    "stage 2, bf16, 3 micro-batches, small buckets, overlap": {
        **SHARED,
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 3,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000, "overlap_comm": True},
    }
}


def machine() -> str:
    """What rounding depends on."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {platform.machine()}, {processor()}, {capability}"


def processor() -> str:
    """The processor's model."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = {
        line.split(":")[1].strip()
        for line in lines
        if line.startswith(("model name", "cpu family", "model\t"))
    }
    return " ".join(sorted(names)) or platform.processor()


def losses(comm: Any, name: str, steps: int) -> list[float]:
    """This rank's loss in every micro-batch."""
    engine, _, _, _ = zero_full.initialize(model=GPT(TINY), config=CONFIGS[name])
    generator = torch.Generator().manual_seed(comm.rank)
    found = []
    for _ in range(steps * engine.gradient_accumulation_steps()):
        loss = engine(*batch(load_text(), 4, TINY.context, generator))
        found.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    return found


def run(name: str, steps: int = STEPS) -> list[float]:
    """The first rank's losses."""
    first: list[float] = POOL.run(losses, WORLD, name, steps)[0]
    return first


def main() -> int:
    """Write the file."""
    written = {"machine": machine(), "losses": {name: run(name) for name in CONFIGS}}
    FILE.write_text(json.dumps(written, indent=1) + "\n")
    POOL.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
