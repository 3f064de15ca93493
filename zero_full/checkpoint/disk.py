"""Files that are complete or not there: each system call that a save makes, and no other way to the disk.

A checksum stands for each block of a file, so that a rank can verify what it reads and nothing else.
"""

import os
import stat
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
        self.path, self.size, self.descriptor = path, size, -1
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is no file, but a link or the like")
        if found.st_size != size:
            raise OSError(f"{path} has {found.st_size} bytes, not the {size} that were written")

    def read_into(self, buffer: memoryview, at: int) -> None:
        """Fill the buffer with the bytes from `at` on."""
        if self.descriptor < 0:
            self.descriptor = os.open(self.path, os.O_RDONLY | NO_LINKS)
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
