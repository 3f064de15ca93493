"""Files that are complete or not there: each system call that a save makes, and no other way to the disk.

A checksum stands for each block of a file, so that a rank can verify what it reads and nothing else.
"""

import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

BLOCK = 1 << 20  # bytes that share a checksum
BESIDE = 1 << 26  # bytes, after which a file's way to the disk begins, beside the writing of the next ones
THREADS = 4  # that compute checksums, of so many blocks or more
MANY = 8
NO_LINKS = getattr(os, "O_NOFOLLOW", 0)  # Windows has none


def refuse_here() -> None:
    """OSError where a save could not keep its promises."""
    if not hasattr(os, "preadv"):
        raise OSError("checkpoints are written and read on Linux and macOS only: on Windows use WSL")


@contextmanager
def telling(what: str, path: Path) -> Iterator[None]:
    """Put into an OSError what was being done, and with which file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} while {what}", str(path)) from error


class NewFile:
    """A file that is written once, from its beginning to its end, and is on the disk after `finish`.

    A system keeps what is written in memory for a while; so the disk would be idle until the end.
    """

    def __init__(self, path: Path) -> None:
        refuse_here()
        self.path = path
        self.size, self.blocks, self.crc = 0, list[int](), 0
        self.flushed, self.flush, self.failure = 0, Thread(), list[OSError]()
        with telling("making a file", path):
            self.descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | NO_LINKS, 0o666)

    def write(self, data: bytes | memoryview) -> None:
        """Append these bytes."""
        left = memoryview(data).cast("B")
        while left:
            part = left[: BLOCK - self.size % BLOCK]
            with telling("writing", self.path):
                rest = part
                while rest:
                    rest = rest[os.write(self.descriptor, rest) :]
            self.crc = zlib.crc32(part, self.crc)
            self.size += len(part)
            left = left[len(part) :]
            if self.size % BLOCK == 0:
                self.blocks.append(self.crc)
                self.crc = 0
                self._flush_beside()

    def _flush_beside(self) -> None:
        if self.size - self.flushed >= BESIDE and not self.flush.is_alive():
            self.flushed, self.flush = self.size, Thread(target=self._flush)
            with suppress(RuntimeError):  # at the end of a script none may be started: `finish` does it all
                self.flush.start()

    def _flush(self) -> None:
        try:
            os.fsync(self.descriptor)
        except OSError as error:  # the system says it once, to whoever asks first
            self.failure.append(error)

    def finish(self) -> list[int]:
        """Wait until everything is on the disk, and return the checksum of each block."""
        if self.size % BLOCK:
            self.blocks.append(self.crc)
        with telling("flushing", self.path):
            os.fsync(self.descriptor)
            self.close()
            for error in self.failure:
                raise error
        return self.blocks

    def close(self) -> None:
        """Let go of the file."""
        if self.flush.ident is not None:
            self.flush.join()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def write_file(path: Path, data: bytes) -> int:
    """A new file with these bytes, on the disk; returns their checksum."""
    file = NewFile(path)
    try:
        file.write(data)
        file.finish()
    finally:
        file.close()
    return zlib.crc32(data)


def make_folder(path: Path) -> None:
    """Make a new folder; an error if there is one already."""
    with telling("making a folder", path):
        path.mkdir()


def make_folders(path: Path) -> None:
    """Make a folder and those that it is in, so far as they are missing, and wait for the disk."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    with telling("making a folder", path):
        path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        flush_folder(each.parent)


def flush_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows cannot
        return
    with telling("flushing a folder", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Give a file or a folder another name; a file of that name is replaced."""
    with telling(f"renaming to {new.name}", old):
        old.replace(new)


def replace_file(path: Path, data: bytes, part: Path) -> None:
    """A file has these bytes from now on; whoever reads it finds the old ones or the new ones.

    part  where they are until then
    """
    try:
        write_file(part, data)
        rename(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a file or an empty folder."""
    with telling("removing", path):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


class OldFile:
    """A file of a known size that is read in ranges; links are not followed.

    It is opened when it is read, because of many ranks' files most ranks read few.
    """

    def __init__(self, path: Path, size: int) -> None:
        refuse_here()
        self.path, self.size, self.descriptor = path, size, -1
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is no file, but a link or the like")
        if found.st_size != size:
            raise OSError(f"{path} has {found.st_size} bytes, not the {size} that were written")

    def read_into(self, buffer: memoryview, at: int) -> None:
        """Fill the buffer with the bytes from `at` on."""
        self._open()
        while buffer:
            with telling("reading", self.path):
                got = os.preadv(self.descriptor, [buffer], at)
            if not got:
                raise OSError(f"{self.path} ends before byte {at + len(buffer)}")
            buffer, at = buffer[got:], at + got

    def _open(self) -> None:
        if self.descriptor < 0:
            with telling("opening", self.path):
                self.descriptor = os.open(self.path, os.O_RDONLY | NO_LINKS)

    def checksums(self, blocks: Sequence[int]) -> Iterator[int]:
        """Of these blocks, as they are now."""
        if len(blocks) < MANY:
            yield from map(self._checksum, blocks)
            return
        self._open()  # once, and not in each thread
        with ThreadPoolExecutor(THREADS) as threads:
            yield from threads.map(self._checksum, blocks)

    def _checksum(self, block: int) -> int:
        begin = block * BLOCK
        buffer = bytearray(min(BLOCK, self.size - begin))
        self.read_into(memoryview(buffer), begin)
        return zlib.crc32(buffer)

    def close(self) -> None:
        """Let go of the file."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
