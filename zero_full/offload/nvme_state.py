"""Optimizer state in a file, in memory during its own part of a step only (ZeRO-Infinity).

[Note: two buffers] A step takes the parts in order. While one is stepped in one buffer, a lane writes the
previous part from the other buffer and then reads the next part into it:

    stepped      0            1            2            3
    lane      read 1     write 0 read 2   write 1 read 3   write 2      write 3

So memory holds two parts, and a step takes as long as the longer of computation and transfer. Transfers
bypass the page cache where the file system allows it.

[Note: at rest] Between steps the tensors of a part are windows into the file, mapped as memory. So code that
reads or writes them (a checkpoint, `safe_get_full_fp32_param`, a load) does not depend on the tier, and the
system caches and drops their pages as memory allows. The tensors of a part are contiguous in the file, as in
the buffer. Tensors made by a first step or a load are in ordinary memory until they are first written.

[Note: what can go wrong] Written parts have checksums, which are compared when they are read. A part that
cannot be written stays in memory, and so do all later ones: the step is finished, everything can be saved,
and the next step raises on all ranks. A part that cannot be read is lost: its tensors become NaN, and the
step raises on all ranks.
"""

import ctypes
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_full._compat import version_of
from zero_full.comm.lane import Pending, ThreadLane
from zero_full.kernels.files import BlockIO, aligned_empty
from zero_full.layout.flat import rounded_up
from zero_full.offload.arena import page_locker
from zero_full.offload.host_device_copies import CopyThreads
from zero_full.offload.nvme_params import BufferPool, NvmeParamStore
from zero_full.offload.param_store import ParamStore
from zero_full.offload.spill_file import (
    DAMAGED,
    NAN_BYTE,
    SpillFile,
    directory_of,
    page_checksums,
    whole_pages,
)
from zero_full.offload.storage import FileStorage
from zero_full.offload.tiers import FREED, HostTier, Owned, Tier

APART = 64  # bytes: every tensor begins at a multiple of them
TensorsOf = Callable[[Any], list[Tensor]]


@dataclass(frozen=True)
class BlockTier(HostTier):
    """ZeRO-Infinity: state is in an unnamed file in `path`, one for each rank, and is stepped on the host.

    As the tier of parameters: this rank's slices are in such a file and are prefetched.
    """

    path: str | Path = ""
    part_numel: int = 2**24  # elements stepped at a time, or one slice of parameters if that has more
    buffer_numel: int = 2**27  # elements of parameters in buffers; more if one unit needs more
    memory_numel: int = 0  # elements of parameters that stay in memory
    threads: int = 4
    block_bytes: int = 2**20  # per read or write of a thread
    direct: bool = True  # bypass the page cache (O_DIRECT) where the file system supports it
    kind = "disk"

    def __post_init__(self) -> None:
        """Raise ValueError for options that are out of range or not supported on a disk."""
        if self.ratio != 1:
            raise ValueError(f"ratio must be 1 for BlockTier, which offloads all state, not {self.ratio!r}")
        if not str(self.path):
            raise ValueError("BlockTier needs the path of a directory on a fast disk (nvme_path).")
        if self.delay_after is not None:
            raise ValueError("BlockTier cannot delay updates: its state is in memory during a step only.")
        if self.part_numel < 1:
            raise ValueError(f"part_numel must be at least 1, not {self.part_numel}")

    @property
    def copied_numel(self) -> int:  # type: ignore[override]
        """Elements of parameters that a step copies at a time: at most the buffers' size."""
        return min(Tier.copied_numel, self.buffer_numel)

    def open(self, sizes: Sequence[int], device: torch.device) -> Tier:
        """Return the tier of a run, with its file, buffers and threads, and host memory for copies."""
        return OpenNvmeTier(self, self._file(), HostTier(self.pin_memory).open(sizes, device))

    def param_store(self, device: torch.device) -> ParamStore:
        """Return the store of parameter slices, with its own file and threads."""
        buffers = BufferPool(self.buffer_numel, page_locker() if self.locks(device) else None)
        return NvmeParamStore(
            self._file(), buffers, self.memory_numel, HostTier(self.pin_memory).param_store(device)
        )

    def _file(self) -> SpillFile:
        io = BlockIO(self.threads, self.block_bytes, direct=self.direct)
        return SpillFile(directory_of(self.path), io)


