"""A step that was cut short, by Ctrl-C or an error in its middle: it is finished, or the next call raises.

[Note: a step cut short] A step changes parameters and state part by part, on several threads and tiers, and
then counters and the schedule. An exception between any two of these lines leaves neither the state before
the step nor the one after it, and without a copy of everything nothing can put it right. So it has phases:

    collecting   nothing is changed but gradients: an interrupt ends the step at once. Gradients may then be
                 half averaged, and ranks at different messages
    changing     from the first value that changes until counters have followed. SIGINT waits for the end of
                 the step, and interrupts then; a second one does not wait
    counted      the same while an engine clears gradients and moves its schedule

An error that all ranks raise before anything changes ends the first phase. Whatever else cuts a step short
leaves the phase as it is, and what would go on from there raises: until the gradients are given up (in the
first phase), or until everything is loaded. Where there are other ranks an interrupt may have come in the
middle of an exchange, so that the next one would be answered by another: then only a new run helps.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

COLLECTING, CHANGING, COUNTED = "collecting", "changing", "counted"
BEFORE = "before it changed any parameter, so its gradients may be incomplete"
WHILE = "while it changed parameters, optimizer state, counters and schedule, so they may be of two steps"
GIVE_UP = "call zero_grad(), and repeat the passes of this step"
START = "the ranks may wait for each other at different places: end all of them, and start from a checkpoint"
LOAD = "load all of it, on every rank: load_checkpoint or load_state_dict"


class UnfinishedStep:
    """Whether a step was cut short. See [Note: a step cut short]."""

    def __init__(self, has_peers: bool) -> None:
        self.has_peers = has_peers
        self.phase = ""
        self.cause = ""
        self.is_lost = False  # other ranks may be anywhere
        self.inside = False  # a step is running
        self.handler: Any = None  # of SIGINT, while that waits
        self.came: FrameType | None = None

    def run(self, act: Callable[[], None]) -> None:
        """Run a step, or the part of it that an optimizer takes: the outer call is the whole step."""
        self.refuse("step")
        outer, self.inside = self.inside, True
        try:
            if not outer:
                self.phase, self.cause = COLLECTING, ""
            act()
            if not outer:
                self.phase = ""
            elif self.phase == CHANGING:
                self.phase = COUNTED
        except BaseException as error:
            if isinstance(error, Exception) and self.phase == COLLECTING:
                self.phase = ""  # every rank has raised
            self.is_lost = self.has_peers and not isinstance(error, Exception)
            self.cause = f"{type(error).__name__} {error}".strip()
            raise
        finally:
            self.inside = outer
            if not outer and self.handler is not None:
                self._deliver()

    def change(self) -> None:
        """From now on parameters and state change."""
        self.phase = CHANGING
        self._hold()

    def change_by(self, act: Callable[[], None]) -> None:
        """Run what changes values as a whole, in a step or between steps."""
        before = self.phase
        self.change()
        act()
        self.phase = before

    def is_over(self) -> None:
        """All is changed and counted: an error that is raised now is not ours, and cuts nothing short."""
        self.phase = COLLECTING

    # What is left of a step that was cut short ---------------------------------------------------

    @property
    def is_cut_short(self) -> bool:
        """Whether the last step was, and nothing has put that right."""
        return bool(self.phase) and not self.inside

    def refuse(self, call: str) -> None:
        """RuntimeError if the last step was cut short."""
        if self.is_cut_short:
            when, remedy = (BEFORE, GIVE_UP) if self.phase == COLLECTING else (WHILE, LOAD)
            cause = f" by {self.cause}" if self.cause else ""
            remedy = START if self.is_lost else remedy
            raise RuntimeError(f"{call} after a step that was cut short{cause}, {when}: {remedy}")

    def refuse_values(self, call: str) -> None:
        """The same for a call that parameters and state matter to, and gradients do not."""
        if self.phase != COLLECTING or self.is_lost:
            self.refuse(call)

    def refuse_load(self, call: str) -> None:
        """The same for a call that puts everything right, unless ranks cannot meet."""
        if self.is_lost:
            self.refuse(call)

    def give_up_gradients(self) -> None:
        """There are none any more."""
        if self.phase == COLLECTING and not (self.is_lost or self.inside):
            self.phase = ""

    def forget(self) -> None:
        """All values are others."""
        if not self.inside:
            self.phase = ""

    # SIGINT --------------------------------------------------------------------------------------

    def _hold(self) -> None:
        """Let SIGINT wait, if this thread is the one that Python's handlers interrupt."""
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and handler != self._note:  # else the system ignores it, or ends the process
            self.came, self.handler = None, handler
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        waits, self.came = self.came is None, frame
        if not waits:
            self._deliver()

    def _deliver(self) -> None:
        """Give SIGINT back to its handler, and tell it of the one that came."""
        if signal.getsignal(signal.SIGINT) == self._note:  # else somebody has come after us
            signal.signal(signal.SIGINT, self.handler)
        handler, self.handler = self.handler, None
        came, self.came = self.came, None
        if came is not None:
            handler(signal.SIGINT, came)
