"""What zero_full has shown of a case beside the reference: the differences, in words.

Tolerances. Of a watched case both take gradients at the same parameters ([Note: where gradients are taken]),
so each rank's gradients have the same bits, and only sums over ranks and micro-batches are rounded in another
order: 2**-24 of each addend. What that makes of a tensor is told as a part of how far the tensor has moved.

TIGHT      1e-4 of the way, in every precision. Noise is some 1e-6 of it; the rest is room for Adam, whose
           division by the root of a small variance enlarges the noise of an element whose gradients cancel
ROUNDED    where sums of gradients are rounded to 16 bits (8 or 11 of them are significant) at places that
           depend on the layout: see `rounds_sums`. That is 2**-9 an addend, which Adam enlarges as above.
           Muon rounds its momentum to bf16, where noise decides now and then, and makes small singular
           values up to 485 times as large
AMPLIFIED  both at once: Muon, of sums that are rounded to 16 bits. In a direction whose singular value is
           1/100 of the largest, 2**-9 of the largest is a fifth
FREE       nobody has noted parameters, and they have 16 bits: roundings of whole parameters, 2**-9 of each,
           come back in the next gradients
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.case import LOW, ONE_BIT, Case, Layout, rounds_sums
from tests.fuzz.reference import OneBit, Reference
from tests.fuzz.run import Shown, Values

TIGHT, ROUNDED, AMPLIFIED, FREE = 1e-4, 0.1, 0.3, 0.2
FLOOR = 2.0**-20  # of a tensor's own norm


def tolerance(case: Case) -> float:
    """Of how far a tensor has moved, how much it may be off."""
    if any(layout.precision in LOW for layout, _ in case.legs()) and not case.watched:
        return FREE
    # 0/1 Adam at stage 1 sends roots of the variance in bf16.
    rounds = case.optimizer == "Muon" or (case.optimizer == "ZeroOneAdam" and case.first.stage > 0)
    if case.optimizer == "Muon" and rounds_sums(case):
        return AMPLIFIED
    return ROUNDED if rounds or rounds_sums(case) else TIGHT


class Comparison:
    """Goes through a case, leg by leg."""

    def __init__(self, case: Case) -> None:
        self.case, self.reference, self.tolerance = case, Reference(case), tolerance(case)
        self.worst = 0.0

    def leg(self, number: int, shown: Sequence[Shown]) -> list[str]:
        """Everything that is wrong with it."""
        return list(self._leg(number, shown))

    def _leg(self, number: int, shown: Sequence[Shown]) -> Iterator[str]:
        case, reference = self.case, self.reference
        layout, steps = case.legs()[number]
        reference.begin_leg(layout)
        for place, step in enumerate(steps):
            seen = [each.seen[place] for each in shown] if case.watched else None
            for rank, values in enumerate(seen or ()):
                yield from (f"step {step}, rank {rank}: {text}" for text in self._seen(rank, values))
            want = reference.step(seen)
            yield from (f"step {step}: {text}" for text in self._step(want, shown, place))
        reference.finish_update()
        for rank, each in enumerate(shown):
            if each.differed:
                yield f"rank {rank}: {each.differed} has changed between two uses in one step"
            yield from (f"after leg {number}, rank {rank}: {text}" for text in self._end(rank, each))

    def allowed(self, name: str, master: Tensor | None = None) -> float:
        """How much this parameter's master may be off, as a norm. None: the first rank's master."""
        reference = self.reference
        size = float((reference.masters[name] if master is None else master).detach().norm())
        return self.tolerance * reference.travel[name] + FLOOR * size + self._of_rounding(name, size)

    def _of_rounding(self, name: str, size: float) -> float:
        """What the rounding of a master to 16 bits makes of a norm: what is frozen may have no master."""
        return 2.0**-8 * size if name in self.reference.rounded else 0.0

    def _seen(self, rank: int, values: Values) -> Iterator[str]:
        rule = self.reference.rule
        visible = rule.of_rank(rank) if isinstance(rule, OneBit) else self.reference.visible
        for alias, value in values.items():
            name = self.reference.names[alias]
            if problem := self._rounding(visible[name], value, self.allowed(name, visible[name])):
                yield f"forward has used {alias} with other values: {problem}"

    def _rounding(self, master: Tensor, value: Tensor, room: float) -> str:
        """What is wrong if `value` is no rounding of a number within `room` of the master."""
        if not master.numel():
            return ""
        master = master.detach()
        low, high = (master - room).to(value.dtype), (master + room).to(value.dtype)
        inside = (value >= low) & (value <= high)
        if bool(inside.all()):
            return ""
        off = float((value.float() - master).abs().max())
        return f"off by {off:.3g} where the master may be by {room:.3g}"

    def _step(self, want: dict[str, Any], shown: Sequence[Shown], place: int) -> Iterator[str]:
        losses = want["losses"]
        if self.reference.layout.pipe:  # each rank is told the mean
            flat = [loss for of_rank in losses for loss in of_rank]
            losses = [[sum(flat) / len(flat)]] * len(shown)
        for rank, each in enumerate(shown):
            for got, expected in zip(each.losses[place], losses[rank], strict=True):
                if isfinite(expected) and not abs(got - expected) <= self.loss_room() * abs(expected):
                    yield f"rank {rank} has the loss {got:.7g}, not {expected:.7g}"
            if each.applied[place] != want["applied"]:
                yield f"rank {rank}: applied is {each.applied[place]}, not {want['applied']}"
            if each.scales[place] != want["scale"]:
                yield f"rank {rank}: the loss scale is {each.scales[place]}, not {want['scale']}"
            norm = each.norms[place]
            told = norm is not None and want["norm"] is not None and isfinite(want["norm"])
            if told and not abs(norm - want["norm"]) <= self.norm_room() * want["norm"]:
                yield f"rank {rank}: the gradients' norm is {norm:.7g}, not {want['norm']:.7g}"

    def loss_room(self) -> float:
        """Of a loss. Where parameters have the same values on both sides, only its own sum is rounded."""
        return 1e-5 if self.tolerance == TIGHT else self.tolerance

    def norm_room(self) -> float:
        """Of a norm."""
        return 1e-5 if self.tolerance == TIGHT else self.tolerance

    def _end(self, rank: int, shown: Shown) -> Iterator[str]:
        reference = self.reference
        yield from self._counters(shown)
        rule = reference.rule
        masters = rule.of_rank(rank) if isinstance(rule, OneBit) else reference.masters
        for name, value in shown.values.items():
            if problem := self._rounding(masters[name], value, self.allowed(name, masters[name])):
                yield f"{name}: {problem}"
        for name, master in shown.masters.items():
            room = self.allowed(name, masters[name])
            yield from self._near(f"master of {name}", master, masters[name], room)
            yield from self._state(name, shown.state[name])

    def _counters(self, shown: Shown) -> Iterator[str]:
        reference = self.reference
        want = {"global_steps": reference.steps, "skipped_steps": reference.skipped}
        for key, expected in want.items():
            if shown.counters[key] != expected:
                yield f"{key} is {shown.counters[key]}, not {expected}"

    def _near(self, what: str, got: Tensor, want: Tensor, room: float) -> Iterator[str]:
        if got.shape != want.shape:
            yield f"{what} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
            return
        off = float((got.double() - want.detach().double()).norm())
        if room:
            self.worst = max(self.worst, off / room)
        if not off <= room:
            yield f"{what} is off by {off:.3g}, and may be by {room:.3g}"

    def _state(self, name: str, state: Values) -> Iterator[str]:
        want = self.reference.rule.state_of(name)
        if want.keys() != state.keys() and self.reference.masters[name].numel():
            yield f"state of {name} has {sorted(state)}, not {sorted(want)}"
            return
        for entry in want.keys() & state.keys():
            if entry == "step":
                if float(state[entry]) != float(want[entry]):
                    yield f"step of {name} is {float(state[entry]):g}, not {float(want[entry]):g}"
                continue
            peak = self.reference.peaks.get((name, entry), 0.0)
            # Decay brings a master's rounding into gradients, which it may cancel, and a square doubles it.
            room = self.tolerance * peak + 4 * self._of_rounding(name, peak)
            yield from self._near(f"{entry} of {name}", state[entry], want[entry], room)


def pipelines(case: Case, layout: Layout, shown: Sequence[Shown]) -> tuple[list[Shown], list[str]]:
    """Put together what the ranks of each pipeline show, by data rank; and what they disagree in."""
    found, problems = [], list[str]()
    for rank in range(layout.world):
        mine = shown[rank :: layout.world]
        whole = replace(mine[0], seen=[dict(seen) for seen in mine[0].seen])
        whole.values, whole.masters, whole.state = dict(whole.values), dict(whole.masters), dict(whole.state)
        for place, each in enumerate(mine[1:], 1):
            for what in ("losses", "norms", "applied", "scales", "counters"):
                one, other = getattr(whole, what), getattr(each, what)
                if repr(one) != repr(other):  # a NaN is equal to itself
                    problems.append(f"{what}: {one} at place 0 of a pipeline, {other} at place {place}")
            for kind in ("values", "masters", "state"):
                problems += _joined(kind, getattr(whole, kind), getattr(each, kind))
            for seen, more in zip(whole.seen, each.seen, strict=True):
                problems += _joined("used values", seen, more)
            whole.differed = whole.differed or each.differed
        trained = {f"parts.{use.part}." for use in case.uses} | {"head."}
        missing = [start for start in trained if not any(name.startswith(start) for name in whole.values)]
        problems += [f"no rank of the pipeline has {start}*" for start in missing]
        found.append(whole)
    return found, problems


def _joined(kind: str, into: dict[str, Any], more: dict[str, Any]) -> Iterator[str]:
    """Add what another place has. Copies of tied layers must be equal to the last bit."""
    for name, value in more.items():
        if name in into and repr(_bits(into[name])) != repr(_bits(value)):
            yield f"{kind} of {name} differ between the stages that it is tied to"
        into[name] = value


def _bits(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float().tolist()
    return {key: _bits(each) for key, each in value.items()}


def everywhere_equal(case: Case, shown: Sequence[Shown]) -> Iterator[str]:
    """What differs between ranks, of what must have the same bits on all of them."""
    if case.optimizer in ONE_BIT:
        return
    first = shown[0]
    for rank, each in enumerate(shown[1:], 1):
        for name, value in first.values.items():
            if not torch.equal(value, each.values[name]) and bool(value.isfinite().all()):
                yield f"{name} differs between rank 0 and rank {rank}"
