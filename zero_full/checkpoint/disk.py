"""File operations of checkpoints: all system calls of a save, with fsync, atomic rename and checksums.

Each block of a file has a checksum of its own, so that a rank verifies only the blocks that it reads.

[Note: direct writes] Whole pages of a large file bypass the page cache (O_DIRECT) where the file system
allows it. A copy into the page cache costs processor time, which the training beside an asynchronous save
needs. A page of the file must then begin at a page of memory. Memory that lies like that (`is_aligned`) is
written in place, and all else is collected in a buffer. A thread writes one piece while the next one is
collected. Where O_DIRECT is not allowed, that thread flushes the file now and then. Otherwise the page cache
would hold the data, and the disk would be idle until the end.
"""

import ctypes
import mmap
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread

from zero_full.direct_io import NOT_DIRECT, O_DIRECT
from zero_full.errors import CheckpointError
from zero_full.threads import make_thread, start_threads

MAX_BYTES = 1 << 30  # of a manifest or a rank\'s JSON file; a larger one is damaged
BLOCK = 1 << 20  # bytes per checksum
PIECE = 1 << 24  # bytes that a thread writes while the next ones are collected
FLUSH_BYTES = 1 << 26  # bytes in the page cache after which the thread flushes a file that is being written
PAGE = max(4096, mmap.PAGESIZE)
Checksum = Callable[[memoryview, int], int]  # as `zlib.crc32`
THREADS = 4  # threads that compute checksums
MIN_THREADED = 8  # blocks; fewer are computed without threads
NO_LINKS = getattr(os, "O_NOFOLLOW", 0)  # Windows lacks the flag


def check_platform() -> None:
    """Raise OSError on platforms that lack the system calls of a save."""
    if not hasattr(os, "preadv"):
        raise OSError("checkpoints are written and read on Linux and macOS only. On Windows, use WSL")


def is_file_name(name: str) -> bool:
    """Return whether the name is a plain file name, which cannot lead out of its folder."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


@contextmanager
def add_context(action: str, path: Path) -> Iterator[None]:
    """Add the current action and the file's path to an OSError."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} while {action}", str(path)) from error


