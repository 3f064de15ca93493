"""Step 4. 16-bit parameters, an fp32 master, and a loss scale.

Half the bytes for parameters, gradients and traffic, at the price of numbers that run out. Small updates
vanish, so Adam steps an fp32 copy, the master, which every stage makes for 16-bit parameters. Small
gradients vanish in fp16, so the loss is multiplied before backward and the gradients are divided
afterwards. Too large a scale overflows, and because each rank sees only its own slices, whether *anyone*
overflowed is a question for all.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class StaticScale:
    """The same scale for ever; 1 for bf16, whose range is fp32's."""

    def __init__(self, scale: float = 1.0) -> None:
        if scale <= 0:
            raise ValueError(f"the loss scale must be positive, not {scale}")
        self.scale = float(scale)

    def update(self, overflow: bool) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, Any]:
        """What to save: everything."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`'s answer."""
        vars(self).update(state)


class DynamicScale(StaticScale):
    """As large a scale as goes: halved after overflows, doubled after a window without any.

    `hysteresis` overflows are forgiven before the scale is halved for the first time. They are
    forgiven anew when the scale grows, or after every good step if `consecutive_hysteresis`.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        window: int = 1000,
        minimum: float = 1.0,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
    ) -> None:
        super().__init__(scale)
        self.window, self.minimum = window, minimum
        self.hysteresis, self.forgiven_left = hysteresis, hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis
        self.steps, self.last_overflow = 0, -1

    def update(self, overflow: bool) -> None:
        """Learn from one step."""
        # --8<-- [start:ex_scale]
        if overflow:
            if self.forgiven_left > 1:
                self.forgiven_left -= 1
            elif self.scale <= self.minimum:
                raise OverflowError(
                    f"gradients overflow although the loss scale is at its minimum, {self.minimum}. Scaling "
                    "cannot help: look for inf or NaN in the loss and in the weights, or train in bf16"
                )
            else:
                self.scale = max(self.scale / 2, self.minimum)
            self.last_overflow = self.steps
        else:
            good = self.steps - self.last_overflow - 1  # steps since the last overflow, before this one
            grow = good > 0 and good % self.window == 0
            if grow or self.consecutive_hysteresis:
                self.forgiven_left = self.hysteresis
            if grow:
                self.scale *= 2
        self.steps += 1
        # --8<-- [end:ex_scale]


class Report(NamedTuple):
    """What a step did."""

    applied: bool
    grad_norm: float | None
    scale: float  # the scale that backward used


class MixedPrecision:
    """Any stage, with a loss scale around it and, if wanted, gradients that add up in fp32."""

    def __init__(
        self, stage: Any, scale: StaticScale | None = None, accumulate: torch.dtype | None = None
    ) -> None:
        self.stage, self.comm, self.model = stage, stage.comm, stage.model
        self.scaler = scale or StaticScale()
        if accumulate is not None:
            for p in self.model.parameters():
                if p.requires_grad:
                    p.grad_dtype = accumulate  # autograd adds, and we reduce, in this type
        self.skipped = 0

    def backward(self, loss: Tensor) -> None:
        """Backward of the scaled loss. Compute the loss in fp32: in fp16 a scale of 2**16 is infinite."""
        self.stage.backward(loss * self.scaler.scale)

    # --8<-- [start:mixed_step]
    @torch.no_grad()
    def step(self) -> Report:
        """Step if nobody overflowed. The scale that multiplied the loss is the one that is divided out."""
        scale, norm = self.scaler.scale, None
        self.stage.reduce_gradients()
        grads = self.stage.master_gradients()  # fp32, whatever the gradients were
        overflow = self.anyone_overflowed(grads)
        if overflow:
            self.skipped += 1
            self.stage.zero_grad()
        else:
            for g in grads:
                g.div_(scale)
            norm = self.stage.clip_gradients()
            self.stage.update()
        self.scaler.update(overflow)  # only now: these gradients were scaled with the old one
        return Report(not overflow, norm, scale)

    # --8<-- [end:mixed_step]

    def anyone_overflowed(self, grads: list[Tensor]) -> bool:
        """Whether any rank found inf or NaN in its slices. One number, one all-reduce, the same answer."""
        # --8<-- [start:ex_overflow]
        bad = torch.zeros((), device=self.comm.device)
        for g in grads:
            bad += (~g.isfinite()).any().to(bad.device)
        return bool(self.comm.all_reduce(bad) > 0)
        # --8<-- [end:ex_overflow]

    def zero_grad(self) -> None:
        """Let go of the gradients."""
        self.stage.zero_grad()

    def holdings(self) -> dict[str, list[Tensor | None]]:
        """What this rank keeps, by kind."""
        holdings: dict[str, list[Tensor | None]] = self.stage.holdings()
        return holdings

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a checkpoint."""
        return {"stage": self.stage.state_dict(), "scale": self.scaler.state_dict(), "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this rank's part."""
        self.stage.load_state_dict(state["stage"])
        self.scaler.load_state_dict(state["scale"])
        self.skipped = state["skipped"]
