"""A file for what does not fit in memory, which nobody else sees and which ends with its process.

It has no name: it is opened and taken out of its directory at once, so the system gives its space back when
the process ends, however it ends, and no other run can take it for its own. What is in it need not survive a
crash, so nothing is ever forced to the disk.

Space is taken when it is asked for (`take`), so a disk that is full says so then and not in the middle of a
write. Each piece of it can be seen as memory (`window`), and is mapped once: the system reads and writes its
pages as they are used, and drops them when memory is short.
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
from zero_full.offload.limits import limits_here

DAMAGED = (
    "what is read is not what was written, by a fault of the disk or by somebody who has written through "
    "`.data` or numpy, which nobody hears of (write to the tensors themselves)"
)
IN_MEMORY = (
    "nvme_path: {} is in this host's memory (tmpfs), so what waits there takes as much of that as with the "
    'device "cpu", and more time: give a directory on a disk'
)
MEMORY = (0x01021994, 0x858458F6)  # tmpfs and ramfs, as in linux/magic.h
LOST = 0xFF  # a byte; so many of them are NaN in every type
KEEP_SIZE, PUNCH_HOLE = 0x01, 0x02  # as in linux/falloc.h


def whole_pages(size: int) -> int:
    """So many bytes, or a few more."""
    return -(-size // PAGE) * PAGE


def free_bytes(directory: Path) -> int:
    """What this process may still write there."""
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    # A file system in memory promises more than there is: half of it all, whatever is in use.
    return min([free, *(limit.free for limit in limits_here(""))]) if is_in_memory(directory) else free


def is_in_memory(directory: Path) -> bool:
    """Whether what is written there takes the host's memory."""
    found = (ctypes.c_long * 64)()  # begins with the kind of file system
    known = ctypes.CDLL(None).statfs(os.fsencode(directory), found) == 0
    return known and int(found[0]) in MEMORY


def directory_of(path: str | Path) -> Path:
    """What a user means by it. ValueError for what would become a strange directory below this one."""
    if "$" in str(path) and not Path(path).exists():
        raise ValueError(
            f"nvme_path: {path} has a variable in it, and nobody fills it in: give the directory"
        )
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"nvme_path: {path} cannot be found: {error} Give the directory") from error


def refuse_here(directory: Path) -> None:
    """OSError where a file without a name cannot be reached."""
    if not Path("/proc/self/fd").is_dir():
        raise OSError(f"{directory}: state can wait in a file only where /proc is, which is on Linux")


def refuse_more_than_free(directory: Path, need: int) -> None:
    """OSError if the disk has not so much space for the ranks of this host."""
    refuse_here(directory)
    free = free_bytes(directory)
    if need > free:
        raise OSError(
            f"nvme_path: {directory} has {human(free)} free, and what waits on that disk (offload_optimizer, "
            f"offload_param) of this host's ranks needs {human(need)}: give a larger disk, or use more hosts"
        )


def page_sums(memory: Tensor) -> Tensor:
    """A checksum of each page: the sum of its words."""
    return memory.view(torch.int64).view(-1, PAGE // 8).sum(1)


class ScratchFile:
    """See the module's docstring."""

    def __init__(self, directory: Path, io: BlockIO) -> None:
        """`io`: its own, which ends with it."""
        refuse_here(directory)
        self.directory, self.io, self.size = directory, io, 0
        file = _nameless(directory)
        self.place = str(os.fstat(file).st_dev)  # which disk of this host it is on
        self.advice = IN_MEMORY.format(directory) if is_in_memory(directory) else ""
        self.path = f"/proc/self/fd/{file}"
        self._file, self._windows = file, dict[int, Tensor]()  # by where they begin
        self.close = weakref.finalize(self, os.close, file)

    def end(self) -> None:
        """Close it. Its space is free when nobody holds a window either."""
        self.io.close()
        self.close()
        self._windows.clear()

    def take(self, size: int) -> int:
        """Take space for so many bytes; returns where it begins. OSError if there is none."""
        begin, size = self.size, whole_pages(size)
        try:
            os.posix_fallocate(self._file, begin, max(size, PAGE))
        except OSError as error:
            free = free_bytes(self.directory) if self.directory.exists() else 0
            raise OSError(
                error.errno,
                f"{error.strerror}: {size} more bytes are needed for state that waits on disk, of which this "
                f"rank has {self.size} already, and {free} are free",
                str(self.directory),
            ) from error
        self.size += max(size, PAGE)
        return begin

    def give_back(self, begin: int, size: int) -> None:
        """The space that was taken there is free again."""
        self._windows.pop(begin, None)
        give = getattr(ctypes.CDLL(None), "fallocate", None)
        if give is not None:  # else it is free when the file ends
            give(self._file, KEEP_SIZE | PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(whole_pages(size)))

    def window(self, begin: int, size: int) -> Tensor:
        """These bytes, as memory, of a piece that was taken: from its begin."""
        window = self._windows.get(begin)
        if window is None or window.numel() < size:
            window = self._windows[begin] = _mapped(self._file, begin, max(size, 1))
        return window[:size]

    def write(self, tensor: Tensor, begin: int, after: Event | None = None) -> Transfer:
        """Put a tensor there. `after`: when a device is done with its memory."""
        return self.io.write(self.path, tensor, begin, after)

    def read(self, tensor: Tensor, begin: int, after: Event | None = None) -> Transfer:
        """Fill a tensor with what is there. `after`: when a device is done with its memory."""
        return self.io.read(self.path, tensor, begin, after)


def _nameless(directory: Path) -> int:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file, name = tempfile.mkstemp(prefix=".zero_full_", dir=directory)
        Path(name).unlink()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise OSError(
            getattr(error, "errno", None),
            f"nvme_path: no file can be made in {str(directory)!r} ({why}): give a directory on a fast disk, "
            "in which this process may write",
        ) from error
    return file


def _mapped(file: int, begin: int, size: int) -> Tensor:
    """These bytes of the file as memory, as long as somebody holds the tensor.

    Neither `torch.from_file` nor `mmap` of Python will do: the first begins where the file does, the second
    keeps a descriptor for each piece.
    """
    lead = begin % mmap.ALLOCATIONGRANULARITY
    system, whole = ctypes.CDLL(None, use_errno=True), lead + size
    system.mmap.restype, flags = ctypes.c_void_p, (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)
    place = system.mmap(None, ctypes.c_size_t(whole), *flags, file, ctypes.c_int64(begin - lead))
    if place in (None, ctypes.c_void_p(-1).value):
        error = ctypes.get_errno()
        raise OSError(error, f"{os.strerror(error)}: {size} bytes of a file cannot be mapped into memory")
    memory = (ctypes.c_uint8 * whole).from_address(place)
    weakref.finalize(memory, _unmap, place, whole).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)[lead:]


def _unmap(place: int, size: int) -> None:
    ctypes.CDLL(None).munmap(ctypes.c_void_p(place), ctypes.c_size_t(size))