class Block:
    """The contiguous layout of a slice's tensors: in a buffer during their step, in the file at rest."""

    def __init__(self, tensors: Sequence[Tensor], before: tuple[int, int] | None) -> None:
        """Lay out the tensors. The first is the master, of which others may be views.

        `before`: first byte and size in the file of the block that this one replaces.
        """
        self.before = before
        master, self.size, self.places = tensors[0], 0, list[int]()
        self.inside = [tensor is not master and _is_window(tensor, master) for tensor in tensors]
        for tensor, inside in zip(tensors, self.inside, strict=True):
            self.places.append(tensor.data_ptr() - master.data_ptr() if inside else self.size)
            if not inside:
                self.size += rounded_up(tensor.nbytes, APART)
        self.begin: int | None = None  # first byte in the file; None: not written yet
        self.checksums: Tensor | None = None  # checksums of the bytes in the file
        self.at: list[int] = []  # the tensors' addresses after the last `put`
        self.versions: list[int] = []  # the tensors' versions after the last `put`
        self.rests = False  # whether the tensors are windows into the file
        self.kept: Tensor | None = None  # the bytes in memory, after a failed write

    @property
    def padded_size(self) -> int:
        """Bytes in a buffer and in the file."""
        return bytes_of_block([self.size])

    @property
    def space(self) -> tuple[int, int] | None:
        """First byte and size in the file of this block, or of the one that it replaces."""
        return self.before if self.begin is None else (self.begin, self.padded_size)

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are the tensors of the last `put`, at the same addresses."""
        return [tensor.data_ptr() for tensor in tensors] == self.at

    def windows(self, tensors: Sequence[Tensor], memory: Tensor, copy: bool) -> list[Tensor]:
        """Return views of `memory` for the tensors; `copy`: with their values."""
        found = []
        for tensor, place, inside in zip(tensors, self.places, self.inside, strict=True):
            found.append(memory[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            if copy and not inside:
                found[-1].copy_(tensor)
        return found

    def put(self, tensors: Sequence[Tensor], memory: Tensor, copy: bool = False) -> None:
        """Make the tensors views of `memory`; `copy`: with their values."""
        windows = self.windows(tensors, memory, copy)
        for tensor, window in zip(tensors, windows, strict=True):
            tensor.data = window
        self.at, self.rests = [tensor.data_ptr() for tensor in tensors], False
        self.versions = [version_of(tensor) for tensor in tensors]

    def was_written(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the tensors at rest were written since the last `put`."""
        return [version_of(tensor) for tensor in tensors] != self.versions


def bytes_of_block(sizes: Iterable[int]) -> int:
    """Return the size of a block of tensors of these sizes, in a buffer and in the file."""
    return whole_pages(sum(rounded_up(size, APART) for size in sizes))


@dataclass
class LoadedPart:
    """A part of the state during a step: each slice's block, and its window into the buffer."""

    part: Sequence[Any]
    blocks: list[Block]
    windows: list[Tensor]
    reading: Pending


