"""The models and training runs that everybody must get right.

`train` runs one `Case` on one rank through a `Trainer`; `reference` runs the same case on a single
process over the whole batch with PyTorch's own Adam. Each rank and micro-batch has its own data.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.rules import Rule
from tests.trainers import StepReport, Subject, TorchsAdam, Trainer
from zero_min.comm import Comm
from zero_min.ledger import Event, held

WIDTH = 7
BATCH = 4


class Toy(nn.Module):
    """7 -> 5 -> 3 and a few awkward parameters, chosen by name. 59 or so elements: no world divides it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(WIDTH, 5), nn.Linear(5, 3)
        if kind == "tied":
            self.back = nn.Linear(5, WIDTH, bias=False)
            self.back.weight = nn.Parameter(self.first.weight.detach().t().contiguous())
            self.again = nn.Linear(5, WIDTH, bias=False)
            self.again.weight = self.back.weight
        if kind in ("twice", "checkpoint", "reentrant"):
            self.middle = nn.Linear(5, 5)
        if kind == "frozen":
            self.first.weight.requires_grad_(False)
        if kind == "unused":
            self.spare = nn.Parameter(torch.ones(11))
        if kind == "empty":
            self.nothing = nn.Parameter(torch.ones(0, 4))
        if kind == "small":  # less than one element a rank at world 3 and 4
            self.first, self.second = nn.Linear(WIDTH, 1, bias=False), nn.Linear(1, 1, bias=False)
            self.first.weight.requires_grad_(False)
        if kind == "scalar":
            self.gain = nn.Parameter(torch.tensor(1.5))
        if kind == "transposed":
            self.first.weight = nn.Parameter(self.first.weight.detach().t().contiguous().t())
        for number, p in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(number)
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.5)

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        """x: (B, 7). One loss. `rank` says whose data this is, for models that behave differently."""
        h = self.first(x)
        if self.kind == "tied":
            h = self.first(self.again(torch.tanh(h)) + self.back(h))
        if self.kind == "twice":
            h = self.middle(torch.tanh(self.middle(h)))
        if self.kind in ("reentrant", "checkpoint"):
            h = self._recompute(h)
        if self.kind == "scalar":
            h = h * self.gain
        if self.kind == "uneven" and rank == 1:  # one rank alone does not use `second`
            return torch.tanh(h).square().mean()
        return self.second(torch.tanh(h)).square().mean()

    def _recompute(self, h: Tensor) -> Tensor:
        def part(h: Tensor) -> Tensor:
            return torch.tanh(self.middle(h))

        for _ in range(2):  # the same weights in two recomputed parts
            h = checkpoint(part, h, use_reentrant=self.kind == "reentrant")
        return h


@dataclass(frozen=True)
class Case:
    """One training run, by name."""

    kind: str = "plain"
    steps: int = 3
    micro_batches: int = 1
    max_grad_norm: float | None = None
    weight_decay: float = 0.0
    decoupled: bool = False
    two_groups: bool = False
    dtype: torch.dtype = torch.float64
    bucket_size: int = 24
    rule: Rule | None = None  # zero_full's only; else it is Adam

    def __str__(self) -> str:
        default = Case()
        changed = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(default, k) and k != "kind"]
        return "-".join([self.kind, *changed])

    def model(self) -> Toy:
        """The model with the same values on every rank."""
        return Toy(self.kind).to(self.dtype)

    def groups(self, model: nn.Module) -> list[dict[str, Any]] | None:
        """Matrices decay and learn fast, the rest does not: the usual two groups."""
        if not self.two_groups:
            return None
        params = list(model.parameters())
        return [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1, "lr": 0.02},
            {"params": [p for p in params if p.dim() <= 1]},
        ]

    def options(self) -> dict[str, Any]:
        """Keyword arguments of a stage."""
        return {
            "lr": 0.01,
            "weight_decay": self.weight_decay,
            "optimizer": "AdamW" if self.decoupled else "Adam",
            "max_grad_norm": self.max_grad_norm,
            "bucket_size": self.bucket_size,
        }

    def data(self, step: int, micro: int, rank: int) -> Tensor:
        """Every (step, micro-batch, rank) has its own numbers."""
        generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
        return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64).to(self.dtype)


