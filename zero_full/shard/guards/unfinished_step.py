"""Steps that Ctrl-C or an error cut short: SIGINT is delayed, or later calls raise until values are valid.

[Note: a step cut short] A step changes parameters and state part by part, on several threads and tiers, and
then counters and the LR schedule. An exception between two of these changes leaves a mix of the states before
and after the step, and no copy exists to roll back to. So a step has phases:

    collecting   only gradients change. An interrupt ends the step at once. Gradients may then be partly
                 averaged, and ranks may be at different collectives
    changing     from the first changed value until the counters have changed. SIGINT is delivered at the end
                 of the step; a second one is delivered at once
    counted      the same, while an engine clears gradients and steps the LR scheduler

An error that all ranks raise before a value has changed ends the collecting phase. After any other exception
the phase stays, and calls that need valid values raise. They do so until the gradients are discarded (in the
collecting phase) or until all values are loaded. With several ranks an interrupt may have come during a
collective, and the next collective would be matched with a different one on another rank. Then only a new run
helps.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from zero_full._compat import overrides_state, set_overrides_state

COLLECTING, CHANGING, COUNTED = "collecting", "changing", "counted"
BEFORE = "before it changed any parameter, so its gradients may be incomplete"
WHILE = "while it changed parameters, optimizer state, counters and schedule, so they may be of two steps"
DISCARD = "Call zero_grad(), and repeat the forward and backward passes of this step"
RESTART = "Ranks may be waiting in different collectives. End all of them, and resume from a checkpoint"
LOAD = "Load all of it on every rank, by load_checkpoint or load_state_dict"


class UnfinishedStep:
    """The phase of the running or last step. See [Note: a step cut short]."""

    def __init__(self, has_peers: bool) -> None:
        self.has_peers = has_peers
        self.phase = ""  # of the running step, or of one that was cut short; "" between steps
        self.cause = ""  # the exception that cut the step short
        self.is_lost = False  # other ranks may be at different collectives
        self.inside = False  # a step is running
        self.grad_mode = True  # of the caller of the step
        self.overrides = overrides_state()  # the caller's, too
        self.handler: Any = None  # the user's SIGINT handler while ours delays the signal
        self.came: FrameType | None = None  # the frame that a delayed SIGINT has interrupted

    def run(self, act: Callable[[], None]) -> None:
        """Run a step, without autograd. An engine's step is the outer call, its optimizer's the nested one.

        Not by `torch.no_grad()`: an interrupt inside its `__enter__` would leave autograd off for good.
        """
        self.check("step")
        outer = self.inside
        if not outer:
            self.grad_mode, self.overrides = torch.is_grad_enabled(), overrides_state()
        try:
            self.inside = True
            try:
                if not outer:
                    self.phase, self.cause = COLLECTING, ""
                    torch.set_grad_enabled(False)
                act()
                if not outer:
                    self.phase = ""
                elif self.phase == CHANGING:
                    self.phase = COUNTED
            except BaseException as error:
                if isinstance(error, Exception) and self.phase == COLLECTING:
                    self.phase = ""  # every rank has raised the same way
                self.is_lost = self.has_peers and not isinstance(error, Exception)
                self.cause = f"{type(error).__name__} {error}".strip()
                raise
            finally:
                self._leave(outer)
        finally:
            self._leave(outer)  # again, as an interrupt may have come inside the first call

    def _leave(self, outer: bool) -> None:
        self.inside = outer
        if not outer:
            torch.set_grad_enabled(self.grad_mode)
            set_overrides_state(self.overrides)  # an interrupt may have come before a `with` had begun
            if self.handler is not None:
                self._deliver()

    def change(self) -> None:
        """Enter the changing phase, and delay SIGINT if this is the main thread, which handles signals."""
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler) and handler != self._note:  # else it is ignored, or handled by the system
                self.came, self.handler = None, handler
                signal.signal(signal.SIGINT, self._note)
        self.phase = CHANGING  # last: an interrupt before it has changed nothing

    def change_by(self, act: Callable[[], None]) -> None:
        """Run `act`, which changes values, in the changing phase, inside a step or between steps."""
        before = self.phase
        self.change()
        act()
        self.phase = before  # not in a `finally`: after an exception the values are invalid

    def mark_complete(self) -> None:
        """Note that all values and counters have changed: a later exception does not cut the step short."""
        self.phase = COLLECTING  # in which `run` takes an exception as harmless

    # What is left of a step that was cut short ---------------------------------------------------

    @property
    def is_cut_short(self) -> bool:
        """Whether the last step was cut short, and its values are still invalid."""
        return bool(self.phase) and not self.inside

    def check(self, call: str) -> None:
        """Raise RuntimeError if the last step was cut short."""
        if self.phase and not self.inside:
            when, remedy = (BEFORE, DISCARD) if self.phase == COLLECTING else (WHILE, LOAD)
            cause = f" by {self.cause}" if self.cause else ""
            remedy = RESTART if self.is_lost else remedy
            raise RuntimeError(f"{call} after a step that was cut short{cause}, {when}. {remedy}")

    def check_values(self, call: str) -> None:
        """Raise for a call that needs valid parameters and state, but no gradients."""
        if self.phase != COLLECTING or self.is_lost:
            self.check(call)

    def check_load(self, call: str) -> None:
        """Raise for a call that loads all values, if ranks may be at different collectives."""
        if self.is_lost:
            self.check(call)

    def discard_gradients(self) -> None:
        """Note that the gradients were discarded, which ends a step that was cut short while collecting."""
        if self.phase == COLLECTING and not (self.is_lost or self.inside):
            self.phase = ""

    def forget(self) -> None:
        """End the state of a step that was cut short, because all values were loaded."""
        if not self.inside:
            self.phase = ""

    # SIGINT --------------------------------------------------------------------------------------

    def _note(self, number: int, frame: FrameType | None) -> None:
        waits, self.came = self.came is None, frame
        if not waits:  # the second one
            self._deliver()

    def _deliver(self) -> None:
        """Restore the SIGINT handler, and call it if a signal was delayed."""
        if signal.getsignal(signal.SIGINT) == self._note:  # else other code has replaced our handler
            signal.signal(signal.SIGINT, self.handler)
        handler, self.handler = self.handler, None
        came, self.came = self.came, None
        if came is not None:
            handler(signal.SIGINT, came)