class OpenNvmeTier(FileStorage, Tier):
    """A `BlockTier` in a run. See the notes at the top."""

    is_offloaded, kind, moves, contents = True, BlockTier.kind, True, "the optimizer's state"

    def __init__(self, choice: BlockTier, file: SpillFile, host: Tier) -> None:
        """`host` is the tier that copies gradients from a device and parameters to it."""
        super().__init__(file, ThreadLane("zero_full-blocks"))
        self.part_numel, self.host = choice.part_numel, host
        self.buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self.blocks: weakref.WeakKeyDictionary[Any, Block] = weakref.WeakKeyDictionary()
        self.rooms: dict[int, tuple[int, int]] = {}  # by address: first byte in the file, size

    def close(self) -> None:
        """End threads and file, and free the buffers."""
        super().close()
        self.host.close()
        self.buffers.clear()
        self.blocks.clear()
        self.lost = self.lost or FREED

    def held(self) -> Sequence[Tensor]:
        """Return the two buffers."""
        return [buffer for buffer in self.buffers if buffer.numel()]

    def moved(self) -> dict[str, int]:
        """Return the bytes of blocks that steps read and wrote. Saves and other access are not counted."""
        return {"read from disk": self.read_bytes, "written to disk": self.written_bytes}

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a window into the file."""
        size = numel * dtype.itemsize
        begin = self.file.take(size)
        window = self.file.window(begin, size)
        self.rooms[window.data_ptr()] = begin, size
        return window.view(dtype)

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return a copy on the host, or a CPU tensor itself."""
        return self.host.fetch(tensor)

    def copy_threads(self, device: torch.device, sums: bool) -> CopyThreads | None:
        """Return the copies of the host tier: gradients and parameters do not pass through the file."""
        return self.host.copy_threads(device, sums)

    # A step --------------------------------------------------------------------------------------

    def load_parts(
        self, parts: Sequence[Sequence[Owned]], tensors_of: Callable[[Owned], list[Tensor]]
    ) -> Generator[Sequence[Owned]]:
        """Yield each part when it is in its buffer. See [Note: two buffers]."""
        try:
            turn = self._start_read(parts[0], tensors_of, 0) if parts else None
            for number, part in enumerate(parts):
                assert turn is not None
                now, later = turn, parts[number + 1 :]
                self._wait_for_read(now, tensors_of)
                try:
                    turn = self._start_read(later[0], tensors_of, number + 1) if later else None
                    yield part
                finally:
                    self._write_back(now, tensors_of)
        finally:
            self._finish_step(parts, tensors_of)

    def _start_read(self, part: Sequence[Any], tensors_of: TensorsOf, number: int) -> LoadedPart:
        """Queue the read of a part on the lane."""
        blocks = [self._block_of(owned, tensors_of(owned)) for owned in part]
        windows, there = self._windows(number % 2, blocks), list[tuple[Block, Tensor, Tensor | None]]()
        for owned, block, window in zip(part, blocks, windows, strict=True):
            if block.begin is not None and block.kept is None:
                there.append(
                    (block, window, None if block.was_written(tensors_of(owned)) else block.checksums)
                )
        return LoadedPart(part, blocks, windows, self.lane.submit(partial(self._read, there), [], []))

    def _block_of(self, owned: Any, tensors: list[Tensor]) -> Block:
        """Return the slice's block; a new one, with nothing in the file, if its tensors have changed."""
        block = self.blocks.get(owned)
        if block is None or not block.is_of(tensors):
            before = self.rooms.pop(tensors[0].data_ptr(), None) if block is None else block.space
            block = self.blocks[owned] = Block(tensors, before)
        return block

    def _windows(self, which: int, blocks: Sequence[Block]) -> list[Tensor]:
        """Return a window for each block into one of the two buffers, which grows to the largest part."""
        size = sum(block.padded_size for block in blocks)
        if self.buffers[which].numel() < size:
            self.lane.drain()  # no transfer uses the old buffer
            self.buffers[which] = aligned_empty(size, torch.uint8)
        return list(self.buffers[which][:size].split([block.padded_size for block in blocks]))

    def _read(self, there: Sequence[tuple[Block, Tensor, Tensor | None]]) -> None:
        """Read blocks, and compare checksums where they are known. Runs on the lane."""
        for block, window, sums in there:
            assert block.begin is not None
            try:
                self.file.read(window, block.begin).wait()
                self.read_bytes += window.numel()
                wrong = "" if sums is None or torch.equal(page_checksums(window), sums) else DAMAGED
            except OSError as error:
                wrong = str(error)
            if wrong:
                window.fill_(NAN_BYTE)
                self.on_read_error(wrong)

    def _wait_for_read(self, turn: LoadedPart, tensors_of: TensorsOf) -> None:
        """Wait for a part, and make its tensors views of the buffer."""
        turn.reading.wait()
        for owned, block, window in zip(turn.part, turn.blocks, turn.windows, strict=True):
            if block.kept is None:
                block.put(tensors_of(owned), window, copy=block.begin is None)

    def _write_back(self, turn: LoadedPart, tensors_of: TensorsOf) -> None:
        """Begin to write a part's state to the file. Its tensors lie in the buffer that is written."""
        for owned, block, window in zip(turn.part, turn.blocks, turn.windows, strict=True):
            tensors = tensors_of(owned)
            if not block.is_of(tensors):  # the step has made new tensors
                block = self.blocks[owned] = Block(tensors, block.space)
                window = aligned_empty(block.padded_size, torch.uint8)
                block.put(tensors, window, copy=True)
                _trim()  # the new tensors were many small allocations
            if block.kept is None:
                self._move_to_file(block, tensors, window)

    def _move_to_file(self, block: Block, tensors: Sequence[Tensor], window: Tensor) -> None:
        try:
            if self.write_error:
                block.kept = window.clone()
                return
            if block.begin is None:
                block.begin = self.file.take(block.padded_size)
                if block.before is not None:
                    self.file.give_back(*block.before)
        except OSError as error:
            block.kept = window.clone()
            self.on_write_error(error)
            return
        block.put(tensors, self.file.window(block.begin, block.padded_size))
        block.rests = True
        self.lane.submit(partial(self._write, block, window), [], [])

    def _write(self, block: Block, window: Tensor) -> None:
        """Write a block to the file, or keep it after a failed write. Runs on the lane."""
        assert block.begin is not None
        try:
            if not self.write_error:
                block.checksums = page_checksums(window)
                self.file.write(window, block.begin).wait()
                self.written_bytes += window.numel()
        except OSError as error:
            self.on_write_error(error)
        if self.write_error:
            block.kept = window.clone()

    def _finish_step(self, parts: Sequence[Sequence[Any]], tensors_of: TensorsOf) -> None:
        """End a step: all tensors are at rest, or kept in memory."""
        self.lane.drain()
        for owned in (owned for part in parts for owned in part):
            block, tensors = self.blocks.get(owned), tensors_of(owned)
            if block is None:
                continue
            if block.kept is not None:
                block.put(tensors, block.kept)
            elif not block.rests and block.is_of(tensors):
                # The step was interrupted. The buffer will be reused, and the file's bytes are obsolete.
                block = self.blocks[owned] = Block(tensors, block.space)
                block.put(tensors, aligned_empty(block.padded_size, torch.uint8), copy=True)


def _trim() -> None:
    """Return freed memory to the system: glibc would keep as much as the whole state."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _is_window(tensor: Tensor, master: Tensor) -> bool:
    begin = tensor.data_ptr() - master.data_ptr()
    return bool(tensor.numel()) and begin >= 0 and begin + tensor.nbytes <= master.nbytes