@dataclass
class Run:
    """What one rank has to show after a case."""

    parameters: dict[str, Tensor]
    reports: list[StepReport]
    held: dict[str, int]
    live: int
    sent: int
    sent_by: dict[str, int]
    diary: list[Event]  # of the last step, if it is zero_min's
    state: Mapping[str, Any]
    losses: list[float]


def train(
    comm: Comm, subject: Subject, case: Case, watched: bool = False, resume: Mapping[str, Any] | None = None
) -> Run:
    """Run the case on this rank. With `resume`, its first half is loaded instead of trained.

    `live` is 0 unless the ledger watched, which takes as long as the training.
    """
    with comm.ledger.watch() if watched else nullcontext():
        model = case.model()
        trainer = subject.build(model, comm, case.groups(model), **subject.options(case))
        first = 0
        if resume is not None:
            trainer.load_state_dict(resume["half"][comm.rank])
            first = case.steps // 2
        state, losses, reports = {}, list[float](), []
        for step in range(first, case.steps):
            if step == case.steps // 2:
                state = dict(trainer.state_dict())
            losses += backward(trainer, model, case, step, comm.rank)
            reports.append(trainer.step())
        sent, sent_by = trainer.ledger().total_sent(), dict(trainer.ledger().sent)
        diary = list(comm.ledger.events)
        trainer.settle()
        live = comm.ledger.live() - held(tensors_in(state)) if watched else 0
        kept = trainer.held()
        full = trainer.full_parameters()
        return Run(full, reports, kept, live, sent, sent_by, diary, state, losses)


def backward(
    trainer: Trainer, model: nn.Module, case: Case, step: int, rank: int, poison: float | None = None
) -> list[float]:
    """A step's micro-batches, and their losses. Bytes count from here. `poison`: a number in these data."""
    trainer.ledger().clear_traffic()
    trainer.zero_grad()
    losses, device = [], next(model.parameters()).device
    for micro in range(case.micro_batches):
        x = case.data(step, micro, rank).to(device)
        if poison is not None:
            x[0, 0] = poison
        loss = model(x, rank) / case.micro_batches
        losses.append(float(loss.detach()))
        trainer.backward(loss)
        del loss
    return losses


def tensors_in(state: Any) -> list[Tensor]:
    """Every tensor inside a nest of dicts, lists and tuples."""
    if isinstance(state, Tensor):
        return [state]
    inside = (
        state.values() if isinstance(state, Mapping) else state if isinstance(state, (list, tuple)) else []
    )
    return [tensor for item in inside for tensor in tensors_in(item)]


def reference(case: Case, world_size: int, none_is_zero: bool) -> dict[str, Tensor]:
    """The same case on one process, over everybody's data, with PyTorch's own Adam.

    `none_is_zero`: a parameter without gradient counts as one with gradient zero. PyTorch leaves it alone.
    """
    model = case.model()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = case.groups(model) or [{"params": trained}]
    groups = [{**g, "params": [p for p in g["params"] if p.requires_grad]} for g in groups]
    optimizer = TorchsAdam(groups, case.decoupled, lr=0.01, weight_decay=case.weight_decay)
    for step in range(case.steps):
        model.zero_grad()
        for rank in range(world_size):
            for micro in range(case.micro_batches):
                loss = model(case.data(step, micro, rank), rank) / (world_size * case.micro_batches)
                loss.backward()
        for p in trained if none_is_zero else ():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if case.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(trained, case.max_grad_norm)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def sizes(case: Case, stage: int) -> list[int]:
    """The pieces that this stage cuts, for the formulas: groups of trainable parameters, or single ones."""
    model = case.model()
    if stage == 3:
        return [p.numel() for p in model.parameters() if p.requires_grad]
    groups = case.groups(model) or [{"params": list(model.parameters())}]
    return [sum(p.numel() for p in g["params"] if p.requires_grad) for g in groups]


def frozen_sizes(case: Case) -> list[int]:
    """The parameters that nobody trains."""
    return [p.numel() for p in case.model().parameters() if not p.requires_grad]
