"""One allocation of host memory for all offloaded tensors of a rank, page-locked if wanted.

[Note: arena] The sizes of all regions are known before the first is taken, so the memory never grows. Its
pages are anonymous and take no memory until they are written. Page-locked memory is registered with CUDA
chunk by chunk, because drivers reject very large registrations. A copy to or from a device must not cross
from one registration to the next, so a chunk ends between two regions. A larger region is a chunk by itself.
torch's own pinned memory is not used: it rounds sizes up to powers of two, and caches freed memory.

A region stays valid while a tensor refers to it. The pages are freed with the last region.

Memory that CUDA cannot page-lock is an error that names the key. Where no step depends on it (`optional`) it
stays pageable, with a warning. That training goes on after a failed registration has not run on a GPU.
"""

import logging
import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zero_full.layout.flat import rounded_up

log = logging.getLogger("zero_full")
LINE = 64  # bytes: regions begin at multiples of this
CHUNK = 2**30  # bytes in one registration, unless a single region is larger
LOCKABLE = "cuda"  # type of the devices whose runtime page-locks memory that exists: CUDA and ROCm
PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of this process


def page_locker() -> Any:
    """Return the runtime that page-locks memory for devices of type LOCKABLE. torch has no call for it."""
    return torch.cuda.cudart()


class Places:
    """The layout of regions of these sizes, in bytes, and of chunks."""

    def __init__(self, sizes: Sequence[int], chunk: int = CHUNK) -> None:
        self.starts: list[int] = []
        self.borders, end = [0], 0
        for size in sizes:
            if end > self.borders[-1] and end + size - self.borders[-1] > chunk:
                end = rounded_up(end, mmap.PAGESIZE)
                self.borders.append(end)
            self.starts.append(end)
            end = rounded_up(end + size, LINE)
        self.size = rounded_up(end, mmap.PAGESIZE)
        if self.size > self.borders[-1]:
            self.borders.append(self.size)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """First byte and size of each chunk."""
        return [(start, stop - start) for start, stop in pairwise(self.borders)]


class Arena:
    """Host memory divided into regions. See [Note: arena]."""

    def __init__(
        self, sizes: Sequence[int], cudart: Any = None, chunk: int = CHUNK, optional: str = ""
    ) -> None:
        """`sizes` are the bytes of the regions.

        `cudart`: the CUDA runtime that page-locks them; None: pageable. `optional`: what they are for, in a
        warning if they cannot be page-locked; "": that is an error.
        """
        sizes = [size for size in sizes if size]
        places = Places(sizes, chunk)
        self.size = places.size
        self.free: dict[int, list[int]] = {}  # first bytes of the free regions, by size
        for size, start in zip(reversed(sizes), reversed(places.starts), strict=True):
            self.free.setdefault(size, []).append(start)
        self.memory = anonymous_pages(self.size) if self.size else None
        self.locked, self.closed = 0, False
        # The registration must end before the pages are freed, also without a call of `close`.
        registered: list[int] = []
        self._unlock = weakref.finalize(self, _unregister, cudart, registered, self.memory)
        self._unlock.atexit = False
        if cudart is not None and self.memory is not None:
            begin = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
            for start, size in places.chunks:
                if problem := _register(cudart, begin + start, size, places.size):
                    if not optional:
                        raise RuntimeError(f'pin_memory: {problem}. Set "pin_memory": false in that section.')
                    log.warning("%s: %s. It stays pageable, which CUDA copies slower", optional, problem)
                    self._unlock()
                    self.locked = 0
                    break
                registered.append(begin + start)
                self.locked += size

    def take(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Take a free region of this size, filled with zeros, or None."""
        if numel and (starts := self.free.get(numel * dtype.itemsize)):
            assert self.memory is not None
            return torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=starts.pop())
        return None

    def close(self) -> None:
        """End the page-locking. No region can be taken afterwards."""
        self._unlock()
        self.locked, self.closed, self.memory, self.free = 0, True, None, {}


def anonymous_pages(size: int) -> mmap.mmap:
    """Map private anonymous pages, of which a forked child has a copy."""
    try:
        if not hasattr(mmap, "MAP_PRIVATE"):  # Windows, where no process is forked
            return mmap.mmap(-1, size)
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"the host cannot allocate {size:,} bytes for offload or an asynchronous save "
            f"({error.strerror}). Use more hosts, or lift the limit on memory (ulimit -v)."
        ) from error


def _register(cudart: Any, pointer: int, size: int, whole: int) -> str:
    """Page-lock a chunk, and return the error message, or ""."""
    error = int(cudart.cudaHostRegister(pointer, size, PORTABLE))
    if not error:
        return ""
    _clear_last_error()
    return (
        f"{size:,} of {whole:,} bytes of host memory cannot be page-locked (cudaHostRegister returned "
        f"{error}{_memlock_limit()})"
    )


def _clear_last_error() -> None:
    """Clear the error that CUDA keeps for this thread: torch would raise it behind its next kernel."""
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):
            torch.zeros((), device=LOCKABLE)


def _memlock_limit() -> str:
    try:
        import resource
    except ImportError:  # Windows
        return ""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return f"; ulimit -l allows {'no limit' if limit == resource.RLIM_INFINITY else f'{limit:,} bytes'}"


def _unregister(cudart: Any, pointers: list[int], memory: mmap.mmap | None) -> None:
    """End the page-locking. The argument `memory` keeps the pages alive until then."""
    if pointers:
        torch.cuda.synchronize()  # copies may be in flight
    while pointers:
        cudart.cudaHostUnregister(pointers.pop())
