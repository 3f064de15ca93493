"""One protocol for everyone who shards, and who can be put behind it.

The exercises, zero_min and zero_full are tested through `Trainer`. It lives here so that neither
package depends on the other; each implementation gets a thin adapter.
"""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lessons.registry import Parts
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
    """A `Stage0`, `Stage1`, ... of zero_min, or of a learner's file in the same shape."""

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
    file: str | None = None  # where a learner's answer lies

    def __str__(self) -> str:
        return f"{self.impl}-stage{self.stage}"

    def parts(self) -> Parts:
        """zero_min's classes, or the learner's where their file has them."""
        return Parts(load_file(self.file) if self.file else None)

    def build(
        self, model: nn.Module, comm: Comm, groups: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> Trainer:
        """Put the model under this stage's care."""
        if self.stage != 2:
            options.pop("bucket_size", None)
        parts = self.parts()
        options["optimizer"] = getattr(parts, options.pop("optimizer"))
        return MinTrainer(getattr(parts, f"Stage{self.stage}")(model, comm, groups, **options), comm)


def load_file(path: str) -> ModuleType:
    """Import a Python file that is not on the path, once."""
    name = f"work_{Path(path).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, path
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def torch_adam(groups: Any, decoupled: bool, **options: Any) -> torch.optim.Optimizer:
    """The referee: PyTorch's own optimizer."""
    return (torch.optim.AdamW if decoupled else torch.optim.Adam)(groups, **options)
