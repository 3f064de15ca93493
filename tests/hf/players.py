"""The same training of the same model: by zero_full on every rank, and by plain torch over all data."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zero_full
from tests.hf.families import FAMILIES, Batch, Family

STEPS = 3


@dataclass(frozen=True)
class Numbers:
    """A precision, and how far from plain torch's losses and parameters (as a part of the way) may be."""

    name: str
    keys: dict[str, Any]
    loss: float
    parameters: float


# Sums over ranks have another order; Adam is given an eps that keeps it from making steps of their rounding.
NUMBERS = {
    each.name: each
    for each in (
        Numbers("fp32", {}, 1e-5, 1e-4),
        Numbers("bf16", {"bf16": {"enabled": True}}, 1e-3, 1e-3),
    )
}


@dataclass(frozen=True)
class Run:
    """One training."""

    family: str
    numbers: str = "fp32"
    micro_batches: int = 1
    checkpointing: str = ""  # "re-entrant", "not re-entrant" or none
    stage: int = 3

    def __str__(self) -> str:
        kinds = [
            f"stage {self.stage}",
            self.numbers,
            f"{self.micro_batches} micro-batches",
            self.checkpointing,
        ]
        return f"{self.family} ({', '.join(filter(None, kinds))})"

    def model(self) -> nn.Module:
        """As every rank makes it."""
        model = FAMILIES[self.family].make()
        if self.checkpointing:
            kinds = {"use_reentrant": self.checkpointing == "re-entrant"}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kinds)
            model.enable_input_require_grads()
            assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        return model

    def places(self, step: int, ranks: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        """Where this step's batches are."""
        for rank in ranks:
            for micro in range(self.micro_batches):
                yield step, micro, rank


# Where many modules read one activation, as decoders their encoder's, autograd adds its gradients in another
# order at stage 3. In bf16 that is seen; neither order is nearer to fp32.
READ_BY_MANY = Numbers("bf16", {}, 5e-2, 5e-2)


def limits(family: str, numbers: str) -> Numbers:
    """How far this training may be from plain torch's."""
    many = numbers == "bf16" and FAMILIES[family].inputs == "translated"
    return READ_BY_MANY if many else NUMBERS[numbers]


Loss = Callable[[nn.Module, str, Batch], Tensor]  # of a model of this family


def own_loss(model: nn.Module, family: str, batch: Batch) -> Tensor:
    """The one that the model computes."""
    return model(**batch).loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=0.01, eps=1e-3, weight_decay=0.1)


class Plain:
    """Plain torch; 16-bit parameters have fp32 masters, and buffers and adapters stay as they are."""

    def __init__(self, run: Run, ranks: int, loss: Loss = own_loss) -> None:
        self.run, self.ranks, self.loss, self.module = run, ranks, loss, run.model()
        masters = [nn.Parameter(p.detach().float()) for p in self.module.parameters()]
        if run.numbers == "bf16":
            for name, p in self.module.named_parameters():
                p.data = p.data if "lora_" in name else p.data.bfloat16()
        pairs = zip(self.module.parameters(), masters, strict=True)
        self.masters = {p: master for p, master in pairs if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.masters.values(), lr=0.01, eps=1e-3, weight_decay=0.1)

    def step(self, number: int, family: Family) -> list[float]:
        """The losses of everybody's micro-batches; gradients are added in fp32."""
        losses = []
        for place in self.run.places(number, range(self.ranks)):
            self.module.zero_grad()
            loss = self.loss(self.module, family.name, family.batch(*place))
            (loss / self.run.micro_batches).backward()
            losses.append(float(loss.detach()))
            for p, master in self.masters.items():
                if p.grad is not None:
                    grad = p.grad.float() / self.ranks
                    master.grad = grad if master.grad is None else master.grad + grad
        self.optimizer.step()
        self.optimizer.zero_grad()
        for p, master in self.masters.items():
            p.data.copy_(master)
        return losses

    def train(self, steps: Iterable[int] = range(STEPS)) -> list[float]:
        """Steps; the losses in the order of steps, ranks and micro-batches."""
        family = FAMILIES[self.run.family]
        return [loss for number in steps for loss in self.step(number, family)]

    def values(self) -> dict[str, Tensor]:
        """Every parameter; of those that are trained, the fp32 master."""
        return {
            name: self.masters.get(p, p).detach().float().clone()
            for name, p in self.module.named_parameters()
        }


class Full:
    """zero_full on one rank."""

    def __init__(self, run: Run, rank: int, loss: Loss = own_loss, module: nn.Module | None = None) -> None:
        self.run, self.rank, self.loss, self.module = run, rank, loss, module or run.model()
        zero: dict[str, Any] = {"stage": run.stage, "reduce_bucket_size": 5000, "overlap_comm": False}
        if run.stage == 3:
            zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": run.micro_batches,
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            **NUMBERS[run.numbers].keys,
        }
        self.engine, self.optimizer, _, _ = zero_full.initialize(
            model=self.module, optimizer=optimizer_of(self.module), config=config
        )

    def train(self, steps: Iterable[int] = range(STEPS)) -> list[float]:
        """Steps; this rank's losses."""
        family, losses = FAMILIES[self.run.family], []
        for number in steps:
            for place in self.run.places(number, [self.rank]):
                model = self.engine if self.loss is own_loss else self.module
                loss = self.loss(model, family.name, family.batch(*place))
                self.engine.backward(loss)
                self.engine.step()
                losses.append(float(loss.detach()))
        return losses

    def values(self) -> dict[str, Tensor]:
        """Every parameter, whole; of those that are trained, the fp32 master."""
        state = self.engine.module_state_dict()
        whole = {}
        for name, p in self.module.named_parameters():
            master = zero_full.safe_get_full_fp32_param(p) if p.requires_grad else None
            whole[name] = (state[name] if master is None else master).float()
        return whole


@contextmanager
def playing(run: Run, rank: int, loss: Loss = own_loss, module: nn.Module | None = None) -> Iterator[Full]:
    """The engine ends with the block."""
    full = Full(run, rank, loss, module)
    try:
        yield full
    finally:
        full.engine.destroy()
