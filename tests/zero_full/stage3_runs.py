"""The same training at stage 2 and at stage 3 in all its ways, for the tests of stage 3."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import assert_close, config, data

WIDTH = 16
RELEASED = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "overlap_comm": False}
KEPT = {"stage3_param_persistence_threshold": 0, "overlap_comm": False}
WAYS: dict[str, dict[str, Any]] = {
    "released": RELEASED,
    "released, overlapping": {**RELEASED, "overlap_comm": True},
    "kept": KEPT,
    "defaults": {},
}
# Unlike Adam's, its steps grow with the gradients.
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}}}
Play = Callable[[zero_full.Engine, int, int], float]


class Block(nn.Module):
    """A residual block: 1,080 parameters, a unit of its own in a model of eight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + self.down(torch.tanh(self.up(x)))


class Tower(nn.Module):
    """Blocks on top of each other; their mean square is the loss."""

    def __init__(self, depth: int = 8, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The same model on every rank and in every run."""
    torch.manual_seed(0)
    return make()


def stage3(**zero: Any) -> dict[str, Any]:
    """A config in which everything is released as soon as possible, and more keys of its ZeRO section."""
    return config(3, zero_optimization={**RELEASED, **zero})


def one_step(engine: zero_full.Engine, step: int, rank: int) -> float:
    """Forward, backward, step."""
    dtype = engine.optimizer.sharded.flats[0].dtype
    for micro in range(engine.gradient_accumulation_steps()):
        loss = engine(data(step, micro, rank, dtype))
        engine.backward(loss)
        engine.step()
    return float(loss.detach())


@dataclass
class Played:
    """What a rank has to show after a run."""

    parameters: dict[str, Tensor]
    losses: list[float]
    traffic: dict[str, int]
    units: int


def whole_bytes(engine: zero_full.Engine) -> int:
    """The bytes of parameters that this rank holds whole: gathered, or never sharded."""
    return sum(tensor.untyped_storage().nbytes() for tensor in engine.optimizer.holdings()["parameters"])


def played(
    comm: Any, make: Callable[[], nn.Module], play: Play, keys: Mapping[str, Any], steps: int
) -> Played:
    """Steps with a fresh engine. Afterwards nothing is gathered."""
    engine, optimizer, _, _ = zero_full.initialize(model=seeded(make), config=dict(keys))
    torch.manual_seed(comm.rank)
    losses = [play(engine, step, comm.rank) for step in range(steps)]
    units = [values for values in optimizer.sharded.flats if values.released_at_rest]
    assert not any(values.users or values.full.untyped_storage().nbytes() for values in units)
    found = Played(engine.module_state_dict(), losses, engine.traffic(), len(units))
    engine.destroy()
    return found


def every_way(
    comm: Any,
    make: Callable[[], nn.Module],
    play: Play,
    keys: Mapping[str, Any],
    ways: Sequence[str],
    steps: int,
) -> dict[str, Played]:
    """At stage 2, then at stage 3 in these ways."""
    keys = {**SGD, **keys}
    runs = {"stage 2": config(2, **keys)}
    for way in ways:
        zero = {**WAYS[way], **keys.get("zero_optimization", {})}
        runs[way] = config(3, **{**keys, "zero_optimization": zero})
    return {way: played(comm, make, play, run, steps) for way, run in runs.items()}


def assert_stage_3_is_stage_2(
    make: Callable[[], nn.Module],
    play: Play = one_step,
    world_size: int = 2,
    ways: Sequence[str] = tuple(WAYS),
    steps: int = 3,
    units: int = 2,
    tolerance: float = 0.0,
    **keys: Any,
) -> None:
    """On every rank, with that many units at least; bit for bit where the order of sums is the same."""
    for runs in POOL.run(every_way, world_size, make, play, keys, ways, steps):
        want = runs.pop("stage 2")
        for way, got in runs.items():
            assert got.losses == pytest.approx(want.losses, rel=tolerance, abs=0, nan_ok=True), way
            assert_close(got.parameters, want.parameters, tolerance)
            assert way == "defaults" or got.units >= units
