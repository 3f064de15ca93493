"""Training runs of zero_full for its tests: a small model, its own data on every rank, any config."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import run_in

WIDTH = 16


class Net(nn.Module):
    """Sizes that no world divides: 16 -> 13 -> 13 -> 3, 445 parameters."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 13), nn.Tanh(), nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 3)
        )
        for p in self.parameters():
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return self.layers(x).float().square().mean()


def data(step: int, micro: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Every (step, micro-batch, rank) has its own numbers."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randn(5, WIDTH, generator=generator).to(dtype)


def config(stage: int, **keys: Any) -> dict[str, Any]:
    """A config with AdamW, no clipping and small buckets; keys are merged over it, sections key by key."""
    base: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 5,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100},
    }
    for key, value in keys.items():
        merge = isinstance(value, Mapping) and isinstance(base.get(key), dict) and key != "optimizer"
        base[key] = {**base[key], **value} if merge else value
    return base


def norms_on_one_process(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: int, steps: int, clip: float
) -> list[float]:
    """Train on everybody's data in plain PyTorch, as a referee; returns the gradients' norms."""
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (model(data(step, 0, rank)) / ranks).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
    return norms


@dataclass
class Outcome:
    """What one rank has to show."""

    parameters: dict[str, Tensor]
    losses: list[float]
    norms: list[float | None]
    applied: list[bool]
    scales: list[float]
    traffic: dict[str, int] = field(default_factory=dict)


def train(
    comm: Any,
    config: Mapping[str, Any],
    steps: int = 4,
    model: Callable[[], nn.Module] = Net,
    poison: tuple[int, int] | None = None,
    **arguments: Any,
) -> Outcome:
    """Train on this rank as a DeepSpeed script does. `poison` (step, rank): that rank's data has an inf."""
    engine, _, _, _ = zero_full.initialize(model=model(), config=dict(config), **arguments)
    dtype = next(engine.module.parameters()).dtype
    outcome = Outcome({}, [], [], [], [])
    for step in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            x = data(step, micro, comm.rank, dtype)
            if poison == (step, comm.rank):
                x[0, 0] = float("inf")
            loss = engine(x)
            outcome.losses.append(float(loss.detach()))
            outcome.scales.append(engine.loss_scale())
            engine.backward(loss)
            engine.step()
        outcome.norms.append(engine.get_global_grad_norm())
        outcome.applied.append(engine.was_step_applied())
    outcome.parameters = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    outcome.traffic = engine.traffic()
    engine.destroy()
    return outcome


def run(world_size: int, config: Mapping[str, Any], steps: int = 4, **options: Any) -> list[Outcome]:
    """`train` on real processes; by rank."""
    return run_in("processes", _train_with, world_size, config, steps, options)


def _train_with(comm: Any, config: Mapping[str, Any], steps: int, options: Mapping[str, Any]) -> Outcome:
    return train(comm, config, steps, **options)


def reference(
    world_size: int,
    steps: int = 4,
    micro_batches: int = 1,
    make: Callable[[Any], torch.optim.Optimizer] | None = None,
    clip: float = 0.0,
) -> dict[str, Tensor]:
    """The same run with plain PyTorch, on one process over everybody's data."""
    model = Net()
    optimizer = (
        make(model.parameters())
        if make is not None
        else torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    )
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world_size):
            for micro in range(micro_batches):
                (model(data(step, micro, rank)) / (world_size * micro_batches)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_close(got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float = 2e-6) -> None:
    """The same parameters, to summation order."""
    assert list(got) == list(want)
    for name, tensor in want.items():
        worst = float((got[name].float() - tensor.float()).abs().max())
        assert worst <= tolerance, f"{name} is off by {worst:.3g}"


def assert_same(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """The same bits."""
    assert list(got) == list(want)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), f"{name} differs"


def said_by(act: Callable[[], Any]) -> str:
    """The error that it raises, with its type."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


def fragments(engine: zero_full.Engine) -> dict[str, dict[str, Any]]:
    """Copies of what this rank owns of each parameter: its range, its master and its state."""
    engine.optimizer.catch_up()
    state, found = engine.optimizer.base.state, {}
    for _, piece, _ in engine.optimizer.contents.pieces():
        kept = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.get(piece.master, {}).items()}
        found[piece.name] = {
            "range": piece.param_range,
            "master": piece.master.detach().clone(),
            "state": kept,
        }
    return found
