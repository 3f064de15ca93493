"""Step 6. 0/1 Adam: rarer variances, local steps, and one bit for the rest.

Two observations. The variance changes slowly, so it is learned from exact gradients at ever longer
intervals, and in between one bit of the gradient feeds the momentum. And once the variance is frozen,
a step is linear in the momentum: ranks may walk apart for a few steps, add up where they went, and meet.
"""

from typing import Any

import torch
from torch import Tensor, nn

from zero_min.comm import Comm
from zero_min.one_bit_adam import OneBitAdam


class Interval:
    """How many steps lie between two events; doubles after every `patience` counts, up to `longest`."""

    def __init__(self, patience: int, longest: float = float("inf")) -> None:
        self.patience, self.longest = patience, longest
        self.length, self.counted = 1, 0

    def due(self, step: int) -> bool:
        """Whether the event happens at this step."""
        return step % self.length == 0

    def count(self) -> None:
        """One more; perhaps the interval grows."""
        # --8<-- [start:ex_interval]
        self.counted += 1
        if self.counted == self.patience:
            self.counted = 0
            self.length = int(min(2 * self.length, self.longest))
        # --8<-- [end:ex_interval]


class ZeroOneAdam(OneBitAdam):
    """0/1 Adam. `kappa` exact rounds pass before the variance interval doubles, until `freeze_step`.

    From then on ranks step alone, and meet at an interval that doubles every `local_kappa` steps up to
    `local_clip`. `anchor`, 4 bytes per parameter, keeps the last common parameters, so that all ranks have
    the same bits after each meeting.
    """

    saved = ("steps", "variances", "walked", "shrunk")

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        kappa: int = 16,
        freeze_step: int = 100_000,
        local_kappa: int = 32_768,
        local_clip: int = 16,
        **options: Any,
    ) -> None:
        if min(kappa, local_kappa, local_clip) < 1:
            raise ValueError(
                f"kappa, local_kappa and local_clip must be at least 1: {kappa, local_kappa, local_clip}"
            )
        super().__init__(model, comm, freeze_step=freeze_step, **options)
        self.variance = Interval(kappa)
        self.meeting = Interval(local_kappa, local_clip)
        self.u = torch.zeros_like(self.x)  # where this rank went since the last meeting: the sum of rate x m
        self.anchor = self.x.clone()
        self.walked = 0.0  # the sum of rates since then
        self.shrunk = 1.0  # the product of decays since then
        self.rounds: dict[str, int] = {"exact": 0, "one bit": 0, "silent": 0}

    # --8<-- [start:zero_one_step]
    @torch.no_grad()
    def step(self) -> None:
        """One step of whichever phase it is time for."""
        self.steps += 1
        g = self.gradient()
        if self.steps <= self.freeze_step:
            self.common_step(g)
        else:
            self.local_step(g)

    def common_step(self, g: Tensor) -> None:
        """All ranks stay together: exact gradients when the variance is due, one bit otherwise."""
        if self.variance.due(self.steps):
            self.learn_variance(g)
            self.variance.count()
            self.rounds["exact"] += 1
        else:
            self.remember(self.quiet(self.compressed(g)))
            self.rounds["one bit"] += 1
        self.move()

    def local_step(self, g: Tensor) -> None:
        """Each rank walks by its own momentum; now and then they meet."""
        if self.steps == self.freeze_step + 1:
            self.compressed.forget()  # errors of gradients are not errors of sums of momenta
            self.anchor.copy_(self.x)
        # --8<-- [start:ex_local]
        self.remember(g)
        self.move()
        self.u.add_(self.m, alpha=self.rate())
        self.walked += self.rate()
        self.shrunk *= 1 - self.lr * self.weight_decay
        # --8<-- [end:ex_local]
        if self.meeting.due(self.steps):
            self.meet()
            self.rounds["one bit"] += 1
        else:
            self.rounds["silent"] += 1
        self.meeting.count()

    def meet(self) -> None:
        """Go back to the anchor, take the average walk instead of one's own, and rebuild the momentum.

        Call it yourself before evaluating or saving a model in the middle of an interval.
        """
        if not self.walked:
            return
        # --8<-- [start:ex_meet]
        mean = self.quiet(self.compressed(self.u))
        self.x.copy_(self.anchor).mul_(self.shrunk).addcdiv_(mean, self.spread(), value=-1)
        self.m.copy_(mean / self.walked)
        self.anchor.copy_(self.x)
        self.u.zero_()
        self.walked, self.shrunk = 0.0, 1.0
        # --8<-- [end:ex_meet]

    # --8<-- [end:zero_one_step]

    def tensors(self) -> dict[str, Tensor]:
        """0/1 Adam's hidden price: twenty bytes and more where Adam keeps eight."""
        return {**super().tensors(), "u": self.u, "anchor": self.anchor}

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: tensors, counters, and both intervals."""
        intervals = [(i.length, i.counted) for i in (self.variance, self.meeting)]
        return {**super().state_dict(), "intervals": intervals, "rounds": dict(self.rounds)}

    def load_state_dict(self, state: Any) -> None:
        """Continue exactly where this rank stopped, in whatever phase that was."""
        super().load_state_dict(state)
        for interval, (length, counted) in zip(
            (self.variance, self.meeting), state["intervals"], strict=True
        ):
            interval.length, interval.counted = length, counted
        self.rounds = dict(state["rounds"])
