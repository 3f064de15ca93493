"""The threads of `files.BlockIO`: in C++ (csrc/io), or in Python where nothing is compiled.

They are no operators of torch; csrc/bind_io.cpp has the reason.
"""

import ctypes
import errno
import functools
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

END_OF_FILE = -1  # instead of an errno
NO_MEMORY = -2  # instead of a transfer's number
NOT_DIRECT = (errno.EINVAL, errno.EFAULT)  # O_DIRECT's errors for unaligned blocks and unpinnable memory
POLL_MILLISECONDS = 100  # the delay of Ctrl-C, at most


class Span(NamedTuple):
    """A range of memory and of a file, which is open as `file` and, as a fallback, as `buffered`."""

    file: int
    buffered: int
    memory: int
    bytes: int
    offset: int


class Failure(NamedTuple):
    """An errno, or 0, and the offset in the file at which it happened."""

    error: int
    at: int


class Threads(Protocol):
    """The threads that read and write blocks. `close` finishes all transfers and ends the threads."""

    @property
    def close(self) -> Callable[[], object]: ...  # noqa: D102

    def start(self, spans: list[Span], block: int, write: bool, keep: object) -> Any:
        """Start a transfer, and return at once. `keep` is not freed before the transfer ends."""

    def finish(self, started: Any) -> Failure:
        """Wait for all blocks of a transfer. May be called repeatedly before `forget`."""

    def forget(self, started: Any) -> None:
        """Free the records of a finished transfer."""


class PythonThreads:
    """Threads in Python, if nothing is compiled. System calls release the GIL."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "zero_full_io")

    def start(self, spans: list[Span], block: int, write: bool, keep: object) -> Any:
        """Queue the blocks. Each refers to `keep`, because an unreferenced pool still finishes its jobs."""
        failures: list[Failure] = []

        def work(span: Span, keep: object = keep) -> None:
            if not failures:  # else the transfer has failed already
                failure = transfer_block(span, write)
                failures.extend([failure] if failure.error else [])

        jobs = [
            self._pool.submit(
                work,
                span._replace(
                    memory=span.memory + begin,
                    bytes=min(block, span.bytes - begin),
                    offset=span.offset + begin,
                ),
            )
            for span in spans
            for begin in range(0, span.bytes, block)
        ]
        return jobs, failures

    def finish(self, started: tuple[list[Future[None]], list[Failure]]) -> Failure:
        """Wait, and return the first failure."""
        jobs, failures = started
        for job in jobs:
            job.result()
        return failures[0] if failures else Failure(0, 0)

    def forget(self, started: Any) -> None:
        """Do nothing: a transfer has no records but its jobs."""

    def close(self) -> None:
        """Wait for all blocks, and end the threads."""
        self._pool.shutdown()


def transfer_block(span: Span, write: bool) -> Failure:
    """Read or write one range, as csrc/io/block_io.cpp does. Python retries interrupted calls."""
    file, buffered, memory, left, offset = span
    while left:
        part = (ctypes.c_char * left).from_address(memory)
        try:
            moved = os.pwritev(file, [part], offset) if write else os.preadv(file, [part], offset)
            error = 0 if moved else (errno.EIO if write else END_OF_FILE)
        except OSError as failed:
            moved, error = 0, failed.errno or errno.EIO
        if error and not (error in NOT_DIRECT and file != buffered):
            return Failure(error, offset)
        file = buffered
        memory, left, offset = memory + moved, left - moved, offset + moved
    return Failure(0, 0)


class _CSpan(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_int),
        ("buffered", ctypes.c_int),
        ("memory", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("offset", ctypes.c_int64),
    )


class _CFailure(ctypes.Structure):
    _fields_ = (("error", ctypes.c_int), ("at", ctypes.c_int64))


@functools.cache
def _functions(library: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(library))
    pool, number, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    found.zf_io_open.argtypes, found.zf_io_open.restype = [integer], pool
    found.zf_io_start.argtypes = [pool, ctypes.POINTER(_CSpan), integer, number, integer]
    found.zf_io_start.restype = number
    found.zf_io_wait.argtypes = [pool, number, integer, ctypes.POINTER(_CFailure)]
    found.zf_io_forget.argtypes, found.zf_io_forget.restype = [pool, number], None
    found.zf_io_close.argtypes, found.zf_io_close.restype = [pool], None
    return found


class CompiledThreads:
    """The pool of csrc/io. A finalizer closes it before its tensors are freed, also at exit."""

    def __init__(self, library: Path, threads: int) -> None:
        self._functions = _functions(library)
        self._pool = self._functions.zf_io_open(threads)
        if not self._pool:
            raise OSError(errno.EAGAIN, f"the system could not start {threads} threads")
        self.close = weakref.finalize(self, _close, self._functions, self._pool, os.getpid())

    def start(self, spans: list[Span], block: int, write: bool, keep: object) -> Any:
        """Start a transfer and return its number."""
        array = (_CSpan * len(spans))(*(_CSpan(*span) for span in spans))
        number = self._functions.zf_io_start(self._pool, array, len(spans), block, write)
        if number == NO_MEMORY:
            raise MemoryError("not enough memory to queue another transfer")
        if number < 0:
            raise RuntimeError("the process is ending: no new transfers")
        return number

    def finish(self, started: int) -> Failure:
        """Wait, and return the first failure. Ctrl-C is noticed meanwhile."""
        found = _CFailure()
        while not self._functions.zf_io_wait(self._pool, started, POLL_MILLISECONDS, found):
            pass
        return Failure(found.error, found.at)

    def forget(self, started: int) -> None:
        """Free the records of a transfer, whose number is not used again."""
        self._functions.zf_io_forget(self._pool, started)


def _close(functions: ctypes.CDLL, pool: int, process: int) -> None:
    if os.getpid() == process:  # a forked child has no such threads
        functions.zf_io_close(pool)
