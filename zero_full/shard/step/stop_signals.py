"""Handlers of signals that ask a run to stop, such as SIGTERM. All ranks learn of one in the same step.

[Note: a signal] A signal may come to one rank, to some or to all, and between any two lines of Python. So the
handler only records it. The exchange of a step (`agreement.py`) sums these records, so that all ranks know
after the same step. The handler must not log, because it may have interrupted a call of the logger.
"""

import logging
import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

log = logging.getLogger("zero_full")
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
HARMLESS = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
ORDINARY = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)


class StopSignals:
    """The signals that this rank handles, and the one that it has received. See [Note: a signal]."""

    def __init__(self) -> None:
        self.before: dict[signal.Signals, Any] = {}  # the previous handlers
        self.description = ""  # the watched signals and their purpose, which must be equal on all ranks
        self.came: signal.Signals | None = None  # the signal that this rank received
        self.requested = False  # any rank received one; equal on all ranks
        self.process = 0  # the id of the process that called `watch`

    def watch(self, signals: Iterable[int], purpose: str = "") -> None:
        """Replace the handlers of these signals until `leave`."""
        wanted = _known(signals)
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "Python handles signals in its main thread only: call this from the main thread"
            )
        for number in wanted:
            owner = getattr(signal.getsignal(number), "__self__", None)
            if isinstance(owner, StopSignals) and owner is not self:
                raise RuntimeError(
                    f"another engine or optimizer of this process watches {number.name} already. Watch it "
                    "with one of them, by optimizer.watch_signals(), and save all when its stop_requested is "
                    "true"
                )
        self.leave()
        self.process = os.getpid()
        for number in wanted:
            before = signal.signal(number, self._note)
            if hasattr(signal, "siginterrupt"):  # not on Windows
                signal.siginterrupt(number, False)  # restart a library's system calls: no EINTR
            if before not in ORDINARY:
                which = before or "outside of Python"
                log.warning("%s: its handler %s is not called until destroy", number.name, which)
            self.before[number] = before
        self.description = f"{', '.join(sorted(number.name for number in wanted))} {purpose}".strip()

    def leave(self) -> None:
        """Restore the previous handlers."""
        if self.before and threading.current_thread() is threading.main_thread():
            for number, before in self.before.items():
                if signal.getsignal(number) == self._note:  # else other code has replaced our handler
                    signal.signal(number, signal.SIG_DFL if before is None else before)
            self.before, self.description = {}, ""

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self.process:
            self.came = signal.Signals(number)
        elif number not in HARMLESS:  # in a forked child (a data loader worker) the signal must still end it
            signal.signal(number, self.before.get(signal.Signals(number)) or signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _known(signals: Iterable[int]) -> list[signal.Signals]:
    """Convert to `signal.Signals`; raise unless there is at least one and Python can handle all of them."""
    if not isinstance(signals, Iterable) or isinstance(signals, (str, bytes)):
        raise TypeError(f"signals must be a sequence, such as (signal.SIGTERM,), not {signals!r}")
    try:
        wanted = [signal.Signals(number) for number in signals]
    except ValueError as error:
        raise ValueError(f"signals: {error}") from None
    never = [each.name for each in wanted if each.name in ("SIGKILL", "SIGSTOP")]
    if never or not wanted:
        raise ValueError(f"signals: {', '.join(never)} cannot be watched" if never else "signals is empty")
    return wanted
