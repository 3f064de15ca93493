"""A case in plain torch: one process computes every rank's gradients, and one optimizer steps fp32 masters.

[Note: where gradients are taken] In 16 bits, and after many steps in any precision, two right runs drift
apart: a master that lies beside a rounding boundary rounds to one side here and to the other there. So a
watched run notes with which values zero_full's forward has used each parameter, and the reference takes its
gradients there. Its masters, moments and counters are its own from the first step to the last; that the noted
values are what these masters round to is checked, too. What is left to differ is the order of sums in fp32.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tests.conformance.oracles import PlainLion
from tests.fuzz.case import LOW, ONE_BIT, OPTIMIZERS, Case, Layout, group_options
from tests.fuzz.model import Net, data, freeze
from tests.fuzz.run import DTYPES, Values, decayed, trained
from tests.zero_full.one_bit_model import By, Problem, model_of
from tests.zero_full.plain_lamb import PlainLamb

CLIP_EPSILON = 1e-6


class LossScale:
    """The factor of losses, by DeepSpeed's rule, with a hysteresis of 1."""

    def __init__(self, precision: str) -> None:
        self.is_dynamic = precision == "fp16, dynamic"
        self.scale = {"fp16": 64.0, "fp16, dynamic": 256.0}.get(precision, 1.0)
        self.good = 0  # steps since the last overflow

    def update(self, overflow: bool) -> None:
        if not self.is_dynamic:
            return
        if overflow:
            self.scale, self.good = max(self.scale / 2, 1.0), 0
            return
        # The first good step after an overflow, or of the run, does not count.
        if self.good and self.good % 2 == 0:
            self.scale *= 2
        self.good += 1


class Reference:
    """The run so far."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.net = Net(case.width, case.parts, case.uses, case.seed)
        for p in (
            self.net.parameters()
        ):  # as flat buffers have them: of other strides, 16 bits are rounded otherwise
            p.data = p.data.contiguous()
        first = {p: name for name, p in self.net.named_parameters()}
        self.names = {name: first[p] for name, p in self.net.named_parameters(remove_duplicate=False)}
        self.masters = {name: nn.Parameter(p.detach().clone()) for name, p in self.net.named_parameters()}
        self.visible = {name: p.detach().clone() for name, p in self.masters.items()}
        self.rounded: set[str] = set()  # whose masters may come from 16 bits
        self.travel = dict.fromkeys(self.masters, 0.0)  # the lengths of all updates
        self.peaks: dict[tuple[str, str], float] = {}  # the largest norm of each entry of the state
        self.updates = self.since = self.skipped = self.steps = 0
        self.scaler = LossScale(case.first.precision)
        given = set(trained(case, self.net))
        self.trained = [name for name, p in self.net.named_parameters() if p in given]
        self.rule: Rule = (OneBit if case.optimizer in ONE_BIT else Whole)(self)

    def begin_leg(self, layout: Layout) -> None:
        """Another engine goes on."""
        self.layout, self.since = layout, 0
        self.finish_update()
        freeze(self.net, self.case.parts, 0)
        if layout.precision in LOW:
            self.rounded |= {n for n in self.masters if not self.net.get_parameter(n).requires_grad}

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES.get(self.layout.precision, torch.float32)

    def finish_update(self) -> None:
        """Forward sees every update."""
        self.visible = {name: p.detach().clone() for name, p in self.masters.items()}

    # One step ------------------------------------------------------------------------------------

    def step(self, seen: Sequence[Values] | None) -> dict[str, Any]:
        """Take it; `seen`: by rank, where gradients are taken. Returns what must be equal."""
        step, self.steps = self.steps, self.steps + 1
        before = {name: p.detach().clone() for name, p in self.masters.items()}
        factor = decayed(self.updates) if self.case.decay else 1.0
        losses, norm, applied = self.rule.step(step, seen, factor)
        delay = "delayed" in self.layout.tier and applied
        self.finish_update()
        if applied:
            self.updates += 1
            self.since += 1
            counted = self.updates if self.rule.counts_steps else self.since
            if delay and counted > 1:
                self.visible = before
            for name, p in self.masters.items():
                self.travel[name] += float((p.detach() - before[name]).norm())
            for name in self.masters:
                for entry, value in self.rule.state_of(name).items():
                    peak = self.peaks.get((name, entry), 0.0)
                    self.peaks[name, entry] = max(peak, float(value.norm()))
        else:
            self.skipped += 1
        self.scaler.update(not applied)
        return {"losses": losses, "norm": norm, "applied": applied, "scale": self.scaler.scale}

    def values_for(self, seen: Values | None) -> Values:
        """Where a rank's gradients are taken: what was noted, and the rest as the masters round."""
        found = {name: value.to(self.dtype) for name, value in self.visible.items()}
        for alias, value in (seen or {}).items():
            found[self.names[alias]] = value
        return found

    def local(self, step: int, rank: int, values: Mapping[str, Tensor]) -> tuple[list[float], Values]:
        """A rank's losses, and the sums of its gradients over the micro-batches, with the loss scale."""
        case, net = self.case, self.net.to(self.dtype)
        freeze(net, case.parts, step)
        autocast = self.layout.precision == "autocast"
        losses, sums = [], dict[str, Tensor]()
        for name, p in net.named_parameters():
            p.data.copy_(values[name])
        for micro in range(case.micro_batches):
            x, ids = data(case.seed, step, micro, rank, case.width)
            if case.poison == (step, rank):
                x[0, 0] = float("inf")
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss = net(x.to(self.dtype), ids, rank, micro)
            losses.append(float(loss.detach()))
            net.zero_grad()
            (loss / case.micro_batches * self.scaler.scale).backward()
            for name, p in net.named_parameters():
                if p.grad is not None:
                    sums[name] = sums.get(name, 0.0) + p.grad.float()
        return losses, sums


