"""The backward pass that is running, and what it must be told.

[Note: recomputed parts] Re-entrant activation checkpointing runs small backward passes inside the large one,
each with a number of its own. The pass that is meant here is always the large one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_full._compat import current_backward, when_backward_ends


def refuse_capture() -> None:
    """RuntimeError while a CUDA graph is captured: what hooks do would be missing when it is replayed."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph cannot hold this: gradients leave, and parameters come, by hooks in Python, which "
            "a graph does not replay. Capture parts of the model (torch.cuda.make_graphed_callables, at "
            "stages 0 to 2), or nothing"
        )


@dataclass
class Rules:
    """What an engine says about a backward pass; by default each is a whole step's, of a loss as it is."""

    is_boundary: Callable[[], bool] = lambda: True  # whether it is the step's last
    plain_divisor: Callable[[], float] = lambda: 1.0  # of gradients whose loss nobody here has divided
    refuse_unscaled: Callable[[], None] = lambda: None  # raises if gradients need a loss scale
    scale: Callable[[], float] = lambda: 1.0  # by which losses are multiplied
    # Of which a pass has brought gradients; None: it had several.
    note_loss: Callable[[Tensor | None], None] = lambda loss: None
    # Whether gradients of several passes may add up before they are reduced, where a pass need not reduce.
    adds_up: Callable[[], bool] = lambda: False


class BackwardPass:
    """The backward pass of this rank: whether one is running, what it must be told, and when it is over.

    Whoever must know when one begins or is over puts a function into `at_begin` or `at_end`.
    """

    def __init__(self) -> None:
        self.rules = Rules()
        self.at_begin: list[Callable[[], None]] = []
        self.at_end: list[Callable[[], None]] = []
        self.running = False
        self.failed = False  # the last one has raised
        self.is_boundary = True  # it is the step's last
        self.count = 0  # passes that have brought gradients, so far
        self.divided = False  # somebody here has divided the loss by the number of micro-batches...
        self.scaled = False  # ...and multiplied it by the loss scale
        self.gated = False  # or gradients were scaled where they have reached the model's outputs
        self.divisor: float | None = None  # what gradients are still divided by; None: none has come yet
        self._number: int | None = None  # autograd's; None: it has not begun yet
        # By which pass of autograd's, which output, or None: several.
        self._reached: tuple[int, Tensor | None] | None = None

    def begin(self, divided: bool, scaled: bool) -> None:
        """It starts: by a call of the engine, a hook on the model's output, or with its first gradient."""
        refuse_capture()
        for act in self.at_begin:
            act()
        now = current_backward()
        self._number = now if now >= 0 else None
        self.running, self.divided, self.scaled, self.gated = True, divided, scaled, False
        self.divisor, self.failed = None, False
        self.is_boundary = self.rules.is_boundary()

    def end(self) -> None:
        """It is over."""
        if not self.inside_autograd() or (self._reached and self._reached[0] == self._number):
            self._reached = None  # else it was a recomputed part
        self.running, self._number = False, None
        for act in self.at_end:
            act()

    def fail(self) -> None:
        """It is over, if it was running, because something has raised."""
        self.failed = self.failed or self.running
        self.end()

    # What autograd does --------------------------------------------------------------------------

    @staticmethod
    def inside_autograd() -> bool:
        """Whether autograd is at work in this thread: a forward that runs now is recomputed."""
        return current_backward() >= 0

    def when_autograd_ends(self, act: Callable[[], None]) -> None:
        """Run `act` when the pass of autograd's that calls this is over; never, if none does."""
        if self.inside_autograd():
            when_backward_ends(act)

    def is_at_work(self) -> bool:
        """Whether autograd is at work on this pass, and not on a recomputed part of it."""
        return self.running and self._number in (None, current_backward())

    def reach(self, loss: Tensor) -> None:
        """Autograd has reached an output that is a loss, perhaps on its way to parameters."""
        now = current_backward()
        if self._reached is None or self._reached[0] != now:
            self._reached = now, loss
        elif self._reached[1] is not loss:
            self._reached = now, None
            if self.running and self._number == now and self.divisor is not None:  # the first is noted
                self._note_reached()

    def bring(self) -> float:
        """A gradient has come. Returns what it is to be divided by; raises if it lacks the loss scale."""
        if self._number is None:  # nobody knows it before
            self._number = current_backward()
        if not (self.scaled or self.gated):
            self.rules.refuse_unscaled()
        if self.divisor is None:
            self.divisor = 1.0 if self.divided else self.rules.plain_divisor()
            self.count += 1
            self._note_reached()
        return self.divisor

    def _note_reached(self) -> None:
        if self._reached is not None and self._reached[0] == self._number and not self.divided:
            self.rules.note_loss(self._reached[1])
