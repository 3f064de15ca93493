"""A file for what does not fit in memory, which nobody else sees and which ends with its process.

It has no name: it is opened and taken out of its directory at once, so the system gives its space back when
the process ends, however it ends, and no other run can take it for its own. What is in it need not survive a
crash, so nothing is ever forced to the disk.

Space is taken when it is asked for (`take`), so a disk that is full says so then and not in the middle of a
write. The whole file can be seen as memory (`window`): the system reads and writes pages of it as they are
used, and drops them when memory is short.
"""

import ctypes
import os
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

from zero_full.kernels.files import PAGE, BlockIO, Event, Transfer
from zero_full.wording import human

DAMAGED = (
    "what is read is not what was written, by a fault of the disk or by somebody who has written through "
    "`.data` or numpy, which nobody hears of (write to the tensors themselves)"
)
LOST = 0xFF  # a byte; so many of them are NaN in every type
KEEP_SIZE, PUNCH_HOLE = 0x01, 0x02  # as in linux/falloc.h


def whole_pages(size: int) -> int:
    """So many bytes, or a few more."""
    return -(-size // PAGE) * PAGE


def free_bytes(directory: Path) -> int:
    """What this process may still write there."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def refuse_more_than_free(directory: Path, need: int) -> None:
    """OSError if the disk has not so much space for the ranks of this host."""
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
        self.directory, self.io, self.size = directory, io, 0
        file = _nameless(directory)
        self.place = str(os.fstat(file).st_dev)  # which disk of this host it is on
        self.path = f"/proc/self/fd/{file}"
        if not Path(self.path).exists():
            os.close(file)
            raise OSError(f"{directory}: state can wait in a file only where /proc is, which is on Linux")
        self._file, self._shown = file, torch.empty(0, dtype=torch.uint8)
        self.close = weakref.finalize(self, os.close, file)

    def end(self) -> None:
        """Close it. Its space is free when nobody holds a window either."""
        self.io.close()
        self.close()
        self._shown = self._shown[:0].clone()

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
        give = getattr(ctypes.CDLL(None), "fallocate", None)
        if give is not None:  # else it is free when the file ends
            give(self._file, KEEP_SIZE | PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(whole_pages(size)))

    def window(self, begin: int, size: int) -> Tensor:
        """These bytes, as memory."""
        if begin + size > self._shown.numel():
            self._shown = torch.from_file(self.path, shared=True, size=self.size, dtype=torch.uint8)
        return self._shown[begin : begin + size]

    def write(self, tensor: Tensor, begin: int, after: Event | None = None) -> Transfer:
        """Put a tensor there. `after`: when a device is done with its memory."""
        return self.io.write(self.path, tensor, begin, after)

    def read(self, tensor: Tensor, begin: int, after: Event | None = None) -> Transfer:
        """Fill a tensor with what is there. `after`: when a device is done with its memory."""
        return self.io.read(self.path, tensor, begin, after)


def _nameless(directory: Path) -> int:
    directory.mkdir(parents=True, exist_ok=True)
    file, name = tempfile.mkstemp(prefix=".zero_full_", dir=directory)
    Path(name).unlink()
    return file
