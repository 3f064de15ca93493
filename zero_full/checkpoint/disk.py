"""File operations of checkpoints: all system calls of a save, with fsync, atomic rename and checksums.

Each block of a file has a checksum of its own, so that a rank verifies only the blocks that it reads.
"""

import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

from zero_full.errors import CheckpointError
from zero_full.threads import make_thread, start_threads

MAX_BYTES = 1 << 30  # of a manifest or a rank\'s JSON file; a larger one is damaged
BLOCK = 1 << 20  # bytes per checksum
FLUSH_BYTES = 1 << 26  # bytes between two background fsyncs of a file that is being written
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
    """Writes a new file sequentially. The file is on the disk after `finish`.

    A thread flushes it in between. Otherwise the page cache would hold the data and the disk would be idle
    until the end.
    """

    def __init__(self, path: Path) -> None:
        check_platform()
        self.path = path
        self.size, self.blocks, self.crc = 0, list[int](), 0
        self.flushed, self.failure = 0, list[OSError]()
        self.flush: Thread | None = None  # the thread of the last flush
        with add_context("making a file", path):
            self.descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | NO_LINKS, 0o666)

    def write(self, data: bytes | memoryview) -> None:
        """Append these bytes."""
        left = memoryview(data).cast("B")
        while left:
            part = left[: BLOCK - self.size % BLOCK]
            with add_context("writing", self.path):
                rest = part
                while rest:
                    rest = rest[os.write(self.descriptor, rest) :]
            self.crc = zlib.crc32(part, self.crc)
            self.size += len(part)
            left = left[len(part) :]
            if self.size % BLOCK == 0:
                self.blocks.append(self.crc)
                self.crc = 0
                self._flush_in_background()

    def _flush_in_background(self) -> None:
        if self.size - self.flushed < FLUSH_BYTES or (self.flush is not None and self.flush.is_alive()):
            return
        self.flushed = self.size
        thread = make_thread(self._flush, "zero_full-flush")
        with suppress(RuntimeError):  # no thread can start at interpreter exit: `finish` flushes all
            thread.start()
            self.flush = thread

    def _flush(self) -> None:
        try:
            os.fsync(self.descriptor)
        except OSError as error:  # fsync reports an error only once, so keep it for `finish`
            self.failure.append(error)

    def finish(self) -> list[int]:
        """Wait until all data are on the disk, and return the checksum of each block."""
        if self.size % BLOCK:
            self.blocks.append(self.crc)
        with add_context("flushing", self.path):
            os.fsync(self.descriptor)
            self.close()
            for error in self.failure:
                raise error
        return self.blocks

    def close(self) -> None:
        """Close the file."""
        if self.flush is not None:
            self.flush.join()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


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

    def __init__(self, path: Path, size: int) -> None:
        check_platform()
        self.path, self.size, self.descriptor = path, size, -1
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
        return zlib.crc32(buffer)

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
