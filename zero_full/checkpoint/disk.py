"""Files that are complete or not there: each system call that a save makes, and no other way to the disk.

A checksum stands for each block of a file, so that a rank can verify what it reads and nothing else.
"""

import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BLOCK = 1 << 20  # bytes that share a checksum
NO_LINKS = getattr(os, "O_NOFOLLOW", 0)  # Windows has none


@contextmanager
def telling(what: str, path: Path) -> Iterator[None]:
    """Put into an OSError what was being done, and with which file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} while {what}", str(path)) from error


class NewFile:
    """A file that is written once, from its beginning to its end, and is on the disk after `finish`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size, self.blocks, self.crc = 0, list[int](), 0
        with telling("making a file", path):
            self.descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | NO_LINKS, 0o666)

    def write(self, data: bytes | memoryview) -> None:
        """Append these bytes."""
        left = memoryview(data).cast("B")
        with telling("writing", self.path):
            rest = left
            while rest:
                rest = rest[os.write(self.descriptor, rest) :]
        while left:
            part = left[: BLOCK - self.size % BLOCK]
            self.crc = zlib.crc32(part, self.crc)
            self.size += len(part)
            left = left[len(part) :]
            if self.size % BLOCK == 0:
                self.blocks.append(self.crc)
                self.crc = 0

    def finish(self) -> list[int]:
        """Wait until everything is on the disk, and return the checksum of each block."""
        if self.size % BLOCK:
            self.blocks.append(self.crc)
        with telling("flushing", self.path):
            os.fsync(self.descriptor)
        self.close()
        return self.blocks

    def close(self) -> None:
        """Let go of the file."""
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


def replace_file(path: Path, data: bytes, nonce: str) -> None:
    """A file has these bytes from now on; whoever reads it finds the old ones or the new ones."""
    part = path.with_name(f"{path.name}.{nonce}")
    try:
        write_file(part, data)
        rename(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def remove(folder: Path) -> None:
    """Remove a folder and all that is in it, as far as possible."""
    shutil.rmtree(folder, ignore_errors=True)


class OldFile:
    """A file of a known size that is read in ranges; links are not followed."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self.descriptor = os.open(path, os.O_RDONLY | NO_LINKS)
        found = os.fstat(self.descriptor).st_size
        if found != size:
            self.close()
            raise OSError(f"{path} has {found} bytes, not the {size} that were written: it was cut short")

    def read_into(self, buffer: memoryview, at: int) -> None:
        """Fill the buffer with the bytes from `at` on."""
        while buffer:
            got = os.preadv(self.descriptor, [buffer], at)
            if not got:
                raise OSError(f"{self.path} ends before byte {at + len(buffer)}")
            buffer, at = buffer[got:], at + got

    def checksum(self, block: int) -> int:
        """Of a block, as it is now."""
        begin = block * BLOCK
        buffer = bytearray(min(BLOCK, self.size - begin))
        self.read_into(memoryview(buffer), begin)
        return zlib.crc32(buffer)

    def close(self) -> None:
        """Let go of the file."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
