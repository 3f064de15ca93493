"""The same training loop for zero_full and for plain torch, so that an event can happen to either.

`Plain` trains on one process over the data of all ranks, with fp32 masters beside 16-bit parameters; what an
event writes to a parameter, its master takes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import zero_full
from tests.zero_full.runs import Net, data

LR, DECAY = 0.1, 0.1


@dataclass(frozen=True)
class Numbers:
    """A precision and an optimizer; what parameters may be off by."""

    name: str
    dtype: torch.dtype
    keys: dict[str, Any]
    optimizer: str
    tolerance: float


FP16 = {"fp16": {"enabled": True, "loss_scale": 8.0}}
BF16 = {"bf16": {"enabled": True}}
HOST = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}  # where there is ZeRO
NUMBERS = {
    each.name: each
    for each in (
        Numbers("fp32", torch.float32, {}, "AdamW", 2e-5),
        Numbers("bf16", torch.bfloat16, BF16, "SGD", 4e-3),
        Numbers("fp16", torch.float16, FP16, "SGD", 4e-3),
        # Adam makes steps of full size of gradients that are nothing but rounding.
        Numbers("bf16 Adam", torch.bfloat16, BF16, "AdamW", 4e-2),
        Numbers("fp32 Lamb on the host", torch.float32, HOST, "Lamb", 2e-5),
    )
}


def make_optimizer(name: str, params: Any) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(params, lr=LR, momentum=0.9, weight_decay=DECAY)
    if name == "Lamb":
        return zero_full.Lamb(params, lr=LR, weight_decay=DECAY)
    return torch.optim.AdamW(params, lr=LR / 10, weight_decay=DECAY)


class Player(Protocol):
    """What an event may touch."""

    module: nn.Module
    stage: int | None  # None: plain torch
    micro_batches: int

    @property
    def optimizer(self) -> Any: ...
    def call(self, x: Tensor) -> Tensor: ...
    def backward(self, loss: Tensor) -> None: ...
    def zero_grad(self) -> None: ...
    def step(self) -> None: ...
    def editing(self, modifier_rank: int | None) -> Any: ...
    def values(self) -> dict[str, Tensor]: ...


class Plain:
    """Plain torch, over everybody's data."""

    stage = None

    def __init__(self, model: nn.Module, numbers: Numbers, ranks: int, micro_batches: int) -> None:
        self.module, self.ranks, self.micro_batches = model.to(numbers.dtype), ranks, micro_batches
        params = list(model.parameters())
        self.low = numbers.dtype != torch.float32
        self.masters = {p: nn.Parameter(p.detach().float()) if self.low else p for p in params}
        self.optimizer = make_optimizer(numbers.optimizer, list(self.masters.values()))
        self.grads: dict[nn.Parameter, Tensor] = {}

    def call(self, x: Tensor) -> Tensor:
        return self.module(x)

    def backward(self, loss: Tensor) -> None:
        (loss / (self.ranks * self.micro_batches)).backward()

    def zero_grad(self) -> None:
        self.module.zero_grad()

    def step(self) -> None:
        for p, master in self.masters.items():
            if self.low:
                follow(master, p)
                master.grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()
        for p, master in self.masters.items():
            if self.low:
                p.data.copy_(master)

    def editing(self, modifier_rank: int | None) -> Any:
        return nullcontext()

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().float().clone() for name, p in self.module.named_parameters()}


def follow(master: Tensor, param: Tensor) -> None:
    """The parameter's value, where it is not what the master rounds to."""
    with torch.no_grad():
        rounded = master.to(param.dtype)
        master.copy_(torch.where(rounded == param, master, param.float()))


FORWARD: dict[str, Callable[[zero_full.Engine, Tensor], Tensor]] = {
    "engine(x)": lambda engine, x: engine(x),
    "module(x)": lambda engine, x: engine.module(x),
    "part(x)": lambda engine, x: engine.module.layers(x).float().square().mean(),
    "functional_call": lambda engine, x: torch.func.functional_call(
        engine.module, dict(engine.module.named_parameters()), (x,)
    ),
}


