"""What every rank should have after every step, by each rule: one process computes it over all data."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.cases import Case
from tests.zero_full.one_bit_model import By, Problem, model_of
from tests.zero_full.plain_lamb import PlainLamb

LR = 0.01
Groups = list[dict[str, Any]]


def wanted(case: Case, world_size: int, stage: int) -> list[list[By]]:
    """The trained parameters of each rank after each step."""
    assert case.rule is not None
    if case.rule.name in PLAIN:
        return [[each] * world_size for each in of_whole_batch(case, world_size, case.rule.name)]
    model, found = model_of(world_size, problem_of(case, stage)), []
    for step in range(case.steps):
        model.step(step)
        found.append([{name: x.clone() for name, x in each.items()} for each in model.x])
    return found


# By exact gradients ------------------------------------------------------------------------------


class PlainLion:
    """The sign of the momentum as it leans towards the gradient."""

    def __init__(self, groups: Groups, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        self.groups = [{"lr": lr, "weight_decay": weight_decay, **group} for group in groups]
        self.betas, self.momenta = betas, dict[Tensor, Tensor]()

    @torch.no_grad()
    def step(self) -> None:
        """All that have a gradient."""
        near, far = self.betas
        for group in self.groups:
            for p in (p for p in group["params"] if p.grad is not None):
                m = self.momenta.get(p, torch.zeros_like(p))
                way = (near * m + (1 - near) * p.grad).sign()
                p.copy_(p * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * way)
                self.momenta[p] = far * m + (1 - far) * p.grad


class PlainAdamW:
    """Torch's, or without bias correction by the formula."""

    def __init__(self, groups: Groups, lr: float, bias_correction: bool = True, **options: Any) -> None:
        self.torchs = torch.optim.AdamW(groups, lr=lr, **options)
        self.bias_correction = bias_correction

    @torch.no_grad()
    def step(self) -> None:
        """All that have a gradient."""
        if self.bias_correction:
            self.torchs.step()
            return
        for group in self.torchs.param_groups:
            (near, far), lr = group["betas"], group["lr"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.torchs.state[p]
                m, v = (state.get(name, torch.zeros_like(p)) for name in ("m", "v"))
                m, v = near * m + (1 - near) * p.grad, far * v + (1 - far) * p.grad**2
                p.copy_(p * (1 - lr * group["weight_decay"]) - lr * m / (v.sqrt() + group["eps"]))
                state.update(m=m, v=v)


class TorchsMuon:
    """Torch's own for matrices, and its AdamW for all else."""

    def __init__(self, groups: Groups, lr: float, momentum: float, weight_decay: float) -> None:
        matrices, others = (_those(groups, is_matrix) for is_matrix in (True, False))
        adams: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-10}
        decay = {"lr": lr, "weight_decay": weight_decay}
        self.both: list[Any] = [torch.optim.Muon(matrices, momentum=momentum, **decay)] if matrices else []
        self.both += [torch.optim.AdamW(others, **adams, **decay)] if others else []

    def step(self) -> None:
        """Both."""
        for each in self.both:
            each.step()


def _those(groups: Groups, are_matrices: bool) -> Groups:
    found = []
    for group in groups:
        params = [p for p in group["params"] if (p.dim() == 2 and p.numel() > 0) == are_matrices]
        found += [{**group, "params": params}] if params else []
    return found


PLAIN: dict[str, Any] = {
    "Lion": PlainLion,
    "Lamb": PlainLamb,
    "Muon": TorchsMuon,
    "AdamW": PlainAdamW,
}
LEARN_AS = {"OneBitAdam": "AdamW", "OneBitLamb": "Lamb", "ZeroOneAdam": "AdamW"}  # in their exact steps


def of_whole_batch(case: Case, world_size: int, plain: str) -> list[By]:
    """By the plain rule of this name."""
    assert case.rule is not None
    model = case.model()
    groups = [{**group, "params": [*group["params"]]} for group in _groups(case, model)]
    taken = ("betas", "eps", "momentum", *(["bias_correction"] if plain == case.rule.name == "AdamW" else []))
    options = {name: value for name, value in case.rule.params.items() if name in taken}
    optimizer = PLAIN[plain](groups, lr=LR, weight_decay=case.weight_decay, **options)
    found = []
    for step in range(case.steps):
        model.zero_grad()
        for rank in range(world_size):
            for micro in range(case.micro_batches):
                loss = model(case.data(step, micro, rank), rank) / (world_size * case.micro_batches)
                loss.backward()
        if case.max_grad_norm is not None:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], case.max_grad_norm)
        optimizer.step()
        found.append({name: p.detach().clone() for name, p in _trained(model).items()})
    return found


def _groups(case: Case, model: nn.Module) -> Groups:
    groups = case.groups(model) or [{"params": list(model.parameters())}]
    return [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


# At one bit --------------------------------------------------------------------------------------


def problem_of(case: Case, stage: int) -> Problem:
    """A case, as the model of one-bit rules takes it. Of what has no elements there is nothing to say."""
    assert case.rule is not None
    model = case.model().double()
    named = {name: p for name, p in _trained(model).items() if p.numel()}
    names = {p: name for name, p in named.items()}
    default = {"lr": LR, "weight_decay": case.weight_decay, **case.rule.params}
    by_group = [({**default, **group}, group["params"]) for group in _groups(case, model)]

    def gradients(step: int, rank: int, x: By) -> By:
        model.zero_grad()
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(x[name])
        for micro in range(case.micro_batches):
            (model(case.data(step, micro, rank).double(), rank) / case.micro_batches).backward()
        return {name: p.grad.clone() for name, p in named.items() if p.grad is not None}

    groups: Mapping[str, Any] = {names[p]: group for group, params in by_group for p in params if p in names}
    start = {name: p.detach().clone() for name, p in named.items()}
    clip = case.max_grad_norm or 0.0
    return Problem(case.rule.name, case.rule.params, start, groups, gradients, clip, stage)
