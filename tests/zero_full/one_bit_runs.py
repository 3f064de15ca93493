"""Training with 1-bit and 0/1 Adam: parameters of all shapes whose gradients are known, and runs of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import zero_full
from tests.zero_full.one_bit_model import By, Model, Problem, model_of
from tests.zero_full.runs import config
from zero_full.optim import OneBitAdam, OneBitLamb, ZeroOneAdam

SHAPES: dict[str, tuple[int, ...]] = {
    **{"tall": (9, 5), "wide": (3, 14), "single": (1,), "scalar": (), "filter": (3, 2, 2), "large": (20, 17)},
    **{"empty": (0, 3), "unused": (6, 4), "frozen": (3, 8), "rare": (4, 5), "tied": (4, 7), "bias": (11,)},
}
NAMES = sorted(name for name, shape in SHAPES.items() if math.prod(shape) and name != "frozen")
SECOND = ("bias", "scalar", "rare")  # of the second parameter group
RARELY = 3  # "rare" has a gradient in every third step
GROUPS: tuple[dict[str, Any], ...] = (
    {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1},
    {"lr": 0.02, "betas": (0.8, 0.98), "eps": 1e-6, "weight_decay": 0.0},
)
CLASSES = {"OneBitAdam": OneBitAdam, "OneBitLamb": OneBitLamb, "ZeroOneAdam": ZeroOneAdam}
# Phases that fit into a test: the steps in which they change are in `tests/zero_full/test_one_bit.py`.
SCHEDULES: dict[str, dict[str, int]] = {
    "OneBitAdam": {"freeze_step": 4},
    "OneBitLamb": {"freeze_step": 4},
    "ZeroOneAdam": {
        **{"var_freeze_step": 7, "var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 4},
    },
}


class Shapes(nn.Module):
    """Parameters of all shapes; the loss is the sum of each element times a number, its gradient."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.parts = nn.ParameterDict(
            {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        )
        self.parts["frozen"].requires_grad_(False)

    def forward(self, numbers: Mapping[str, Tensor]) -> Tensor:
        """The loss. The tied parameter is used twice."""
        each = [(self.parts[name] * times).float().sum() for name, times in numbers.items()]
        return torch.stack([*each, (self.parts["tied"] * numbers["tied"]).float().sum()]).sum()


def numbers(step: int, micro: int, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A drift that all have, and noise. What never has a gradient: a row of "tall"; and "unused"."""
    common = torch.Generator().manual_seed(77)
    own = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    found = {}
    for name, shape in SHAPES.items():
        drawn = torch.randn(shape, generator=common) + 0.5 * torch.randn(shape, generator=own)
        if name == "tall":
            drawn[2] = 0
        if name not in ("unused", "frozen") and (name != "rare" or step % RARELY == 0):
            found[name] = drawn.to(dtype)
    return found


@dataclass(frozen=True)
class Run:
    """An optimizer, a precision and what else may differ."""

    kind: str
    precision: str = "fp32"
    micro_batches: int = 1
    clip: float = 0.0
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    keys: dict[str, Any] = field(default_factory=dict, hash=False)
    stage: int = 0
    masked: bool = False  # a part of "wide" never moves by its momentum
    trains_all: bool = False  # nothing is frozen
    lists_frozen: bool = True  # the optimizer is given what is frozen

    def config(self) -> dict[str, Any]:
        """What a file would say, but for the optimizer."""
        precisions: dict[str, dict[str, Any]] = {
            "fp32": {},
            "bf16": {"bf16": {"enabled": True}},
            "bf16 masters": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "fp16": {"fp16": {"enabled": True, "initial_scale_power": 3}},
        }
        return config(
            self.stage,
            gradient_accumulation_steps=self.micro_batches,
            gradient_clipping=self.clip,
            **{**precisions[self.precision], **self.keys},
        )

    def mask(self) -> Tensor:
        """Of "wide"."""
        return torch.arange(42).view(3, 14) % 4 != 1


def engine_of(run: Run, by: Any = None) -> zero_full.Engine:
    """A new one. `by`: another optimizer's class, with the same groups."""
    model = Shapes()
    model.parts["frozen"].requires_grad_(run.trains_all)
    named = dict(model.parts.items())
    listed = {name: p for name, p in named.items() if run.lists_frozen or p.requires_grad}
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in listed.items() if (name in SECOND) == second], **GROUPS[second]}
        for second in (False, True)
    ]
    if run.masked:
        names = [name for name in named if name not in SECOND]
        groups[0]["exp_avg_mask"] = [run.mask() if name == "wide" else None for name in names]
    options: dict[str, Any] = {**SCHEDULES[run.kind], **run.options}
    made = CLASSES[run.kind](groups, **options) if by is None else by(groups)
    return zero_full.initialize(model=model, optimizer=made, config=run.config())[0]


def one_step(engine: zero_full.Engine, rank: int, step: int, poison: float | None = None) -> None:
    """All its micro-batches."""
    dtype = engine.module.parts["tall"].dtype
    for micro in range(engine.gradient_accumulation_steps()):
        given = numbers(step, micro, rank, dtype)
        if poison is not None:
            given["wide"][0, 3] = poison
        engine.backward(engine(given))
        engine.step()


def values_of(engine: zero_full.Engine) -> dict[str, Tensor]:
    """Every parameter of this rank, in the precision in which it is stepped."""
    whole = engine.zero_optimization_stage() < 3
    named = {name: p.detach().clone() for name, p in engine.module.named_parameters() if whole}
    pieces = (piece for _, piece, _ in engine.optimizer.contents.pieces())
    return named | {piece.name: piece.master.detach().clone() for piece in pieces}


def everything(engine: zero_full.Engine) -> dict[str, Tensor]:
    """All that decides how this rank goes on, as tensors by name."""
    found = values_of(engine)
    stepper, state = engine.optimizer.contents.stepper, engine.optimizer.base.state
    for _, piece, _ in engine.optimizer.contents.pieces():
        for name, value in state.get(piece.master, {}).items():
            found[f"{name} of {piece.name}"] = torch.as_tensor(value).clone()
    alone = {**stepper.own_tensors(), **stepper.cut_tensors()}
    found |= {f"own {name}": tensor.clone() for name, tensor in alone.items()}
    return found | {"told": torch.tensor(list(repr(stepper.state_dict()).encode()))}


def modelled(world: int, run: Run) -> Model:
    """What all ranks should do, in fp64."""
    parts = Shapes().parts
    problem = Problem(
        run.kind,
        {**SCHEDULES[run.kind], **run.options},
        {name: parts[name].detach() for name in NAMES},
        {name: GROUPS[name in SECOND] for name in NAMES},
        lambda step, rank, _: _own_gradients(run, step, rank),
        run.clip,
        run.stage,
        {"wide": run.mask()} if run.masked else {},
    )
    return model_of(world, problem)


def _own_gradients(run: Run, step: int, rank: int) -> By:
    total: By = {}
    for micro in range(run.micro_batches):
        for name, each in numbers(step, micro, rank).items():
            times = (2 if name == "tied" else 1) / run.micro_batches
            total[name] = total.get(name, 0) + times * each.double()
    return total
