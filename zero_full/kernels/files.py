"""Asynchronous reads and writes of tensors in files, by a few threads.

    with BlockIO() as io:
        state = aligned_empty(numel, torch.float32)
        reading = io.read("rank0.state", state)  # returns at once
        ...                                      # do not use `state` before
        reading.wait()

[Note: direct and buffered] The page cache costs a copy and memory, and a training state larger than memory
evicts everything else from it. So whole pages of the file bypass it (O_DIRECT) where the file system allows
that and the tensor's memory has the alignment that the device needs, as from `aligned_empty`. The two ends
of a transfer are buffered. The boundaries are page boundaries, so no page of a transfer is accessed in both
ways. Between transfers the kernel keeps cache and disk coherent.

The threads are in C++ (csrc/io), or in Python where nothing is compiled. They are no operators of torch;
csrc/bind_io.cpp has the reason.
"""

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import struct
import tempfile
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zero_full.direct_io import NOT_DIRECT, O_DIRECT
from zero_full.kernels import load
from zero_full.threads import start_threads

PAGE = max(4096, mmap.PAGESIZE)
O_CLOEXEC = getattr(os, "O_CLOEXEC", 0)  # not on Windows
MOST_IN_FLIGHT = 64  # transfers; each has two files open, and a process may often open only 1024
END_OF_FILE = -1  # instead of an errno
NO_MEMORY = -2  # instead of a transfer's number
POLL_MILLISECONDS = 100  # the delay of Ctrl-C, at most

AnyPath = str | os.PathLike[str]


# Threads ---------------------------------------------------------------------------------------------


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


class PythonThreads:
    """Threads in Python, if nothing is compiled. System calls release the GIL."""

    def __init__(self, threads: int) -> None:
        self._pool = start_threads(threads, "zero_full_io")

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
            raise MemoryError(
                "not enough host memory to queue another read or write of a file. Leave more of it free"
            )
        if number < 0:
            raise RuntimeError("the process is ending: files can no longer be read or written")
        return number

    def finish(self, started: int) -> Failure:
        """Wait, and return the first failure. Ctrl-C is noticed meanwhile."""
        found = _CFailure()
        while not self._functions.zf_io_wait(self._pool, started, POLL_MILLISECONDS, found):
            pass
        return Failure(found.error, found.at)

    def forget(self, started: int) -> None:
        """Free the pool's memory for a transfer that has ended. Its number becomes invalid."""
        self._functions.zf_io_forget(self._pool, started)


def _close(functions: ctypes.CDLL, pool: int, process: int) -> None:
    if os.getpid() == process:  # a forked child has no such threads
        functions.zf_io_close(pool)


# Files -----------------------------------------------------------------------------------------------


class Event(Protocol):
    """An event that can be waited for, such as a `torch.cuda.Event`."""

    def synchronize(self) -> object:
        """Wait for the event."""


class Opened(NamedTuple):
    """A file, open once or twice, and the alignment of offsets, lengths and memory that O_DIRECT needs."""

    buffered: FileIO
    direct: FileIO | None
    unit: int  # bytes
    memory_unit: int  # bytes
    reason: str  # why there is no `direct`

    def close(self) -> None:
        """Close the file. Raises errors that the file system has deferred."""
        try:
            if self.direct is not None:
                self.direct.close()
        finally:
            self.buffered.close()


def _open(path: str, write: bool, direct: bool) -> Opened:
    def opened(flags: int) -> FileIO:
        mode = "wb" if write else "rb"
        return FileIO(path, mode, opener=lambda name, _: os.open(name, flags | O_CLOEXEC, 0o666))

    flags = os.O_WRONLY if write else os.O_RDONLY
    buffered = opened(flags | (os.O_CREAT if write else 0))
    if not direct or not O_DIRECT:
        reason = "O_DIRECT is switched off" if O_DIRECT else "this system has no O_DIRECT"
        return Opened(buffered, None, PAGE, PAGE, reason)
    try:
        second = opened(flags | O_DIRECT)
    except OSError as error:
        return Opened(buffered, None, PAGE, PAGE, f"opening with O_DIRECT failed: {error.strerror}")
    memory_unit, unit = _units(second.fileno())
    reason = "" if unit else "the file system does not support O_DIRECT"
    if not os.path.samestat(os.fstat(buffered.fileno()), os.fstat(second.fileno())):
        reason = "the file was replaced while it was opened"
    if reason:
        second.close()
        return Opened(buffered, None, PAGE, PAGE, reason)
    return Opened(buffered, second, max(PAGE, unit, memory_unit), memory_unit, "")


