"""Training with Muon where every bit is known: gradients that are exact however they are averaged."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import zero_full
from tests.zero_full.runs import config
from tests.zero_full.test_experts import topology_of

OPTIONS = {"muon_lr": 0.05, "adam_lr": 0.01, "weight_decay": 0.1, "momentum": 0.9}
SHAPES = {
    **{
        "tall": (24, 5),
        "wide": (5, 24),
        "square": (9, 9),
        "row": (1, 9),
        "column": (7, 1),
        "tiny": (2, 1),
        "one": (1, 1),
    },
    **{"large": (40, 33), "empty": (0, 3), "unused": (6, 4), "frozen": (3, 8), "tied": (4, 7)},
    **{"embedding": (13, 4), "bias": (11,), "filter": (3, 2, 2), "scalar": ()},
}
SMALL = {"stage3_param_persistence_threshold": 10, "stage3_max_reuse_distance": 0}
REMEMBERED = ("large", "tied", "row")  # whose momentum is looked at
BY_ADAM = ("embedding", "bias", "filter", "scalar")


class Dot(nn.Module):
    """The sum of a parameter's elements, each times a number: which is its gradient."""

    def __init__(self, shape: tuple[int, ...], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(shape, generator=generator))

    def forward(self, times: Tensor) -> Tensor:
        """One number."""
        return (self.weight * times).float().sum()


class Shapes(nn.Module):
    """Parameters of all shapes, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {name: Dot(shape, seed) for seed, (name, shape) in enumerate(SHAPES.items())}
        )
        self.parts["again"] = Dot(SHAPES["tied"], 99)
        self.parts["again"].weight = self.parts["tied"].weight
        self.parts["frozen"].weight.requires_grad_(False)

    def forward(self, numbers: Mapping[str, Tensor]) -> Tensor:
        """The loss."""
        return torch.stack(
            [part(numbers[name]) for name, part in self.parts.items() if name != "unused"]
        ).sum()


def numbers(step: int, micro: int, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Multiples of 1/4 up to 2: no sum of a few is rounded, in any type."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    shapes = {**SHAPES, "again": SHAPES["tied"]}
    drawn = {n: torch.randint(-8, 9, shape, generator=generator) / 4 for n, shape in shapes.items()}
    return {name: each.to(dtype) for name, each in drawn.items()}


@dataclass(frozen=True)
class Run:
    """A layout and a precision."""

    stage: int
    precision: str = "fp32"
    micro_batches: int = 1
    zero: dict[str, Any] = field(default_factory=dict, hash=False)
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    experts: int | None = None  # how many ranks hold different ones
    alike: bool = False  # all ranks have the first one's numbers

    def keys(self, world: int) -> dict[str, Any]:
        """The configuration. Three ranks add up: to divide by three would round."""
        precisions: dict[str, dict[str, Any]] = {
            "fp32": {},
            "bf16": {"bf16": {"enabled": True}},
            "fp16": {"fp16": {"enabled": True, "initial_scale_power": 3}},
        }
        zero = {"reduce_bucket_size": 300, **({} if self.stage < 3 else SMALL), **self.zero}
        return config(
            self.stage,
            optimizer={"type": "Muon", "params": {**OPTIONS, **self.options}},
            gradient_accumulation_steps=self.micro_batches,
            gradient_allreduce_op="sum" if world == 3 and not self.alike else "mean",
            zero_optimization=zero,
            **precisions[self.precision],
        )


def engine_of(comm: Any, run: Run) -> zero_full.Engine:
    """A new one. With experts the large matrix is another one on neighbours."""
    model, topology = Shapes(), None
    model.parts["embedding"].weight.use_muon = False  # type: ignore[assignment]
    if run.experts is not None:
        topology = topology_of(comm.rank, run.experts)[0]
        for name in ("large", "wide"):
            model.parts[name].weight.allreduce = False  # type: ignore[assignment]
            model.parts[name].weight.data += comm.rank % run.experts
    return zero_full.initialize(model=model, config=run.keys(comm.world_size), topology=topology)[0]


def one_step(engine: zero_full.Engine, rank: int, step: int) -> None:
    """All its micro-batches."""
    for micro in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(numbers(step, micro, rank, engine.module.parts["bias"].weight.dtype)))
        engine.step()


def values_of(engine: zero_full.Engine) -> dict[str, Tensor]:
    """Parameters and some momentum, whole. Every rank must call this."""
    found = {name: value.clone() for name, value in engine.module_state_dict().items()}
    for name in REMEMBERED:
        whole = zero_full.safe_get_full_optimizer_state(engine.module.parts[name].weight, "momentum_buffer")
        found[f"momentum of {name}"] = torch.zeros(()) if whole is None else whole
    return found


def trained(comm: Any, run: Run, steps: int = 2) -> dict[str, Tensor]:
    """What there is at the end."""
    engine = engine_of(comm, run)
    for step in range(steps):
        one_step(engine, comm.rank, step)
    found = values_of(engine)
    engine.destroy()
    return found


def expected(world: int, run: Run, steps: int = 2) -> dict[str, Tensor]:
    """The same on one process, with torch's optimizers on fp32 parameters."""
    model = Shapes()
    named = {name: part.weight for name, part in model.parts.items()}
    matrices = [p for name, p in named.items() if name not in (*BY_ADAM, "again") and p.requires_grad]
    muon = torch.optim.Muon(matrices, lr=0.05, weight_decay=0.1, momentum=0.9, **run.options)
    adam = torch.optim.AdamW(
        [named[name] for name in BY_ADAM], lr=0.01, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1
    )
    for step in range(steps):
        total: dict[str, Tensor] = {}
        for rank in range(world):
            for micro in range(run.micro_batches):
                for name, each in numbers(step, micro, rank).items():
                    total[name] = total.get(name, 0) + each / run.micro_batches
        total["tied"] += total["again"]
        for name in total.keys() - {"again", "unused", "frozen"}:
            named[name].grad = total[name] / (1 if world == 3 else world)
        muon.step()
        adam.step()
    found = {f"parts.{name}.weight": p.detach().clone() for name, p in named.items()}
    return found | {f"momentum of {n}": muon.state[named[n]]["momentum_buffer"] for n in REMEMBERED}
