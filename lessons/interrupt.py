"""Ctrl-C, which a terminal sends to a command and to its child processes.

The command prints one line and returns `INTERRUPTED`. Its child processes end without a word.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

INTERRUPTED = 130  # the exit status, as shells have it


def end_silently() -> None:
    """Let Ctrl-C end this child process and its own child processes at once, also one from before."""
    signal.signal(signal.SIGINT, _end)
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _end(number: int, frame: FrameType | None) -> None:
    from multiprocessing import (
        active_children,  # importing it takes time, in which Ctrl-C would not be heeded
    )

    for child in active_children():
        child.kill()
    os._exit(INTERRUPTED)


@contextmanager
def ignored() -> Iterator[None]:
    """Ignore Ctrl-C within the context. Processes that are started in it ignore it until they ask for it.

    For multiprocessing, which undoes `held_back`.
    """
    if threading.current_thread() is not threading.main_thread():  # other threads cannot change handlers
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def held_back() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the context; processes that are started in it, until `end_silently`.

    Otherwise Ctrl-C could come between the start of a process and the moment at which the command knows it.
    """
    if not _is_heeded() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    pressed: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # processes take this over
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, handler)
    if pressed:
        raise KeyboardInterrupt


def run(
    command: list[str], timeout: float | None = None, capture_output: bool = False, **how: Any
) -> "subprocess.CompletedProcess[str]":
    """`subprocess.run` for a program that calls `end_silently`: it ends with this process."""
    if capture_output:
        how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with held_back():
        process = subprocess.Popen(command, text=True, **how)
    try:
        out, errors = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


@contextmanager
def ends_imports() -> Iterator[None]:
    """Within the context, Ctrl-C during an import ends the process with one line.

    Elsewhere it raises KeyboardInterrupt as usual. In an import that would not do: numpy turns it into an
    ImportError, and torch then goes on without numpy.
    """
    if not _is_heeded():
        yield
        return
    handler = signal.signal(signal.SIGINT, _interrupt)
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


def _is_heeded() -> bool:
    """Whether Ctrl-C raises here: not in a background job, and only the main thread can change that."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _interrupt)