def _units(file: int) -> tuple[int, int]:
    """Return the alignment of memory and of offsets for O_DIRECT: 0 if unsupported, a page if unknown."""
    statx = getattr(_libc(), "statx", None)
    at_empty_path, statx_dioalign, answer = 0x1000, 0x2000, ctypes.create_string_buffer(256)
    if statx is None or statx(file, b"", at_empty_path, statx_dioalign, answer):
        return PAGE, PAGE
    (mask,), (memory, offset) = struct.unpack_from("I", answer, 0), struct.unpack_from("II", answer, 152)
    return (memory, offset) if mask & statx_dioalign else (PAGE, PAGE)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _preallocate(file: int, end: int) -> None:
    """Allocate the file's final length, if the file system can do that at once.

    Otherwise direct writes past the end of the file would wait for each other.
    """
    fallocate, size = getattr(_libc(), "fallocate", None), os.fstat(file).st_size
    if fallocate is not None and end > size:
        fallocate(file, 0, ctypes.c_int64(size), ctypes.c_int64(end - size))  # an error is left to the writes


def _spans(memory: int, size: int, offset: int, opened: Opened) -> list[Span]:
    """Divide a transfer into head, whole units and tail; see [Note: direct and buffered]."""
    end, unit, buffered = offset + size, opened.unit, opened.buffered.fileno()
    begin, stop, direct = end, end, buffered
    if opened.direct is not None and (memory - offset) % opened.memory_unit == 0:
        begin = min(-(-offset // unit) * unit, end)
        stop = max(begin, end // unit * unit)
        direct = opened.direct.fileno()
    cuts = [(offset, begin, buffered), (begin, stop, direct), (stop, end, buffered)]
    return [Span(file, buffered, memory + a - offset, b - a, a) for a, b, file in cuts if a < b]


class Transfer:
    """A read or write of a tensor, which is kept alive. Do not use its storage before `wait`."""

    def __init__(self, io: "BlockIO", path: str, tensor: Tensor, offset: int, write: bool) -> None:
        self.path, self.offset, self.bytes, self.write = path, offset, tensor.nbytes, write
        self._io, self._tensor = io, tensor.detach()  # keeps the memory if `tensor.data` is replaced
        self._opened = _open(path, write, io.direct)
        self._spans = _spans(tensor.data_ptr(), self.bytes, offset, self._opened)
        self._lock = threading.Lock()
        self._failure: Failure | None = None
        self._file_size = 0

    @property
    def direct_bytes(self) -> int:
        """Number of bytes that bypass the page cache."""
        return sum(span.bytes for span in self._spans if span.file != span.buffered)

    def _begin(self) -> None:
        unit = self._opened.unit
        if self.write and self.direct_bytes:
            _preallocate(self._opened.buffered.fileno(), self.offset + self.bytes)
        block = -(-self._io.block_bytes // unit) * unit
        self._started = self._io.threads.start(self._spans, block, self.write, (self._tensor, self._opened))

    def wait(self) -> None:
        """Wait for the transfer. Raises its first error, at every call."""
        if self._failure is None:
            self._io._check_process()
            self._finish()
        if error := self._error():
            with self._io._lock:
                self._io._failed.pop(self, None)
            raise error

    def _finish(self) -> None:
        """Wait, and release files and tensor. Can be repeated after an interruption."""
        with self._lock:
            failure = self._failure
            if failure is None:
                failure = self._close(self._io.threads.finish(self._started))
            if self._io._complete(self, failure):
                self._io.threads.forget(self._started)
                del self._tensor

    def _close(self, failure: Failure) -> Failure:
        """Close the files. Returns the transfer's failure, or else that of closing."""
        if not self._opened.buffered.closed:
            self._file_size = os.fstat(self._opened.buffered.fileno()).st_size
        try:
            self._opened.close()
        except OSError as error:  # a disk quota on a network, for example
            return failure if failure.error else Failure(error.errno or errno.EIO, self.offset)
        return failure

    def _error(self) -> OSError | None:
        assert self._failure is not None
        error, at = self._failure
        if error == END_OF_FILE:
            wanted = f"{self.bytes} bytes at offset {self.offset}"
            return OSError(f"{self.path} has {self._file_size} bytes, too few to read {wanted}")
        verb = "writing" if self.write else "reading"
        text = f"{os.strerror(error)} ({verb} {self.bytes} bytes at offset {self.offset}, failed at {at})"
        return OSError(error, text, self.path) if error else None


class BlockIO:
    """Threads that read and write tensors in blocks. Close it, or use `with`.

    Wait between transfers that overlap in a file or in memory. Written data is visible to every reader, and
    survives a crash of the machine only after `sync`. Several Python threads may use it; a forked child may
    not. Do not fork during a read: open(2) has the reason, under O_DIRECT.

    A device may still have non-blocking copies to or from a tensor in its queue. A transfer waits for
    `after`, an event behind them. Without one, a transfer of pinned memory waits for all queued work of the
    current device.
    """

    def __init__(
        self, threads: int = 4, block_bytes: int = 2**20, *, direct: bool = True, compiled: bool | None = None
    ) -> None:
        if threads < 1 or block_bytes < 1:
            raise ValueError(f"threads={threads}, block_bytes={block_bytes}: both must be at least 1")
        self.block_bytes, self.direct = block_bytes, direct
        found = load.Loaded(None) if compiled is False else load.load(torch.device("cpu"))
        if compiled and found.path is None:
            raise RuntimeError(f"block I/O is not compiled: {found.reason}")
        self.threads = CompiledThreads(found.path, threads) if found.path else PythonThreads(threads)
        self._process = os.getpid()
        self._lock = threading.Lock()  # guards what follows
        self._closed = False
        self._in_flight: dict[Transfer, None] = {}  # the oldest first
        self._failed: dict[Transfer, None] = {}  # with errors that were not raised yet

    @property
    def compiled(self) -> bool:
        """Whether the threads are in C++."""
        return isinstance(self.threads, CompiledThreads)

    def write(self, path: AnyPath, tensor: Tensor, offset: int = 0, after: Event | None = None) -> Transfer:
        """Write the tensor's bytes at `offset`. The file is created or extended, and never truncated."""
        return self._start(path, tensor, offset, after, write=True)

    def read(self, path: AnyPath, tensor: Tensor, offset: int = 0, after: Event | None = None) -> Transfer:
        """Read the bytes at `offset` of the file into the tensor."""
        return self._start(path, tensor, offset, after, write=False)

    def wait(self) -> None:
        """Wait for all transfers. Raises the first error that no `Transfer.wait` has raised."""
        self._check_process()
        with self._lock:
            transfers = list(self._in_flight)
        for transfer in transfers:
            transfer._finish()
        with self._lock:
            failed, self._failed = list(self._failed), {}
        if failed and (error := failed[0]._error()):
            raise error

    def sync(self, path: AnyPath) -> None:
        """Wait for all transfers, and sync the file and its directory, to survive a crash."""
        self.wait()
        directory = Path(path).resolve().parent
        for name, flush in ((path, os.fdatasync), (directory, os.fsync)):
            file = os.open(name, os.O_RDONLY | O_CLOEXEC)
            try:
                flush(file)
            finally:
                os.close(file)

    def close(self) -> None:
        """Finish all transfers and end the threads. Raises the errors of `wait`."""
        self._check_process()
        with self._lock:
            self._closed = True
        try:
            self.wait()
        finally:
            self.threads.close()

    def __enter__(self) -> "BlockIO":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # Do not replace an error of the `with` block by one of `close`.
        with contextlib.suppress(OSError, RuntimeError) if error is not None else contextlib.nullcontext():
            self.close()

    def _start(
        self, path: AnyPath, tensor: Tensor, offset: int, after: Event | None, write: bool
    ) -> Transfer:
        self._check_open(path)
        _check_tensor(tensor)
        if offset < 0:
            raise ValueError(f"offset={offset} of {path}: must be at least 0")
        while oldest := self._oldest_if_full():
            oldest._finish()
        if after is not None:
            after.synchronize()
        elif tensor.is_pinned():
            torch.accelerator.synchronize()
        transfer = Transfer(self, os.fspath(path), tensor, offset, write)
        with self._lock:
            self._check_open(path)
            transfer._begin()
            self._in_flight[transfer] = None
        return transfer

    def _oldest_if_full(self) -> Transfer | None:
        with self._lock:
            full = len(self._in_flight) >= MOST_IN_FLIGHT
            return next(iter(self._in_flight)) if full else None

    def _complete(self, transfer: Transfer, failure: Failure) -> bool:
        """Record the end of a transfer. Returns False if it was recorded before."""
        with self._lock:  # both change together
            if transfer not in self._in_flight:
                return False
            self._failed |= {transfer: None} if failure.error else {}
            transfer._failure = failure
            del self._in_flight[transfer]
        return True

    def _check_open(self, path: AnyPath) -> None:
        self._check_process()
        if self._closed:
            raise ValueError(f"{path}: this BlockIO is closed")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this BlockIO belongs to process {self._process}: a forked child has none of its threads. "
                "Make a new BlockIO in the child."
            )


def _check_tensor(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(
            f"the tensor is on {tensor.device}: copy it to host memory (a pinned `aligned_empty`) first"
        )
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(f"the tensor of shape {tuple(tensor.shape)} is not contiguous: use .contiguous()")


def aligned_empty(numel: int, dtype: torch.dtype, pin: bool = False) -> Tensor:
    """Allocate a flat tensor that begins at a page boundary, pinned if wanted and CUDA is available."""
    size, pin = numel * dtype.itemsize, pin and torch.cuda.is_available()
    # Pinned memory is page-aligned, and its size a power of two, which one more page may double.
    room = torch.empty(size if pin else size + PAGE, dtype=torch.uint8, pin_memory=pin)
    if room.data_ptr() % PAGE and pin:
        room = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=True)
    begin = -room.data_ptr() % PAGE
    return room[begin : begin + size].view(dtype)


@dataclass(frozen=True)
class Description:
    """The way in which files of a directory are read and written, for logs."""

    compiled: bool
    direct: bool
    unit: int  # bytes: whole units bypass the page cache
    memory_unit: int  # bytes: alignment of the tensor's memory for that
    reason: str  # why they are not direct

    def __str__(self) -> str:
        threads = "compiled threads" if self.compiled else "Python threads"
        if not self.direct:
            return f"{threads}, through the page cache: {self.reason}"
        return f"{threads}, O_DIRECT for whole {self.unit} bytes from memory aligned to {self.memory_unit}"


def describe(path: AnyPath) -> Description:
    """Test, with a temporary file, how files in this directory, or beside this file, are read and written."""
    place = Path(path).resolve()
    directory = place if place.is_dir() else place.parent
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".zero_full_") as file:
        opened = _open(file.name, write=True, direct=True)
        try:
            direct, reason = opened.direct is not None, opened.reason
            if opened.direct is not None:
                page = aligned_empty(opened.unit, torch.uint8)
                span = Span(opened.direct.fileno(), opened.direct.fileno(), page.data_ptr(), page.nbytes, 0)
                error = transfer_block(span, write=True).error
                direct, reason = not error, f"writing a block failed: {os.strerror(error)}" if error else ""
        finally:
            opened.close()
    compiled = load.find("cpu").path is not None
    return Description(compiled, direct, opened.unit, opened.memory_unit, reason)
