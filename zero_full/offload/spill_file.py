"""An unnamed temporary file for tensors that do not fit in memory. It ends with its process.

The file is unlinked as soon as it is open, so the system frees its space when the process ends, however it
ends, and no other run can open it. Its contents need not survive a crash, so nothing is synced to the disk.

`take` allocates space at once, so a full disk is an error of `take` and not of a later write. Each allocation
can be mapped as memory (`window`), once: the system reads and writes its pages as they are used, and drops
them when memory is short.
"""

import ctypes
import mmap
import os
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

from zero_full.formatting import human
from zero_full.kernels.files import PAGE, BlockIO, Event, Transfer
from zero_full.layout.flat import rounded_up
from zero_full.offload.limits import memory_limits

DAMAGED = (
    "the bytes in the file are not those that were written. Either the disk is faulty, or they were "
    "changed through `.data` or numpy, which torch does not notice (write to the tensors themselves)"
)
TMPFS_ADVICE = (
    "nvme_path: {} is in this host's memory (tmpfs), so offload there saves no memory over the device "
    '"cpu" and takes longer. Give a directory on a disk.'
)
MEMORY_FILE_SYSTEMS = (0x01021994, 0x858458F6)  # tmpfs and ramfs, as in linux/magic.h
NAN_BYTE = 0xFF  # a byte that, repeated, is NaN in every floating-point dtype
KEEP_SIZE, PUNCH_HOLE = 0x01, 0x02  # as in linux/falloc.h


def whole_pages(size: int) -> int:
    """Round bytes up to whole pages."""
    return rounded_up(size, PAGE)


def free_bytes(directory: Path) -> int:
    """Return the bytes that this process may still write to the directory's disk."""
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    # A file system in memory reports half of all memory, also if less is free.
    return min([free, *(limit.free for limit in memory_limits(""))]) if is_in_memory(directory) else free


def is_in_memory(directory: Path) -> bool:
    """Return whether the directory's file system is in the host's memory."""
    found = (ctypes.c_long * 64)()  # begins with the kind of file system
    known = ctypes.CDLL(None).statfs(os.fsencode(directory), found) == 0
    return known and int(found[0]) in MEMORY_FILE_SYSTEMS


def directory_of(path: str | Path) -> Path:
    """Return the directory for a path with `~`. ValueError for an unexpanded variable or an unknown user."""
    if "$" in str(path) and not Path(path).exists():
        raise ValueError(f"nvme_path: {path} has a variable in it, which is not expanded. Expand it.")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"nvme_path: {path} cannot be found: {error} Give the directory.") from error


def check_proc(directory: Path) -> None:
    """Raise OSError on systems where an unnamed file cannot be reopened."""
    if not Path("/proc/self/fd").is_dir():
        raise OSError(f"nvme_path: {directory}: offload to a file needs /proc, which only Linux has.")


def check_disk_space(directory: Path, need: int) -> None:
    """Raise OSError if the disk does not have `need` free bytes for the ranks of this host."""
    check_proc(directory)
    free = free_bytes(directory)
    if need > free:
        raise OSError(
            f"nvme_path: {directory} has {human(free)} free, but offload of this host's ranks to that disk "
            f"(offload_optimizer, offload_param) needs {human(need)}. Give a larger disk, or use more hosts."
        )


def page_checksums(memory: Tensor) -> Tensor:
    """Return a checksum of each page: the sum of its 64-bit words."""
    return memory.view(torch.int64).view(-1, PAGE // 8).sum(1)


class SpillFile:
    """An unnamed file, with its space and its threads. See the top of this module."""

    def __init__(self, directory: Path, io: BlockIO) -> None:
        """`io` has the threads of this file, which `end` closes."""
        check_proc(directory)
        self.directory, self.io, self.size = directory, io, 0
        file = _open_unnamed(directory)
        self.disk_id = str(os.fstat(file).st_dev)  # the disk of this host
        self.advice = TMPFS_ADVICE.format(directory) if is_in_memory(directory) else ""
        self.path = f"/proc/self/fd/{file}"
        self._file, self._windows = file, dict[int, Tensor]()  # by their first byte
        self.close = weakref.finalize(self, os.close, file)

    def end(self) -> None:
        """Close the file. Its space is freed with the last window."""
        self.io.close()
        self.close()
        self._windows.clear()

    def take(self, size: int) -> int:
        """Allocate `size` bytes and return the offset of the first one. OSError if the disk is full."""
        begin, size = self.size, whole_pages(size)
        try:
            os.posix_fallocate(self._file, begin, max(size, PAGE))
        except OSError as error:
            free = free_bytes(self.directory) if self.directory.exists() else 0
            raise OSError(
                error.errno,
                f"{error.strerror}: {size} more bytes are needed for offload to this disk, where this rank "
                f"has {self.size} already and {free} are free",
                str(self.directory),
            ) from error
        self.size += max(size, PAGE)
        return begin

    def give_back(self, begin: int, size: int) -> None:
        """Free the space of an allocation."""
        self._windows.pop(begin, None)
        give = getattr(ctypes.CDLL(None), "fallocate", None)
        if give is not None:  # else it is freed with the file
            give(self._file, KEEP_SIZE | PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(whole_pages(size)))

    def window(self, begin: int, size: int) -> Tensor:
        """Return the first `size` bytes of an allocation, as memory."""
        window = self._windows.get(begin)
        if window is None or window.numel() < size:
            window = self._windows[begin] = _mapped(self._file, begin, max(size, 1))
        return window[:size]

    def write(self, tensor: Tensor, begin: int, after: Event | None = None) -> Transfer:
        """Write a tensor at `begin`. `after`: an event behind the device's work on its memory."""
        return self.io.write(self.path, tensor, begin, after)

    def read(self, tensor: Tensor, begin: int, after: Event | None = None) -> Transfer:
        """Read a tensor from `begin`. `after`: an event behind the device's work on its memory."""
        return self.io.read(self.path, tensor, begin, after)


def _open_unnamed(directory: Path) -> int:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file, name = tempfile.mkstemp(prefix=".zero_full_", dir=directory)
        Path(name).unlink()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise OSError(
            getattr(error, "errno", None),
            f"nvme_path: no file can be made in {str(directory)!r} ({why}). Give a directory on a fast disk, "
            "in which this process may write.",
        ) from error
    return file


def _mapped(file: int, begin: int, size: int) -> Tensor:
    """Map bytes of the file as a tensor, until it is freed.

    `torch.from_file` maps from the start of a file only, and Python's `mmap` keeps a file descriptor open for
    each mapping.
    """
    lead = begin % mmap.ALLOCATIONGRANULARITY
    system, whole = ctypes.CDLL(None, use_errno=True), lead + size
    system.mmap.restype, flags = ctypes.c_void_p, (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)
    place = system.mmap(None, ctypes.c_size_t(whole), *flags, file, ctypes.c_int64(begin - lead))
    if place in (None, ctypes.c_void_p(-1).value):
        error = ctypes.get_errno()
        raise OSError(error, f"{os.strerror(error)}: {size} bytes of a spill file cannot be mapped to memory")
    memory = (ctypes.c_uint8 * whole).from_address(place)
    weakref.finalize(memory, system.munmap, ctypes.c_void_p(place), ctypes.c_size_t(whole)).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)[lead:]