class Rule:
    """How masters are stepped."""

    counts_steps = True  # its state has a "step"

    def step(self, step: int, seen: Sequence[Values] | None, factor: float) -> tuple[Any, Any, bool]:
        """(losses by rank, norm, whether it was applied)."""
        raise NotImplementedError

    def state_of(self, name: str) -> Values:
        """What is kept of a parameter, by zero_full's names of it."""
        return {}


class Uncorrected(torch.optim.Adam):
    """Adam or AdamW without bias correction, by the formula."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step all parameters with a gradient."""
        for group in self.param_groups:
            lr, decay, (near, far) = group["lr"], group["weight_decay"], group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                if not (state := self.state[p]):
                    zeros = {entry: torch.zeros_like(p) for entry in ("exp_avg", "exp_avg_sq")}
                    state.update(zeros, step=torch.tensor(0.0))
                gradient = p.grad if group["decoupled_weight_decay"] else p.grad + decay * p
                state["step"] += 1
                state["exp_avg"].mul_(near).add_(gradient, alpha=1 - near)
                state["exp_avg_sq"].mul_(far).addcmul_(gradient, gradient, value=1 - far)
                if group["decoupled_weight_decay"]:
                    p.mul_(1 - lr * decay)
                p.sub_(lr * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"]))


class Whole(Rule):
    """An optimizer that steps averaged gradients."""

    def __init__(self, reference: Reference) -> None:
        self.reference, case = reference, reference.case
        self.groups = self._groups()
        options = {k: v for k, v in OPTIMIZERS[case.optimizer].items() if k != "adam_w_mode"}
        self.counts_steps = case.optimizer not in ("SGD", "Lion", "Muon")
        self.by: list[Any]
        if case.optimizer == "Muon":
            self.by = list(self._muon())
        elif case.optimizer == "Lion":
            self.by = [PlainLion(self.groups, options["lr"], options["betas"], 0.0)]
        elif case.optimizer == "Lamb":
            self.by = [PlainLamb(self.groups, **options)]
        elif not case.corrects:
            self.by = [Uncorrected(self.groups, decoupled_weight_decay=case.optimizer == "AdamW", **options)]
        else:
            self.by = [getattr(torch.optim, case.optimizer)(self.groups, **options)]
        self.param_groups = [group for each in self.by for group in _groups_of(each)]
        self.rates = [group["lr"] for group in self.param_groups]

    def _groups(self) -> list[dict[str, Any]]:
        r = self.reference
        halves = [
            [n for n in r.trained if (r.masters[n].dim() > 1) == matrices] for matrices in (True, False)
        ]
        found = []
        for half, dims in zip(halves, (2, 1), strict=True):
            if half:
                lr = OPTIMIZERS[r.case.optimizer]["lr"]
                found.append(
                    {"params": [r.masters[n] for n in half], "lr": lr, **group_options(r.case, dims)}
                )
        return found

    def _muon(self) -> Iterator[torch.optim.Optimizer]:
        r, options = self.reference, OPTIMIZERS["Muon"]
        embeddings = {
            n for n in r.trained if isinstance(r.net.get_submodule(n.rpartition(".")[0]), nn.Embedding)
        }
        names = {p: name for name, p in r.masters.items()}
        for hidden in (True, False):
            groups = []
            for group in self.groups:
                params = [
                    p
                    for p in group["params"]
                    if (p.dim() == 2 and p.numel() > 0 and names[p] not in embeddings) == hidden
                ]
                groups += [{**group, "params": params}] if params else []
            if groups and hidden:
                yield torch.optim.Muon(groups, momentum=options["momentum"])
            elif groups:
                yield torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10)

    def step(self, step: int, seen: Sequence[Values] | None, factor: float) -> tuple[Any, Any, bool]:
        """Average, check, clip, step."""
        r, world = self.reference, self.reference.layout.world
        pairs = [r.local(step, rank, r.values_for(seen[rank] if seen else None)) for rank in range(world)]
        sums: Values = {}
        for _, own in pairs:
            for name, gradient in own.items():
                sums[name] = sums.get(name, 0.0) + gradient
        gradients = {name: total / world / r.scaler.scale for name, total in sums.items()}
        squares = [gradient.double().square().sum() for gradient in gradients.values()]
        norm = float(torch.stack(squares).sum().sqrt())
        checked = r.layout.precision in LOW or r.case.clip > 0
        finite = norm == norm and norm != float("inf")
        if checked and not finite:
            return [losses for losses, _ in pairs], norm, False
        clipped = min(1.0, r.case.clip / (norm + CLIP_EPSILON)) if r.case.clip else 1.0
        for name, p in r.masters.items():
            p.grad = gradients[name] * clipped if name in gradients else None
        for group, rate in zip(self.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        for each in self.by:
            each.step()
        return [losses for losses, _ in pairs], norm if checked else None, True

    def state_of(self, name: str) -> Values:
        """As torch names it."""
        p = self.reference.masters[name]
        if isinstance(self.by[0], PlainLion):
            return {"exp_avg": self.by[0].momenta[p]} if p in self.by[0].momenta else {}
        if isinstance(self.by[0], PlainLamb):
            kept = self.by[0].state.get(p, {})
            step = {"step": torch.tensor(float(kept["t"]))} if kept else {}
            return {**step, **{e: kept[k] for e, k in (("exp_avg", "m"), ("exp_avg_sq", "v")) if kept}}
        found = {k: v for each in self.by for k, v in each.state.get(p, {}).items()}
        return {entry: value for entry, value in found.items() if isinstance(value, Tensor)}


def _groups_of(optimizer: Any) -> list[dict[str, Any]]:
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else optimizer.groups
    return list(groups)


class OneBit(Rule):
    """1-bit Adam and LAMB and 0/1 Adam, in fp64: every rank has parameters of its own."""

    def __init__(self, reference: Reference) -> None:
        self.reference, case = reference, reference.case
        options = OPTIMIZERS[case.optimizer]
        start = {n: reference.masters[n].detach() for n in reference.trained if reference.masters[n].numel()}
        self.options = {n: {**options, **group_options(case, reference.masters[n].dim())} for n in start}
        self.rates = {n: group["lr"] for n, group in self.options.items()}
        self.losses: list[list[float]] = []
        self.seen: Sequence[Values] | None = None

        def gradients(step: int, rank: int, x: By) -> By:
            values = reference.values_for(None) | {n: v.to(reference.dtype) for n, v in x.items()}
            values |= {
                reference.names[alias]: v for alias, v in (self.seen[rank] if self.seen else {}).items()
            }
            losses, sums = reference.local(step, rank, values)
            self.losses.append(losses)
            return {n: g.double() / reference.scaler.scale for n, g in sums.items() if n in start}

        stage = case.first.stage
        self.problem = Problem(case.optimizer, options, start, self.options, gradients, case.clip, stage)
        self.model: Any = None

    def step(self, step: int, seen: Sequence[Values] | None, factor: float) -> tuple[Any, Any, bool]:
        """All ranks' step."""
        self.model = self.model or model_of(self.reference.layout.world, self.problem)
        for name, group in self.options.items():
            group["lr"] = self.rates[name] * factor
        self.losses, self.seen = [], seen
        self.model.step(step)
        for name, value in self.model.x[0].items():
            self.reference.masters[name].data.copy_(value)
        return list(self.losses), None, True

    def of_rank(self, rank: int) -> Values:
        """What this rank has."""
        if self.model is None:
            return self.reference.visible
        return {**self.reference.masters, **{n: v.float() for n, v in self.model.x[rank].items()}}