class FileWriter:
    """Writes a new file sequentially. The file is on the disk after `finish`. See [Note: direct writes]."""

    def __init__(self, path: Path, crc32: Checksum = zlib.crc32) -> None:
        check_platform()
        self.path, self.crc32 = path, crc32
        self.size, self.blocks, self.crc = 0, list[int](), 0
        self.buffers = [private_memory(PIECE), private_memory(PIECE)]  # collected here; being written
        self.filled = 0  # bytes in the first buffer
        self.direct = bool(O_DIRECT)
        self.unflushed = 0  # bytes in the page cache
        self.thread: Thread | None = None  # writes the last piece
        self.failure: OSError | None = None
        with add_context("making a file", path):
            self.descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | NO_LINKS, 0o666)

    def write(self, data: bytes | memoryview) -> None:
        """Append these bytes. They must not change before `finish`."""
        left = memoryview(data).cast("B")
        while left:
            count, in_place = self._next(left)
            if in_place:
                self._write_buffer()
                self._add_checksums(left[:count])
                self._write_behind(left[:count])
            else:
                copy = self.buffers[0][self.filled : self.filled + count]
                copy[:] = left[:count]
                self._add_checksums(copy)
                self.filled += count
                if self.filled == PIECE:
                    self._write_buffer()
            left = left[count:]

    def _next(self, left: memoryview) -> tuple[int, bool]:
        """Return how many bytes come next, and whether they are written from the caller's memory."""
        gap = -self.size % PAGE if self.direct else 0  # bytes up to the next page of the file
        whole = (len(left) - gap) // PAGE * PAGE
        in_place = whole >= BLOCK and (not self.direct or is_aligned(left, self.size))
        if in_place and not gap:
            return min(whole, PIECE), True
        return min(len(left), gap if in_place else BLOCK, PIECE - self.filled), False

    def _add_checksums(self, data: memoryview) -> None:
        while data:
            part = data[: BLOCK - self.size % BLOCK]
            self.crc = self.crc32(part, self.crc)
            self.size += len(part)
            data = data[len(part) :]
            if self.size % BLOCK == 0:
                self.blocks.append(self.crc)
                self.crc = 0

    def _write_buffer(self) -> None:
        if self.filled:
            self._write_behind(self.buffers[0][: self.filled])
            self.buffers.reverse()
            self.filled = 0

    def _write_behind(self, piece: memoryview) -> None:
        """Write in a thread, after the piece before. Raises the error of that one."""
        self._wait()
        thread = make_thread(partial(self._write_out, piece), "zero_full-write")
        try:
            thread.start()
            self.thread = thread
        except RuntimeError:  # no thread can start at interpreter exit
            self._write_out(piece)

    def _write_out(self, piece: memoryview) -> None:
        try:
            while piece:
                with add_context("writing", self.path):
                    piece = piece[self._write_some(piece) :]
            if self.unflushed >= FLUSH_BYTES:
                with add_context("flushing", self.path):
                    os.fsync(self.descriptor)
                self.unflushed = 0
        except OSError as error:
            self.failure = error

    def _write_some(self, piece: memoryview) -> int:
        """Write at least one byte, and return how many."""
        if self.direct and len(piece) >= BLOCK:
            try:
                with bypassing_cache(self.descriptor):
                    return os.write(self.descriptor, piece[: len(piece) // PAGE * PAGE])
            except OSError as error:
                if error.errno not in NOT_DIRECT:
                    raise
                self.direct = False
        written = os.write(self.descriptor, piece)
        self.unflushed += written
        return written

    def _wait(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.failure is not None:
            raise self.failure

    def finish(self) -> list[int]:
        """Wait until all data are on the disk, and return the checksum of each block."""
        if self.size % BLOCK:
            self.blocks.append(self.crc)
        self._wait()
        self._write_out(self.buffers[0][: self.filled])
        self._wait()
        with add_context("flushing", self.path):
            os.fsync(self.descriptor)
            self.close()
        return self.blocks

    def close(self) -> None:
        """Close the file."""
        if self.thread is not None:
            self.thread.join()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def private_memory(size: int) -> memoryview:
    """Return new memory that begins at a page. Pages take no memory until they are written."""
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return memoryview(mmap.mmap(-1, size, **flags))


def is_aligned(data: memoryview, offset: int) -> bool:
    """Return whether the pages of the file are pages in memory, if the data begin at `offset` of the file."""
    return not data.readonly and (ctypes.addressof(ctypes.c_char.from_buffer(data)) - offset) % PAGE == 0


@contextmanager
def bypassing_cache(descriptor: int) -> Iterator[None]:
    """Within this block, the file is open with O_DIRECT. OSError if its file system does not allow it."""
    import fcntl  # not at the top: Windows lacks it

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | O_DIRECT)
    try:
        yield
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def write_file(path: Path, data: bytes) -> int:
    """Write a new file, wait until it is on the disk, and return the data's checksum."""
    file = FileWriter(path)
    try:
        file.write(data)
        file.finish()
    finally:
        file.close()
    return zlib.crc32(data)


def make_folder(path: Path) -> None:
    """Create a folder. Raises OSError if it exists."""
    with add_context("making a folder", path):
        path.mkdir()


def make_folders(path: Path) -> None:
    """Create a folder and its missing parents, and wait until they are on the disk."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    with add_context("making a folder", path):
        path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        flush_folder(each.parent)


def flush_folder(path: Path) -> None:
    """Wait until a folder's entries are on the disk."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows cannot fsync a folder
        return
    with add_context("flushing a folder", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Rename a file or a folder. An existing file of the new name is replaced."""
    with add_context(f"renaming to {new.name}", old):
        old.replace(new)


def replace_file(path: Path, data: bytes, part: Path) -> None:
    """Replace a file's contents atomically: a reader finds either the old or the new bytes.

    part  path of the temporary file
    """
    try:
        write_file(part, data)
        rename(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def remove(path: Path) -> None:
    """Delete a file or an empty folder."""
    with add_context("removing", path):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


class FileReader:
    """Reads ranges of a file of a known size. Symbolic links are not followed.

    It is opened at the first read, because a rank reads only few of many ranks' files.
    """

    def __init__(self, path: Path, size: int, crc32: Checksum = zlib.crc32) -> None:
        check_platform()
        self.path, self.size, self.crc32, self.descriptor = path, size, crc32, -1
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise OSError(
                f"{path} is not a regular file, but a link or a special file. Copy the file itself here"
            )
        if found.st_size != size:
            raise OSError(
                f"{path} has {found.st_size} bytes, not the {size} that were written. Copy it again, or load "
                "another tag"
            )

    def read_into(self, buffer: memoryview, at: int) -> None:
        """Fill the buffer with the bytes from offset `at` on."""
        self._open()
        while buffer:
            with add_context("reading", self.path):
                got = os.preadv(self.descriptor, [buffer], at)
            if not got:
                raise OSError(f"{self.path} ends before byte {at + len(buffer)}")
            buffer, at = buffer[got:], at + got

    def _open(self) -> None:
        if self.descriptor < 0:
            with add_context("opening", self.path):
                self.descriptor = os.open(self.path, os.O_RDONLY | NO_LINKS)

    def checksums(self, blocks: Sequence[int]) -> Iterator[int]:
        """Yield the current checksums of these blocks."""
        if len(blocks) < MIN_THREADED:
            yield from map(self._checksum, blocks)
            return
        self._open()  # before the threads, which would race to open it
        with start_threads(THREADS, "zero_full-checksums") as threads:
            yield from threads.map(self._checksum, blocks)

    def _checksum(self, block: int) -> int:
        begin = block * BLOCK
        buffer = bytearray(min(BLOCK, self.size - begin))
        self.read_into(memoryview(buffer), begin)
        return self.crc32(memoryview(buffer), 0)

    def close(self) -> None:
        """Close the file."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def read_file(path: Path, crc: int | None = None, limit: int = MAX_BYTES) -> bytes:
    """Read a small file. Raises CheckpointError if it is too large or its checksum is not `crc`."""
    size = path.lstat().st_size
    if size > limit:
        raise CheckpointError(
            f"{path} is damaged: it has {size} bytes, and at most {limit} are expected. Load another tag"
        )
    file = FileReader(path, size)
    try:
        data = bytearray(size)
        file.read_into(memoryview(data), 0)
    finally:
        file.close()
    if crc is not None and zlib.crc32(data) != crc:
        raise CheckpointError(
            f"{path} is damaged: its checksum does not match. Copy it again, or load another tag"
        )
    return bytes(data)
