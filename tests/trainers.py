"""One protocol for everyone who shards, and who can be put behind it.

The exercises, zero_min and zero_full are tested through `Trainer`. It lives here so that neither
package depends on the other; each implementation gets a thin adapter.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import zero_min
from zero_min.comm import Comm
from zero_min.ledger import Ledger, held


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did."""

    applied: bool
    grad_norm: float | None
    scale: float = 1.0


class Trainer(Protocol):
    def backward(self, loss: Tensor) -> None: ...
    def step(self) -> StepReport: ...
    def zero_grad(self) -> None: ...
    def full_parameters(self) -> dict[str, Tensor]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def ledger(self) -> Ledger: ...
    def held(self) -> dict[str, int]: ...


class MinTrainer:
    """A `Stage0`, `Stage1`, ... of zero_min, with a learner's file in it or without."""

    def __init__(self, stage: Any, comm: Comm) -> None:
        self.stage, self.comm = stage, comm

    def backward(self, loss: Tensor) -> None:
        self.stage.backward(loss)

    def step(self) -> StepReport:
        return StepReport(applied=True, grad_norm=self.stage.step())

    def zero_grad(self) -> None:
        self.stage.zero_grad()

    def full_parameters(self) -> dict[str, Tensor]:
        with getattr(self.stage, "gathered", nullcontext)():
            return {name: p.detach().clone() for name, p in self.stage.model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return self.stage.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.stage.load_state_dict(state)

    def ledger(self) -> Ledger:
        return self.comm.ledger

    def held(self) -> dict[str, int]:
        return {kind: held(tensors) for kind, tensors in self.stage.holdings().items()}


@dataclass(frozen=True)
class Subject:
    """Who is on trial: an implementation and a stage. Small enough to send to another process."""

    impl: str
    stage: int

    def __str__(self) -> str:
        return f"{self.impl}-stage{self.stage}"

    def build(
        self, model: nn.Module, comm: Comm, groups: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> Trainer:
        """Put the model under this stage's care."""
        if self.stage != 2:
            options.pop("bucket_size", None)
        options["optimizer"] = getattr(zero_min, options["optimizer"])
        return MinTrainer(zero_min.STAGES[self.stage](model, comm, groups, **options), comm)


def torch_adam(groups: Any, decoupled: bool, **options: Any) -> torch.optim.Optimizer:
    """The referee: PyTorch's own optimizer."""
    return (torch.optim.AdamW if decoupled else torch.optim.Adam)(groups, **options)
