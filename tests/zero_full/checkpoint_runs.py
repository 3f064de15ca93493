"""Runs that are saved and loaded: a model with everything in it that a checkpoint could forget."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero_full
from tests.zero_full.runs import config

WIDTH = 12


class Rich(nn.Module):
    """Tied, frozen, scalar, empty and unused parameters; buffers that each rank has its own of; dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, 7)
        self.frozen = nn.Linear(7, 7)
        self.seen = nn.BatchNorm1d(7)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(7, WIDTH, bias=False)
        self.tied = nn.Linear(7, WIDTH, bias=False)
        self.tied.weight = self.last.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        hidden = self.drop(self.seen(torch.tanh(self.frozen(self.first(x)))))
        return ((self.last(hidden) + self.tied(hidden) - x) * self.scale).float().square().mean()


OPTIMIZERS = {
    "AdamW": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
    "SGD": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
    "Lamb": {"type": "Lamb", "params": {"lr": 0.01}},
    "Muon": {"type": "Muon", "params": {"lr": 0.01, "weight_decay": 0.1}},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}},
}


@dataclass(frozen=True)
class Layout:
    """How a run is laid out: what a checkpoint must not depend on."""

    world: int = 2
    stage: int = 2
    precision: str = "fp32"
    host: bool = False
    bucket: int = 100
    optimizer: str = "AdamW"
    more: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)

    def __str__(self) -> str:
        where = "host, " if self.host else ""
        return f"{self.world}x stage {self.stage}, {self.precision}, {where}{self.bucket}, {self.optimizer}"

    def keys(self) -> dict[str, Any]:
        """The configuration."""
        zero: dict[str, Any] = {"reduce_bucket_size": self.bucket, "stage3_param_persistence_threshold": 0}
        if self.host:
            zero["offload_optimizer"] = {"device": "cpu"}
        schedule = {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.005, "warmup_max_lr": 0.01, "warmup_num_steps": 9},
        }
        return config(
            self.stage,
            optimizer=OPTIMIZERS[self.optimizer],
            scheduler=schedule,
            zero_optimization=zero,
            **PRECISIONS[self.precision],
            **self.more,
        )


def engine_of(layout: Layout, model: type[nn.Module] = Rich) -> zero_full.Engine:
    """A new one."""
    return zero_full.initialize(model=model(), config=layout.keys())[0]


def batch(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Each rank's own."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, WIDTH, generator=generator).to(dtype)


def go(engine: zero_full.Engine, rank: int, steps: range) -> list[float]:
    """Take steps; the losses."""
    losses = []
    dtype = engine.module.first.weight.dtype
    for step in steps:
        loss = engine(batch(step, rank, dtype))
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    return losses


def everything(engine: zero_full.Engine) -> dict[str, Any]:
    """What there is, whole, from the ranks' parts. Every rank must call this."""
    found: dict[str, Any] = {}
    for name, param in engine.module.named_parameters():
        if not param.requires_grad or not param.numel():
            continue
        found[name] = zero_full.safe_get_full_fp32_param(param)
        keys = [k for p, s in engine.optimizer.state.items() if p is param for k in s]
        known = sorted(
            {k for each in engine.optimizer.communicators.dense.gather_objects(keys, "keys") for k in each}
        )
        for key in known:
            found[f"{key} of {name}"] = zero_full.safe_get_full_optimizer_state(param, key)
    whole = engine.module_state_dict()
    found |= {name: whole[name] for name in whole if "frozen" in name or "seen.num" in name}
    found["options"] = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
    found["schedule"] = engine.lr_scheduler.state_dict()
    found["counters"] = (engine.global_steps, engine.micro_steps, engine.skipped_steps)
    return {k: v.cpu() if isinstance(v, Tensor) else v for k, v in found.items()}


def saved_by(comm: Any, layout: Layout, folder: Path) -> tuple[dict[str, Any], list[float]]:
    """Two steps, a save, two more: what there was when it was saved, and the losses that follow."""
    torch.manual_seed(comm.rank)
    engine = engine_of(layout)
    go(engine, comm.rank, range(2))
    engine.save_checkpoint(folder, client_state={"mine": [1, (2, "three")], "tensor": torch.arange(3)})
    held = everything(engine)
    torch.manual_seed(comm.rank + 50)
    engine.load_checkpoint(folder)  # to be where the save was: `everything` draws no numbers, but who knows
    losses = go(engine, comm.rank, range(2, 4))
    engine.destroy()
    return held, losses


def loaded_by(
    comm: Any, layout: Layout, folder: Path, again: Path | None = None
) -> tuple[dict[str, Any], list[float]]:
    """A fresh run that goes on from there; with `again`, it is saved there, too."""
    engine = engine_of(layout)
    path, client = engine.load_checkpoint(folder)
    assert path is not None and client is not None and client["mine"] == [1, (2, "three")], client
    held = everything(engine)
    if again is not None:
        engine.save_checkpoint(again, client_state=client)
    losses = go(engine, comm.rank, range(2, 4))
    engine.destroy()
    return held, losses


def differences(one: dict[str, Any], other: dict[str, Any], but: str | None = None) -> list[str]:
    """What differs, except for what has `but` in its name."""
    wrong = [f"only one has {key}" for key in one.keys() ^ other.keys()]
    for key in one.keys() & other.keys():
        a, b = one[key], other[key]
        same = torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b
        if not same and (but is None or but not in key):
            wrong.append(f"{key}: {a} {b}")
    return sorted(wrong)
