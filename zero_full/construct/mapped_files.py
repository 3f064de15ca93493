"""Memory-mapped tensors, as safetensors and `torch.load(mmap=True)` return them.

The kernel reads such a file page by page, when a tensor's values are used. So a rank that takes its slices of
a parameter reads little more than these. And ranks of one host whose tensors are the same bytes of the same
file have equal values, and need not read them to compare.

Linux lists the mapped files of a process in /proc/self. Elsewhere no tensor counts as mapped.
"""

import re
from bisect import bisect
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MAPS = Path("/proc/self/maps")
MAPS_WITH_CHANGES = Path("/proc/self/smaps")  # slower: the kernel looks at every page
BOOT = Path("/proc/sys/kernel/random/boot_id")  # differs between hosts, and is equal in a host's containers

# start-end rwxp offset device inode path; inode 0 is memory without a file
HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S{4} ([0-9a-f]+) (\S+) (\d+) *(.*)")
# Pages that this process has written, and that no longer are the file's
CHANGED = re.compile(r"(Anonymous|Swap): +[1-9]")


@dataclass(frozen=True)
class Mapping:
    """A range of this process's memory that is mapped from a file."""

    start: int
    end: int
    offset: int
    device: str
    inode: str
    path: str


class MappedFiles:
    """The files that this process has mapped. Look up only tensors that are older than this object."""

    def __init__(self, only_unchanged: bool = False) -> None:
        found: list[Mapping | None] = []
        source = MAPS_WITH_CHANGES if only_unchanged else MAPS
        for line in source.read_text().splitlines() if source.exists() else ():
            if header := HEADER.fullmatch(line):
                start, end, offset, device, inode, path = header.groups()
                in_file = Mapping(int(start, 16), int(end, 16), int(offset, 16), device, inode, path)
                found.append(in_file if inode != "0" else None)
            elif CHANGED.match(line):
                found[-1] = None
        self._mappings = [mapping for mapping in found if mapping is not None]
        self._starts = [mapping.start for mapping in self._mappings]
        self._boot = BOOT.read_text() if BOOT.exists() else ""

    def __contains__(self, tensor: Tensor) -> bool:
        return self._mapping_of(tensor) is not None

    def identity(self, tensor: Tensor) -> str | None:
        """Return a tensor's place in a mapped file: host, file, position and form; None if it is in no file.

        Equal descriptions are equal values, if the mappings are unchanged.
        """
        mapping = self._mapping_of(tensor)
        if mapping is None or not self._boot:
            return None
        position = tensor.data_ptr() - mapping.start + mapping.offset
        file = (self._boot, mapping.device, mapping.inode, mapping.path)
        return repr((*file, position, tensor.dtype, tuple(tensor.shape), tensor.stride()))

    def _mapping_of(self, tensor: Tensor) -> Mapping | None:
        is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized
        if not is_plain or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
            return None
        at = bisect(self._starts, tensor.data_ptr()) - 1
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        end = tensor.data_ptr() + (last + 1) * tensor.itemsize
        return self._mappings[at] if at >= 0 and end <= self._mappings[at].end else None
