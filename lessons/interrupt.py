"""Ctrl-C, which a terminal sends to a command and to its child processes.

The command prints one line and returns `INTERRUPTED`. Its child processes end without a word.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # the exit status, as shells have it


def end_silently() -> None:
    """Let Ctrl-C end this child process and its own child processes at once."""
    signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: FrameType | None) -> None:
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(INTERRUPTED)


@contextmanager
def ignored() -> Iterator[None]:
    """Ignore Ctrl-C within the context. Processes that are started in it ignore it until they ask for it."""
    if threading.current_thread() is not threading.main_thread():  # other threads cannot change handlers
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
