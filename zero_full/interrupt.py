"""Ctrl-C in a command: one line instead of a traceback."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # the exit code, as shells have it


@contextmanager
def ends_imports() -> Iterator[None]:
    """Within the context, Ctrl-C during an import ends the process with one line.

    Elsewhere it raises KeyboardInterrupt as usual. In an import that would not do: numpy turns it into an
    ImportError, and torch then goes on without numpy.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler != signal.default_int_handler:
        yield  # other threads cannot change handlers, and background jobs ignore Ctrl-C
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"interrupted\n")
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt
