"""Delayed updates: bit for bit the rule that the guide tells, beside the next passes, and nothing lost."""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import zero_full
from tests.slow_copies import slow_copies
from tests.worlds import POOL
from tests.zero_full.runs import Net, config, data
from zero_full.config import ConfigError, resolve
from zero_full.offload import HostTier
from zero_full.optim.fused_adam import FusedAdam
from zero_full.optim.step import Peers, Piece
from zero_full.precision.dtypes import Dtypes

STEPS, AFTER, LR, CLIP = 9, 3, 0.01, 0.05
SKIPPED = (2, 5, 6)  # steps whose gradients overflow, where anybody looks
KEYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "clipped": {"gradient_clipping": CLIP},
    "accumulated": {"gradient_accumulation_steps": 2, "gradient_clipping": CLIP},
    "bf16": {"bf16": {"enabled": True}, "gradient_clipping": CLIP},
}


def waiting(stage: int, after: int | None = AFTER, **keys: Any) -> dict[str, Any]:
    """A config; every parameter is cut at stage 3."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 150, "sub_group_size": 60}
    zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 100} if stage == 3 else {}
    zero["offload_optimizer"] = {"device": "cpu", "delay_update_after": after}
    return config(stage, zero_optimization=zero, **keys)


def engine_of(stage: int, after: int | None = AFTER, **keys: Any) -> Any:
    torch.manual_seed(0)
    return zero_full.initialize(model=Net(), config=waiting(stage, after, **keys))[0]


def one_step(engine: Any, step: int, rank: int, skips: bool = False) -> None:
    """Of training, at a learning rate of its own."""
    for group in engine.optimizer.param_groups:
        group["lr"] = LR * 0.9**step
    dtype, micros = next(engine.parameters()).dtype, engine.gradient_accumulation_steps()
    for micro in range(micros):
        inf = float("inf") if skips and step in SKIPPED and micro == 0 and rank == 0 else 1.0
        engine.backward(engine(data(step, micro, rank, dtype)) * inf)
        engine.step()
    for group in engine.optimizer.param_groups:
        group["lr"] = 100.0  # that is nobody's


def of_engine(engine: Any) -> list[Tensor]:
    """Parameters, masters and state, whole."""
    params = list(engine.parameters())
    masters = [zero_full.safe_get_full_fp32_param(p) for p in params]
    moments = [zero_full.safe_get_full_optimizer_state(p, "exp_avg_sq") for p in params]
    found = [*engine.module_state_dict().values(), *masters, *moments]
    return [tensor for tensor in found if tensor is not None]


def _sum(lists: list[list[Tensor]]) -> list[Tensor]:
    """Tensor by tensor, in this order."""
    total = [tensor.clone() for tensor in lists[0]]
    for more in lists[1:]:
        total = [a + b for a, b in zip(total, more, strict=True)]
    return total


# The rule ----------------------------------------------------------------------------------------


@dataclass
class Referee:
    """The rule in plain PyTorch, in one process, with everybody's data."""

    stage: int
    ranks: int
    micros: int
    clip: float
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.model = Net()
        self.masters = [p.detach().clone() for p in self.model.parameters()]
        self.params = list(self.model.to(self.dtype).parameters())
        self.base = torch.optim.AdamW(self.masters, lr=LR, weight_decay=0.1)
        self.stepper = FusedAdam(self.base, self.base.step, Dtypes())
        self.states: list[dict[str, Any]] = [{} for _ in self.params]
        self.is_behind, self.taken = False, 0

    def gradients(self, step: int, skips: bool) -> list[Tensor]:
        """The average of everybody's, in fp32; added up as it is at this stage."""
        pairs = [(micro, rank) for micro in range(self.micros) for rank in range(self.ranks)]
        found = {(micro, rank): self._gradients(step, micro, rank, skips) for micro, rank in pairs}
        micros, ranks = range(self.micros), range(self.ranks)
        if self.stage == 1:
            own = [_sum([found[micro, rank] for micro in micros]) for rank in ranks]
            return [total / self.ranks for total in _sum(own)]
        averages = [[t / self.ranks for t in _sum([found[micro, rank] for rank in ranks])] for micro in micros]
        return _sum(averages)

    def _gradients(self, step: int, micro: int, rank: int, skips: bool) -> list[Tensor]:
        inf = float("inf") if skips and step in SKIPPED and micro == 0 and rank == 0 else 1.0
        loss = self.model(data(step, micro, rank, self.dtype)) * inf / self.micros
        return [gradient.float() for gradient in torch.autograd.grad(loss, self.params)]

    def step(self, step: int, after: int, skips: bool) -> None:
        """Gradients of the parameters as they are; then the last update counts; then the next is made."""
        gradients = self.gradients(step, skips)
        if self.is_behind:
            self.publish()
        norm = float(torch.cat([g.reshape(-1) for g in gradients]).double().norm())
        if norm != norm or norm == float("inf"):
            return
        factor = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
        self.base.param_groups[0]["lr"] = LR * 0.9**step
        pieces = [
            Piece("", m.shape, (0, m.numel()), 0, m, g, state=state)
            for m, g, state in zip(self.masters, gradients, self.states, strict=True)
        ]
        self.stepper.step(pieces, factor, Peers())
        self.taken += 1
        self.is_behind = self.taken > after
        if not self.is_behind:
            self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Parameters follow their masters."""
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)
        self.is_behind = False


def run(comm: Any, stage: int, name: str, after: int, copies: bool) -> tuple[list[Tensor], list[Tensor], Any]:
    """Whole parameters, masters and state at the end; parameters in the middle; and the losses."""
    keys, skips = KEYS[name], name != "fp32"
    with slow_copies(1e7) if copies else nullcontext():
        engine = engine_of(stage, after, **keys)
        for step in range(STEPS):
            one_step(engine, step, comm.rank, skips)
        with zero_full.GatheredParameters(list(engine.parameters())):
            behind = [p.detach().float().clone() for p in engine.parameters()]
        found = of_engine(engine)
        is_behind = engine.optimizer.delayed.current is not None
        engine.destroy()
    return found, behind, is_behind


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize(("world", "stage"), [(1, 1), (1, 2), (1, 3), (2, 1), (2, 3), (3, 2), (3, 3)])
def test_the_rule(world: int, stage: int, name: str, copies: bool) -> None:
    keys = KEYS[name]
    micros, clip = keys.get("gradient_accumulation_steps", 1), keys.get("gradient_clipping", 0.0)
    dtype = torch.bfloat16 if "bf16" in keys else torch.float32
    for after in (0, AFTER):
        referee = Referee(stage, world, micros, clip, dtype)
        for step in range(STEPS):
            referee.step(step, after, name != "fp32")
        assert referee.is_behind
        expected_behind = [p.detach().float().clone() for p in referee.params]
        referee.publish()
        moments = [state["exp_avg_sq"] for state in referee.states]
        expected = [*(p.detach() for p in referee.params), *referee.masters, *moments]
        for found, behind, is_behind in POOL.run(run, world, stage, name, after, copies):
            assert not is_behind
            assert any(not torch.equal(a, b.float()) for a, b in zip(behind, expected, strict=False))
            for ours, theirs in zip([*behind, *found], [*expected_behind, *expected], strict=True):
                assert torch.equal(ours, theirs), (ours - theirs).abs().max()
