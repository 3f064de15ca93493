"""State of the running backward pass: its begin and end, its loss, and the engine's rules for it.

[Note: recomputed parts] Re-entrant activation checkpointing runs small backward passes inside the outer one.
Autograd gives each a number (graph task id) of its own. Here "the pass" is always the outer one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_full._compat import current_backward, when_backward_ends


def refuse_capture() -> None:
    """Raise RuntimeError during a CUDA graph capture, because a replay would not run our hooks."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph cannot hold this: gradients leave, and parameters come, by hooks in Python, which "
            "a graph does not replay. Capture parts of the model (torch.cuda.make_graphed_callables, at "
            "stages 0 to 2), or nothing"
        )


@dataclass
class Rules:
    """An engine's rules for backward passes and loss scaling. By default each pass is a whole step."""

    is_boundary: Callable[[], bool] = lambda: True  # the pass is the step's last (accumulation boundary)
    plain_divisor: Callable[[], float] = lambda: 1.0  # divisor of gradients of a plain `loss.backward()`
    refuse_unscaled: Callable[[], None] = lambda: None  # raises if gradients need a loss scale
    # Called with the loss of a pass with gradients; None: the pass had several losses.
    note_loss: Callable[[Tensor | None], None] = lambda loss: None
    # Gradients of several passes may add up before they are reduced, at stages that reduce once per step.
    adds_up: Callable[[], bool] = lambda: False


class BackwardPass:
    """The backward pass of this rank. It calls the functions in `at_begin` and `at_end`."""

    def __init__(self) -> None:
        self.rules = Rules()
        self.at_begin: list[Callable[[], None]] = []
        self.at_end: list[Callable[[], None]] = []
        self.running = False
        self.failed = False  # the last pass has raised
        self.is_boundary = True  # the pass is the step's last (accumulation boundary)
        self.count = 0  # number of passes that produced gradients
        self.divided = False  # the loss was divided by the number of micro-batches...
        self.scaled = False  # ...and multiplied by the loss scale, by the engine or `scale`
        self.gated = False  # or gradients were scaled when they reached the model's outputs
        self.divisor: float | None = None  # divisor of the gradients; None: no gradient has arrived yet
        self.number: int | None = None  # autograd's number of the pass; None: not known yet
        # Number of the pass that reached a loss, and the loss; None: it reached several.
        self._reached: tuple[int, Tensor | None] | None = None

    def begin(self, divided: bool, scaled: bool) -> None:
        """Start the pass: by a call of the engine, a hook on the model's output, or its first gradient."""
        for act in self.at_begin:
            act()
        now = current_backward()
        self.number = now if now >= 0 else None
        self.running, self.divided, self.scaled, self.gated = True, divided, scaled, False
        self.divisor, self.failed = None, False
        self.is_boundary = self.rules.is_boundary()

    def end(self) -> None:
        """End the pass, and call `at_end`."""
        if current_backward() < 0 or (self._reached and self._reached[0] == self.number):
            self._reached = None  # else it was a recomputed part
        self.running, self.number = False, None
        for act in self.at_end:
            act()

    def fail(self) -> None:
        """End the pass after an exception, and note that it failed if it was running."""
        self.failed = self.failed or self.running
        self.end()

    # What autograd does --------------------------------------------------------------------------

    @staticmethod
    def inside_autograd() -> bool:
        """Return whether autograd is running in this thread, so that a forward is a recomputation."""
        return current_backward() >= 0

    def when_autograd_ends(self, act: Callable[[], None]) -> None:
        """Run `act` at the end of the autograd pass that this is called from; never outside of one."""
        if current_backward() >= 0:
            when_backward_ends(act)

    def is_at_work(self) -> bool:
        """Return whether autograd is running this pass, and not a recomputed part of it."""
        return self.running and self.number in (None, current_backward())

    def reach(self, loss: Tensor) -> None:
        """Note that autograd has reached a model output that is a loss."""
        now = current_backward()
        if self._reached is None or self._reached[0] != now:
            self._reached = now, loss
        elif self._reached[1] is not loss:
            self._reached = now, None
            if self.running and self.number == now and self.divisor is not None:  # `bring` noted the first
                self._note_reached()

    def bring(self) -> float:
        """Note a gradient, and return its divisor. Raises if it lacks the loss scale."""
        if self.number is None:  # autograd has a number only once it is running
            self.number = current_backward()
        if not (self.scaled or self.gated):
            self.rules.refuse_unscaled()
        if self.divisor is None:
            self.divisor = 1.0 if self.divided else self.rules.plain_divisor()
            self.count += 1
            if self._reached is not None and not self.divided:
                self._note_reached()
        return self.divisor

    def _note_reached(self) -> None:
        if self._reached is not None and self._reached[0] == self.number and not self.divided:
            self.rules.note_loss(self._reached[1])