def by_torch(engine: zero_full.Engine, loss: Tensor) -> None:
    torch.autograd.backward([loss / engine.gradient_accumulation_steps()])


BACKWARD: dict[str, Callable[[zero_full.Engine, Tensor], Any]] = {
    "engine.backward": lambda engine, loss: engine.backward(loss),
    "engine.scale": lambda engine, loss: engine.scale(loss).backward(),
    "loss.backward": lambda engine, loss: (loss / engine.gradient_accumulation_steps()).backward(),
    "autograd.backward": by_torch,
}
STEP = ("engine.step", "optimizer.step", "passed-in.step")


@dataclass(frozen=True)
class Style:
    """How the loop is written."""

    forward: str = "engine(x)"
    backward: str = "engine.backward"
    step: str = "engine.step"

    def __str__(self) -> str:
        return f"{self.forward}, {self.backward}, {self.step}"


DEEPSPEED = Style()
PYTORCH = Style("module(x)", "loss.backward", "optimizer.step")


class Full:
    """zero_full on one rank."""

    def __init__(
        self, model: nn.Module, numbers: Numbers, stage: int, style: Style, micro_batches: int
    ) -> None:
        given = make_optimizer(numbers.optimizer, model.parameters())
        zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 100}
        if stage == 3:
            zero |= {"stage3_param_persistence_threshold": 20, "stage3_max_reuse_distance": 0}
        config = {
            "train_micro_batch_size_per_gpu": 5,
            "gradient_accumulation_steps": micro_batches,
            "gradient_clipping": 0.0,
            "plain_backward_divides": False,
            **numbers.keys,
        }
        of_numbers = numbers.keys.get("zero_optimization", {}) if stage else {}
        overlap = micro_batches == 1  # so that every event happens with it and without
        config["zero_optimization"] = {**zero, **of_numbers, "overlap_comm": overlap}
        self.engine, self.wrapped, _, _ = zero_full.initialize(model=model, optimizer=given, config=config)
        self.module, self.stage, self.style, self.micro_batches = model, stage, style, micro_batches
        self.given = given
        self.optimizer = given if style.step == "passed-in.step" else self.wrapped

    def call(self, x: Tensor) -> Tensor:
        return FORWARD[self.style.forward](self.engine, x)

    def backward(self, loss: Tensor) -> None:
        BACKWARD[self.style.backward](self.engine, loss)

    def zero_grad(self) -> None:
        if self.style.step != "engine.step":
            self.optimizer.zero_grad()

    def step(self) -> None:
        if self.style.step == "engine.step":
            self.engine.set_gradient_accumulation_boundary(True)
            self.engine.step()
        else:
            self.optimizer.step()

    def editing(self, modifier_rank: int | None) -> Any:
        return zero_full.GatheredParameters(list(self.module.parameters()), modifier_rank=modifier_rank)

    def values(self) -> dict[str, Tensor]:
        state = self.engine.module_state_dict()
        return {name: state[name].float() for name, _ in self.module.named_parameters()}


@contextmanager
def ended(full: Full) -> Iterator[None]:
    """The engine ends with the block, so that the next cell finds nothing of it."""
    try:
        yield
    finally:
        full.engine.destroy()


def play(player: Any, event: Any, ranks: Sequence[int], dtype: torch.dtype, steps: int = 3) -> None:
    """Three steps. In the second, the event has its four moments."""
    for step in range(steps):
        hot = event if step == 1 else None
        if hot is not None:
            hot.between(player)
        if hot is None or not hot.zero_grad(player):
            player.zero_grad()
        if hot is not None:
            hot.before(player)
        for rank in ranks:
            for micro in range(player.micro_batches):
                x = data(step, micro, rank, dtype)
                loss = player.call(x) if hot is None else hot.call(player, x)
                player.backward(loss)
        if hot is not None:
            hot.after_backward(player)
        if hot is None or not hot.step(player):
            player.step()


def model_of(event: Any) -> Net:
    net = Net()
    event.construct(net)
    return net
