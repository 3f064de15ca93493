"""What to say about gradients that are inf or NaN: which parameter, from which rank, and was it the loss?"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_full.comm.communicator import Communicator
from zero_full.comm.topology import this_rank
from zero_full.errors import NotFiniteError, ScaleExhaustedError
from zero_full.formatting import listed, ranks_listed
from zero_full.precision.scaler import DynamicScale, StaticScale
from zero_full.shard.group.gradients import Bucket

log = logging.getLogger("zero_full")
SHOWN = 3  # parameters


class NonFinite:
    """What a run has to say about its last step that was not finite."""

    def __init__(self) -> None:
        self.loss: Tensor | None = None  # the sum of a step's losses: one that is not finite spoils it
        self.plain = 0  # of them nobody here has divided so many
        self.partial = False  # the step has losses that nobody knows
        self.keeps_last = False  # for whoever asks for `step_loss`: until the next step it is memory
        self.last: tuple[Tensor, int] | None = None  # the same, of the last step
        self.finding = ""

    def note_loss(self, loss: Tensor) -> None:
        """Remember a loss of this step, divided by the number of its micro-batches."""
        loss = loss.detach().float()
        self.loss = loss if self.loss is None else self.loss + loss

    def note_plain_loss(self, loss: Tensor | None) -> None:
        """The same for one that autograd has reached: what it was divided by nobody knows.

        None: it was made of several outputs, nobody knows how.
        """
        if loss is None:
            self.partial = True
        else:
            self.plain += 1
            self.note_loss(loss)

    def end_step(self) -> None:
        """The next losses are another step's."""
        is_kept = self.keeps_last and not self.partial
        self.last = (self.loss, self.plain) if is_kept and self.loss is not None else None
        self.forget()

    def forget(self) -> None:
        """The losses so far are of no step: their gradients were let go of."""
        self.loss, self.plain, self.partial = None, 0, False

    def step_loss(self) -> float | None:
        """The last step's loss on this rank, the mean over its micro-batches; None if nobody knows it."""
        if self.last is None:
            return None
        loss, plain = self.last
        return float(loss) / max(1, plain)

    def tell(
        self, buckets: Sequence[Bucket], everyone: Sequence[Communicator], applied: bool, scaler: StaticScale
    ) -> None:
        """Find out and log it. Every rank must call this."""
        self.finding = investigate(buckets, self.loss, everyone, this_rank())
        self._log("applied nevertheless" if applied else "skipped", scaler)

    def tell_average(self, error: NotFiniteError, scaler: StaticScale) -> None:
        """All gradients are finite, and an average that the step has made of them is not."""
        self.finding = str(error)
        self._log("skipped", scaler)

    def _log(self, what: str, scaler: StaticScale) -> None:
        if this_rank() == 0:
            # A dynamic scale finds its place by overflowing: that is no reason to worry anybody.
            level = logging.INFO if isinstance(scaler, DynamicScale) else logging.WARNING
            log.log(level, "step %s: %s", what, self.finding)

    def learn(self, scaler: StaticScale, overflow: bool) -> None:
        """Let the loss scale learn from the step."""
        try:
            scaler.update(overflow)
        except ScaleExhaustedError as error:
            raise ScaleExhaustedError(
                f"{error}. {self.finding[0].upper()}{self.finding[1:]}. What helps: bf16, a smaller "
                "learning rate, gradient clipping, or fixing what produces inf or NaN in fp32"
            ) from None


@dataclass(frozen=True)
class StepReport:
    """What a step did."""

    applied: bool
    grad_norm: float | None  # of the averaged gradients, unscaled, before clipping; None: nobody needed it
    scale: float  # the loss scale that backward used


@dataclass
class Finding:
    """What one rank knows, or several together."""

    parameters: list[str] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)  # ranks whose own gradients were not finite
    losses: list[int] = field(default_factory=list)  # ranks whose loss was not finite


def investigate(
    buckets: Sequence[Bucket], loss: Tensor | None, everyone: Sequence[Communicator], rank: int
) -> str:
    """One sentence, the same on every rank. Every rank must call this."""
    finding = _look_here(buckets, loss, rank)
    for group in everyone:
        finding = _merge(group.gather_objects(finding, "report about non-finite gradients"))
    order = {m.name: place for place, m in enumerate(m for b in reversed(buckets) for m in b.members[::-1])}
    names = sorted(set(finding.parameters), key=lambda name: order.get(name, len(order)))
    return _sentence(names, sorted(set(finding.sources)), sorted(set(finding.losses)))


def _look_here(buckets: Sequence[Bucket], loss: Tensor | None, rank: int) -> Finding:
    """What this rank knows. The host waits for the device once, however many parameters there are."""
    finding = Finding()
    asked: list[tuple[list[Any], Any, Tensor]] = []  # a list, what belongs there, unless this is true
    for bucket in buckets:
        for member in bucket.members:
            gradient = bucket.gradient_of(member)
            if gradient is not None:
                finite = gradient.isfinite().all()
                asked.append((finding.parameters, member.name, finite))
                if bucket.uses_param_grad:
                    asked.append((finding.sources, rank, finite))
        if bucket.local_finite is not None:
            asked.append((finding.sources, rank, bucket.local_finite))
    if loss is not None:
        asked.append((finding.losses, rank, torch.isfinite(loss).all()))
    if asked:
        device = asked[0][2].device
        answers = torch.stack([finite.to(device) for _, _, finite in asked]).tolist()
        for (places, what, _), finite in zip(asked, answers, strict=True):
            if not finite:
                places.append(what)
    return finding


def _merge(findings: Sequence[Finding]) -> Finding:
    return Finding(
        [name for f in findings for name in f.parameters],
        [rank for f in findings for rank in f.sources],
        [rank for f in findings for rank in f.losses],
    )


def _sentence(names: Sequence[str], sources: Sequence[int], losses: Sequence[int]) -> str:
    where = (
        f"on {ranks_listed(sources)}"
        if sources
        else "only after they were summed (each rank's own are finite)"
    )
    loss = (
        f"the loss itself is not finite on {ranks_listed(losses)}: scaling cannot help, look at inputs and "
        "weights"
        if losses
        else "the loss is finite on every rank that told us"
    )
    return f"gradients of {listed(names, SHOWN) or 'some parameter'} are inf or NaN {where}; {loss}"
