"""Report gradients that are inf or NaN: which parameter, on which rank, and whether the loss was finite."""

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
from zero_full.shard.group.parameter_group import TrainedGroup

log = logging.getLogger("zero_full")
SHOWN = 3  # parameters


class NonFinite:
    """Logs steps with gradients that are not finite."""

    def __init__(self) -> None:
        self.finding = ""  # the last report

    def log_report(
        self,
        trained: Sequence[TrainedGroup],
        loss: Tensor | None,
        everyone: Sequence[Communicator],
        applied: bool,
        scaler: StaticScale,
    ) -> None:
        """Find the parameters and ranks with gradients that are not finite, and log a report.

        `loss`: of this step on this rank, if it is known. Every rank must call this.
        """
        self.finding = investigate(trained, loss, everyone, this_rank())
        self._log("applied nevertheless" if applied else "skipped", scaler)

    def log_average(self, error: NotFiniteError, scaler: StaticScale) -> None:
        """Log that all gradients are finite, but an average that the stepper computed is not."""
        self.finding = str(error)
        self._log("skipped", scaler)

    def _log(self, what: str, scaler: StaticScale) -> None:
        if this_rank() == 0:
            # A dynamic loss scale finds its value by overflowing: no reason for a warning.
            level = logging.INFO if isinstance(scaler, DynamicScale) else logging.WARNING
            log.log(level, "step %s: %s", what, self.finding)

    def update_scale(self, scaler: StaticScale, overflow: bool) -> None:
        """Update the loss scale after a step, and add the report to its error."""
        try:
            scaler.update(overflow)
        except ScaleExhaustedError as error:
            raise ScaleExhaustedError(
                f"{error}. {self.finding[0].upper()}{self.finding[1:]}. Try bf16, a smaller "
                "learning rate or gradient clipping, or find the cause of inf or NaN in fp32"
            ) from None


@dataclass(frozen=True)
class StepReport:
    """The result of a step."""

    applied: bool  # False: the step was skipped
    grad_norm: float | None  # of the averaged gradients, unscaled, before clipping; None: not needed
    scale: float  # the loss scale that backward used
    clip: float = 0.0  # the largest norm after clipping; 0: no clipping


@dataclass
class Finding:
    """Parameters and ranks with values that are not finite, as found by one rank or by several."""

    parameters: list[str] = field(default_factory=list)  # with a gradient that is not finite
    sources: list[int] = field(default_factory=list)  # ranks whose own gradients were not finite
    losses: list[int] = field(default_factory=list)  # ranks whose loss was not finite


def investigate(
    trained: Sequence[TrainedGroup], loss: Tensor | None, everyone: Sequence[Communicator], rank: int
) -> str:
    """Describe gradients that are not finite, equally on every rank. Every rank must call this."""
    finding = _look_here(trained, loss, rank)
    for communicator in everyone:
        finding = _merge(communicator.gather_objects(finding, "report about non-finite gradients"))
    # Name the first parameters of the model first: the list of groups is in the order of backward.
    order = {m.name: place for place, m in enumerate(m for g in reversed(trained) for m in g.members[::-1])}
    names = sorted(set(finding.parameters), key=lambda name: order.get(name, len(order)))
    return _sentence(names, sorted(set(finding.sources)), sorted(set(finding.losses)))


def _look_here(trained: Sequence[TrainedGroup], loss: Tensor | None, rank: int) -> Finding:
    """Find this rank's gradients and loss that are not finite. The host waits for the device once."""
    finding = Finding()
    asked: list[tuple[list[Any], Any, Tensor]] = []  # a list, and its new entry if the tensor is False
    for gradients in (group.gradients for group in trained):
        for member in gradients.members:
            gradient = gradients.gradient_of(member)
            if gradient is not None:
                finite = gradient.isfinite().all()
                asked.append((finding.parameters, member.name, finite))
                if gradients.uses_param_grad:
                    asked.append((finding.sources, rank, finite))
        if gradients.local_ends:
            asked.append((finding.sources, rank, torch.stack(gradients.local_ends).isfinite().all()))
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
    """Format the report about gradients that are not finite."""
    where = (
        f"on {ranks_listed(sources)}"
        if sources
        else "only after the sum over the ranks (each rank's own are finite)"
    )
    loss = (
        f"the loss itself is not finite on {ranks_listed(losses)}, so no loss scale can help: check inputs "
        "and weights"
        if losses
        else "the loss is finite on every rank that knows it"
    )
    return f"gradients of {listed(names, SHOWN) or 'some parameter'} are inf or NaN {where}; {loss}"
