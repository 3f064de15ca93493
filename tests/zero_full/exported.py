"""A model with everything that an export may meet, and runs of it, for the tests of export and load."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero_full
from tests.zero_full.runs import config
from zero_full.checkpoint import load_weights, save_weights
from zero_full.errors import CheckpointError

BF16 = {"bf16": {"enabled": True}}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PLACES = [(stage, world) for stage in (0, 2, 3) for world in (1, 2, 3)]


class Zoo(nn.Module):
    """Tied, frozen, scalar and empty parameters; buffers that are kept and one that is not."""

    seed = 0
    tied = True

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)
        if self.tied:
            self.out.weight = self.words.weight
        self.body = nn.Sequential(nn.Linear(8, 13), nn.BatchNorm1d(13), nn.Linear(13, 8))
        self.frozen, self.stiff = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 2).requires_grad_(False)
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        generator = torch.Generator().manual_seed(self.seed)
        for p in self.parameters():
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.3)

    def forward(self, words: Tensor) -> Tensor:
        """The loss."""
        hidden = self.body(self.words(words)) * self.scale + self.empty.sum()
        scores = self.out(self.frozen(hidden)) + self.stiff(hidden).sum()
        return nn.functional.cross_entropy(scores.float(), words.roll(1))


class Other(Zoo):
    """The same with other values."""

    seed = 1


class Untied(Other):
    """The same with two tables."""

    tied = False


def engine_of(
    stage: int, keys: Mapping[str, Any], model: Callable[[], nn.Module] = Zoo, steps: int = 0
) -> Any:
    """An engine that has trained. At stage 3 some parameters stay whole."""
    zero = {"stage3_param_persistence_threshold": 20, **keys.get("zero_optimization", {})}
    engine, _, _, _ = zero_full.initialize(
        model=model(), config=config(stage, **{**keys, "zero_optimization": zero})
    )
    for step in range(steps):
        seed = 10 * step + engine.global_rank
        engine.backward(engine(torch.randint(11, (6,), generator=torch.Generator().manual_seed(seed))))
        engine.step()
    return engine


def save(comm: Any, folder: Path, stage: int, keys: Any, steps: int = 2, **options: Any) -> dict[str, Tensor]:
    """Train and save. Returns the first rank's whole state dict."""
    engine = engine_of(stage, keys, steps=steps)
    save_weights(engine.module, engine.optimizer, folder, **options)
    state: dict[str, Tensor] = engine.module_state_dict()
    engine.destroy()
    return state


def masters(engine: Any) -> dict[str, Tensor]:
    """The fp32 values of everything that is trained, whole."""
    named = engine.module.named_parameters()
    return {n: zero_full.safe_get_full_fp32_param(p).clone() for n, p in named if p.requires_grad}


def failure_of_load(
    comm: Any, paths: list[Path], stage: int, model: Callable[[], nn.Module] = Zoo, **options: Any
) -> tuple[str, bool]:
    """(what load_weights of this rank's path says, whether the model is as it was)."""
    engine = engine_of(stage, {}, model)
    before = engine.module_state_dict()
    message = "nothing was wrong"
    try:
        load_weights(engine.module, engine.optimizer, paths[comm.rank % len(paths)], **options)
    except CheckpointError as error:
        message = str(error)
    after = engine.module_state_dict()
    return message, all(torch.equal(before[name], after[name]) for name in before)
