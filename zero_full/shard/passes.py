"""The backward pass that is running, and what it must be told.

[Note: recomputed parts] Re-entrant activation checkpointing runs small backward passes inside the large one,
each with a number of its own. The pass that is meant here is always the large one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from zero_full._compat import current_backward


@dataclass
class Rules:
    """What an engine says about a backward pass; by default each is a whole step's, of a loss as it is."""

    is_boundary: Callable[[], bool] = lambda: True  # whether it is the step's last
    plain_divisor: Callable[[], float] = lambda: 1.0  # of gradients whose loss nobody here has divided
    refuse_unscaled: Callable[[], None] = lambda: None  # raises if gradients need a loss scale
    scale: Callable[[], float] = lambda: 1.0  # by which losses are multiplied
    note_loss: Callable[[Tensor], None] = lambda loss: None  # of which a pass has brought gradients


class BackwardPass:
    """What is known of the backward pass that runs, if one does; a rank runs one at a time."""

    def __init__(self) -> None:
        self.running = False
        self.count = 0  # passes that have brought gradients, so far
        self.divided = False  # somebody here has divided the loss by the number of micro-batches...
        self.scaled = False  # ...and multiplied it by the loss scale
        self.gated = False  # or gradients were scaled where they have reached the model's outputs
        self.divisor: float | None = None  # what gradients are still divided by; None: none has come yet
        self._number: int | None = None  # autograd's; None: it has not begun yet
        self._reached: tuple[int, Tensor] | None = None  # by which pass of autograd's, which output

    def reach(self, loss: Tensor) -> None:
        """Note that autograd has reached an output that is a loss, perhaps on its way to parameters."""
        if self._reached is None or self._reached[0] != current_backward():
            self._reached = current_backward(), loss

    def begin(self, divided: bool, scaled: bool) -> None:
        """Start: by a call of the engine, a hook on the model's output, or with the first gradient."""
        now = current_backward()
        self._number = now if now >= 0 else None
        self.running, self.divided, self.scaled, self.gated = True, divided, scaled, False
        self.divisor = None

    def join(self) -> None:
        """Take autograd's number of the pass, which is not known before autograd is at work on it."""
        if self._number is None:
            self._number = current_backward()

    def bring(self, rules: Rules) -> float:
        """The divisor of a gradient that has come; raises if the gradient lacks the loss scale."""
        self.join()
        if not (self.scaled or self.gated):
            rules.refuse_unscaled()
        if self.divisor is None:
            self.divisor = 1.0 if self.divided else rules.plain_divisor()
            self.count += 1
            if self._reached is not None and self._reached[0] == self._number and not self.divided:
                rules.note_loss(self._reached[1])
        return self.divisor

    def is_at_work(self) -> bool:
        """Whether autograd is at work on this pass, and not on a recomputed part of it."""
        return self.running and self._number in (None, current_backward())

    def end(self) -> None:
        """Note that the pass is over."""
        self.running, self._number, self._reached = False, None, None
