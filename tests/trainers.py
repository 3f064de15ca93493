"""One protocol for everyone who shards, and who can be put behind it.

The exercises, zero_min and zero_full are tested through `Trainer`. It lives here so that neither
package depends on the other; each implementation gets a thin adapter.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw

import zero_min
from tests.rules import Rule
from zero_min.comm import Comm
from zero_min.ledger import Ledger, held

ADAM = "adam"  # in the diary: the optimizer's step begins


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
    def ledger(self) -> Any: ...  # clear_traffic(), total_sent(), sent by kind of collective
    def held(self) -> dict[str, int]: ...
    def settle(self) -> None: ...  # the transport lets go of what it holds for itself


def noting(name: str, comm: Comm) -> type[zero_min.Adam]:
    """An optimizer of zero_min by its name, that writes into the rank's diary when its step begins."""

    class Noting(getattr(zero_min, name)):  # type: ignore[misc]
        def step(self) -> None:
            comm.ledger.note(ADAM)
            super().step()

    return Noting


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

    def settle(self) -> None:
        self.comm.settle()


class FullTrainer:
    """An engine of zero_full, driven as a PyTorch loop drives it."""

    def __init__(self, model: nn.Module, groups: Sequence[Mapping[str, Any]] | None, config: Any) -> None:
        import zero_full  # a learner's `check` waits for no import of it, and a release of lessons has none

        given = [dict(group) for group in groups] if groups is not None else None
        self.engine, self.optimizer, _, _ = zero_full.initialize(
            model=model, model_parameters=given, config=config
        )
        self.micro = 0

    def backward(self, loss: Tensor) -> None:
        self.micro += 1
        boundary = self.micro % self.engine.gradient_accumulation_steps() == 0
        self.engine.set_gradient_accumulation_boundary(boundary)
        self.engine.backward(loss, scale_wrt_gas=False)

    def step(self) -> StepReport:
        self.optimizer.step()
        last = self.optimizer.last
        return StepReport(last.applied, last.grad_norm, last.scale)

    def zero_grad(self) -> None:
        self.engine.zero_grad(set_to_none=True)

    def full_parameters(self) -> dict[str, Tensor]:
        state = self.engine.module_state_dict()
        return {name: state[name] for name, _ in self.engine.module.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return self.engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.engine.load_state_dict(state)

    def ledger(self) -> "FullLedger":
        return FullLedger(self.optimizer.communicators.traffic)

    def held(self) -> dict[str, int]:
        holdings = self.optimizer.holdings()
        dealt = {m.param for flat in self.optimizer.sharded.flats for m in flat.members}
        frozen = [p.detach() for p in self.engine.module.parameters() if p not in dealt]
        holdings["parameters"] = [*holdings["parameters"], *frozen]
        return {kind: held(tensors) for kind, tensors in holdings.items()}

    def settle(self) -> None:
        """Nothing is under way after a step."""


class FullLedger:
    """zero_full's traffic under the names that the suite uses."""

    def __init__(self, traffic: Any) -> None:
        self.clear_traffic, self.total_sent, self.sent = traffic.clear, traffic.total, traffic.sent


def full_config(
    stage: int,
    bucket_size: int,
    micro_batches: int,
    optimizer: str,
    max_grad_norm: float | None,
    rule: Rule | None = None,
    **params: Any,
) -> dict[str, Any]:
    """The suite's options as DeepSpeed writes them."""
    if rule is None:
        kind, params = "Adam", {**params, "adam_w_mode": optimizer == "AdamW"}
    else:
        kind, params = rule.name, {**params, **rule.params}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": kind, "params": params},
        "gradient_clipping": max_grad_norm or 0.0,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket_size,
            **(STAGE3 if stage == 3 else {}),
        },
    }


# The formulas know nothing of parameters that stay whole: neither small ones nor those that are used again.
# The suite's ledger sees what the rank's own thread does.
STAGE3 = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "overlap_comm": False}


STAGES_OF = {"min": list(zero_min.STAGES), "full": [0, 1, 2, 3], "mine": list(zero_min.STAGES)}


@dataclass(frozen=True)
class Subject:
    """Who is on trial: an implementation and a stage. Small enough to send to another process."""

    impl: str
    stage: int
    by_messages: bool = field(default=False, kw_only=True)  # zero_full's ranks, which would share memory
    by_staged: bool = field(default=False, kw_only=True)  # the same, as if they shared an accelerator

    def __str__(self) -> str:
        return f"{self.impl}-stage{self.stage}"

    def options(self, case: Any) -> dict[str, Any]:
        """What `build` wants to know of a case."""
        known = {"micro_batches": case.micro_batches, "rule": case.rule} if self.impl == "full" else {}
        return {**case.options(), **known}

    @property
    def counts_no_gradient_as_zero(self) -> bool:
        """zero_min does, as lesson 0 says; zero_full does what PyTorch does."""
        return self.impl != "full"

    @property
    def keeps_a_diary(self) -> bool:
        """Each call, and when Adam begins: zero_min writes it down, zero_full does not."""
        return self.impl != "full"

    def where(self, place: str) -> str:
        """zero_full's ranks are always processes."""
        return "processes" if self.impl == "full" else place

    def build(
        self, model: nn.Module, comm: Comm, groups: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> Trainer:
        """Put the model under this stage's care."""
        if self.impl == "full":
            keys = {**full_config(self.stage, **options), "shared_memory": not self.by_messages}
            if not self.by_staged:
                return FullTrainer(model, groups, keys)
            from tests.staging import staged_transports  # a learner's `check` waits for no import of it

            with staged_transports():
                return FullTrainer(model, groups, keys)
        if self.stage != 2:
            options.pop("bucket_size", None)
        options["optimizer"] = noting(options["optimizer"], comm)
        return MinTrainer(zero_min.STAGES[self.stage](model, comm, groups, **options), comm)


class TorchsAdam:
    """The referee: PyTorch's own formula. Its class would import torch's compiler first, for a second."""

    def __init__(self, groups: Any, decoupled: bool, lr: float, weight_decay: float) -> None:
        self.formula = adamw if decoupled else adam
        self.groups = [{"lr": lr, "weight_decay": weight_decay, **group} for group in groups]
        params = [p for group in self.groups for p in group["params"]]
        self.m, self.v = ({p: torch.zeros_like(p) for p in params} for _ in range(2))
        self.steps = {p: torch.zeros(()) for p in params}

    @torch.no_grad()
    def step(self) -> None:
        """Move what has a gradient."""
        same = {
            "amsgrad": False,
            "maximize": False,
            "foreach": False,
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-8,
        }
        for group in self.groups:
            params = [p for p in group["params"] if p.grad is not None]
            state = [[kept[p] for p in params] for kept in (self.m, self.v)]
            steps = [self.steps[p] for p in params]
            options = {"lr": group["lr"], "weight_decay": group["weight_decay"], **same}
            self.formula(params, [p.grad for p in params], *state, [], steps, **options)
