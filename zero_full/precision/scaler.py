"""The loss scale: the factor that keeps small fp16 gradients from vanishing.

One rule serves every stage: gradients are divided by the scale that backward used, and only then does
`update` change it for the next step.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zero_full.errors import ScaleExhaustedError


class StaticScale:
    """A scale that never changes; 1 for everything but fp16."""

    def __init__(self, scale: float = 1.0) -> None:
        if not scale > 0:
            raise ValueError(f"fp16.loss_scale must be positive, or 0 for a dynamic scale, not {scale}")
        self.scale = float(scale)

    @property
    def scales(self) -> bool:
        """Whether losses are ever multiplied by a factor other than 1."""
        return self.scale != 1

    def times(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale; the loss itself where that is 1."""
        return loss if self.scale == 1 else loss.float() * self.scale  # in fp16 the product would overflow

    def update(self, overflow: bool) -> None:
        """Keep the scale, whether or not gradients have overflowed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and, of a dynamic one, its counters and options."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; ValueError if it is of the other kind of scale."""
        if state.keys() != vars(self).keys():
            raise ValueError(
                f"the saved loss scale has {', '.join(sorted(state))}, and the configured one "
                f"{', '.join(sorted(vars(self)))}: one is static, the other dynamic. Set fp16.loss_scale as "
                "in the saved run"
            )
        vars(self).update(state)


class DynamicScale(StaticScale):
    """A scale that halves on overflow and doubles after `window` steps without one.

    The first `hysteresis - 1` overflows do not halve it. That allowance is renewed whenever the scale grows,
    or after every good step if `consecutive_hysteresis`.
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
        self.window, self.minimum, self.hysteresis = window, minimum, hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis
        self.lives = hysteresis
        self.steps, self.last_overflow = 0, -1

    @property
    def scales(self) -> bool:
        """True: the scale changes during training."""
        return True

    def update(self, overflow: bool) -> None:
        """Change the scale after a step. Its gradients must have been unscaled before."""
        if overflow:
            if self.lives > 1:
                self.lives -= 1
            elif self.scale <= self.minimum:
                raise ScaleExhaustedError(f"gradients overflow at the smallest loss scale, {self.minimum:g}")
            else:
                self.scale = max(self.scale / 2, self.minimum)
            self.last_overflow = self.steps
        else:
            good = self.steps - self.last_overflow - 1  # steps without overflow before this one
            is_due = good > 0 and good % self.window == 0
            if is_due or self.consecutive_hysteresis:
                self.lives = self.hysteresis
            if is_due:
                self.scale *= 2
        self.steps += 1
