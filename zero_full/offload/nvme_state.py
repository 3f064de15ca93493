"""Optimizer state in a file, of which host memory holds a part (ZeRO-Infinity).

[Note: state in memory] in `block_memory.py` is about the order of reads and writes. They take turns on one
lane, because a disk that does both at once is slower. Transfers bypass the page cache where the file system
allows it.

[Note: at rest] Between steps no transfer is under way. The tensors of a block are in memory, or they are
windows into the file, mapped as memory. So code that reads or writes them (a checkpoint,
`safe_get_full_fp32_param`, a load) does not depend on the tier. The system caches and drops the pages of a
window as memory allows. The tensors of a block are contiguous in the file, as in memory. Tensors made by a
first step or a load are in ordinary memory until they are first written.

[Note: what can go wrong] Written parts have checksums, which are compared when they are read. A part that
cannot be written stays in memory, and so do all later ones: the step is finished, everything can be saved,
and the next step raises on all ranks. A part that cannot be read is lost: its tensors become NaN, and the
step raises on all ranks.
"""

import mmap
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_full._compat import version_of
from zero_full.comm.lane import Pending, ThreadLane
from zero_full.freed_memory import return_freed_memory
from zero_full.kernels.files import PAGE, BlockIO, Transfer, aligned_empty
from zero_full.layout.flat import rounded_up
from zero_full.offload.arena import anonymous_pages, page_locker
from zero_full.offload.block_memory import BlockMemory, Read, Write, memory_for
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
PIECE = 2**24  # bytes that are read and checked at a time, while the next pieces are read
PIECES = 4  # that are read at a time
TensorsOf = Callable[[Any], list[Tensor]]


@dataclass(frozen=True)
class BlockTier(HostTier):
    """ZeRO-Infinity: state is in an unnamed file in `path`, one for each rank, and is stepped on the host.

    As the tier of parameters: this rank's slices are in such a file and are prefetched.
    """

    path: str | Path = ""
    part_numel: int = 2**22  # elements stepped at a time, or one slice of parameters if that has more
    state_numel: int = 2**25  # elements of which the state stays in memory; more if two parts have more
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
            raise ValueError("BlockTier cannot delay updates: its state is not all in memory between steps.")
        if self.part_numel < 1:
            raise ValueError(f"part_numel must be at least 1, not {self.part_numel}")
        if self.state_numel < 0:
            raise ValueError(f"state_numel must be at least 0, not {self.state_numel}")

    @property
    def copied_numel(self) -> int:  # type: ignore[override]
        """Elements of parameters that a step copies at a time: at most the buffers' size."""
        return min(Tier.copied_numel, self.buffer_numel)

    def open(self, sizes: Sequence[int], device: torch.device) -> Tier:
        """Return the tier of a run, with its file, memory and threads, and host memory for copies."""
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
    """The contiguous layout of a slice's tensors, in memory and in the file."""

    def __init__(self, tensors: Sequence[Tensor], before: tuple[int, int] | None) -> None:
        """Lay out the tensors. The first is the master, of which others may be views.

        `before`: first byte and size in the file of the block that this one replaces.
        """
        self.before = before
        master, self.size, self.places = tensors[0], 0, list[int]()
        self.numel = master.numel()
        self.inside = [tensor is not master and _is_window(tensor, master) for tensor in tensors]
        for tensor, inside in zip(tensors, self.inside, strict=True):
            self.places.append(tensor.data_ptr() - master.data_ptr() if inside else self.size)
            if not inside:
                self.size += rounded_up(tensor.nbytes, APART)
        self.begin: int | None = None  # first byte in the file; None: not written yet
        self.checksums: Tensor | None = None  # checksums of the bytes in the file
        self.window = torch.empty(0, dtype=torch.uint8)  # the memory of the tensors, or of their next read
        self.at: list[int] = []  # the tensors' addresses after the last `put`
        self.versions: list[int] = []  # the tensors' versions after the last `put`
        self.rests = False  # whether the tensors are windows into the file
        self.kept: Tensor | None = None  # the bytes in memory, after a failed write

    @property
    def padded_size(self) -> int:
        """Bytes in memory and in the file."""
        return bytes_of_block([self.size])

    @property
    def is_in_file(self) -> bool:
        """Whether it was written to the file. Then it is read to a place in memory."""
        return self.begin is not None and self.kept is None

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
        self.window = memory
        self.at, self.rests = [tensor.data_ptr() for tensor in tensors], False
        self.versions = [version_of(tensor) for tensor in tensors]

    def was_written(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the tensors at rest were written since the last `put`."""
        return [version_of(tensor) for tensor in tensors] != self.versions


def bytes_of_block(sizes: Iterable[int]) -> int:
    """Return the size of a block of tensors of these sizes, in memory and in the file."""
    return whole_pages(sum(rounded_up(size, APART) for size in sizes))


class PieceRead(NamedTuple):
    """A part of a block that is being read."""

    block: Block
    window: Tensor
    first_page: int
    sums: Tensor | None  # checksums of the whole block; None: unknown
    transfer: Transfer | OSError


class OpenNvmeTier(FileStorage, Tier):
    """A `BlockTier` in a run. See the notes at the top."""

    is_offloaded, kind, moves, contents = True, BlockTier.kind, True, "the optimizer's state"
    alternates = True

    def __init__(self, choice: BlockTier, file: SpillFile, host: Tier) -> None:
        """`host` is the tier that copies gradients from a device and parameters to it."""
        super().__init__(file, ThreadLane("zero_full-blocks"))
        self.part_numel, self.state_numel, self.host = choice.part_numel, choice.state_numel, host
        self.places = BlockMemory[Block](0)
        self.memory: mmap.mmap | None = None  # of the size of `places`
        self.blocks: weakref.WeakKeyDictionary[Any, Block] = weakref.WeakKeyDictionary()
        self.rooms: dict[int, tuple[int, int]] = {}  # by address: first byte in the file, size

    def close(self) -> None:
        """End threads and file, and free the memory."""
        super().close()
        self.host.close()
        self.places, self.memory = BlockMemory(0), None
        self.blocks.clear()
        self.lost = self.lost or FREED

    def held(self) -> Sequence[Tensor]:
        """Return the memory for blocks."""
        return [self._memory_at(0, self.places.size)] if self.places.size else []

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
        """Yield each part when it is in memory. See [Note: state in memory] in `block_memory.py`."""
        reading = deque[tuple[Sequence[Block], Pending]]()
        try:
            blocks = [[self._block_of(owned, tensors_of(owned)) for owned in part] for part in parts]
            self._size_memory(blocks, tensors_of)
            owners = {block: owned for owned, block in self.blocks.items()}
            for event in self.places.sweep(blocks):
                if isinstance(event, Write):
                    self._write_back(event.block, tensors_of(owners[event.block]))
                elif isinstance(event, Read):
                    reading.append((event.blocks, self._start_read(event.blocks, owners, tensors_of)))
                else:
                    part = parts[event.number]
                    self._wait_for_read(part, blocks[event.number], *reading.popleft(), tensors_of)
                    try:
                        yield part
                    finally:
                        self._note_new_tensors(part, tensors_of)
        finally:
            self._finish_step(tensors_of)

    def _block_of(self, owned: Any, tensors: list[Tensor]) -> Block:
        """Return the slice's block; a new one, with nothing in the file, if its tensors have changed."""
        block = self.blocks.get(owned)
        if block is None or not block.is_of(tensors):
            before = self.rooms.pop(tensors[0].data_ptr(), None) if block is None else block.space
            made = self.blocks[owned] = Block(tensors, before)
            if block in self.places.begins:  # where some of the tensors may still be
                made.put(tensors, aligned_empty(made.padded_size, torch.uint8), copy=True)
                self.places.free(block)
            block = made
        return block

    def _size_memory(self, blocks: Sequence[Sequence[Block]], tensors_of: TensorsOf) -> None:
        """Allocate larger memory if blocks in the file have been added."""
        largest = max(
            (sum(each.padded_size for each in part if each.is_in_file) for part in blocks), default=0
        )
        known = [block for block in self.blocks.values() if block.is_in_file]
        state, numel = sum(block.padded_size for block in known), sum(block.numel for block in known)
        wanted = memory_for(state, numel, largest, self.state_numel)
        if wanted > self.places.size:
            for owned, block in self.blocks.items():
                if block in self.places.begins:
                    self.places.free(block)
                    self._write_back(block, tensors_of(owned))
            self.lane.drain()
            self.places, self.memory = BlockMemory(wanted), anonymous_pages(wanted)

    def _memory_at(self, begin: int, size: int) -> Tensor:
        """Return bytes of the memory for blocks, as a storage of their own."""
        if not size:  # the slice of a rank that owns no element
            return torch.empty(0, dtype=torch.uint8)
        assert self.memory is not None
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=size, offset=begin)

    def _start_read(
        self, blocks: Sequence[Block], owners: Mapping[Block, Any], tensors_of: TensorsOf
    ) -> Pending:
        """Queue reads of blocks on the lane."""
        there = list[tuple[Block, Tensor, bool]]()
        for block in blocks:
            block.window = self._memory_at(self.places.begins[block], block.padded_size)
            known = not block.was_written(tensors_of(owners[block]))
            there.append((block, block.window, known))
        return self.lane.submit(partial(self._read, there), [], [])

    def _read(self, there: Sequence[tuple[Block, Tensor, bool]]) -> None:
        """Read blocks, and compare checksums where they are known. Runs on the lane."""
        reading, wrong = deque[PieceRead](), dict[Block, str]()
        for block, window, known in there:
            sums = block.checksums if known else None  # only now: a write that was queued before sets them
            for number, piece in enumerate(window.split(PIECE)):
                if len(reading) == PIECES:
                    self._check(reading.popleft(), wrong)
                reading.append(self._start_piece(block, piece, number * PIECE, sums))
            self.read_bytes += window.numel()
        while reading:
            self._check(reading.popleft(), wrong)
        for block, why in wrong.items():
            block.window.fill_(NAN_BYTE)
            self.on_read_error(why)

    def _start_piece(self, block: Block, window: Tensor, first: int, sums: Tensor | None) -> PieceRead:
        assert block.begin is not None
        try:
            transfer: Transfer | OSError = self.file.read(window, block.begin + first)
        except OSError as error:
            transfer = error
        return PieceRead(block, window, first // PAGE, sums, transfer)

    def _check(self, piece: PieceRead, wrong: dict[Block, str]) -> None:
        """Wait for a piece, and note the first error of its block."""
        try:
            if isinstance(piece.transfer, OSError):
                raise piece.transfer
            piece.transfer.wait()
            if piece.sums is not None:
                found = page_checksums(piece.window)
                if not torch.equal(found, piece.sums[piece.first_page :][: found.numel()]):
                    wrong.setdefault(piece.block, DAMAGED)
        except OSError as error:
            wrong.setdefault(piece.block, str(error))

    def _wait_for_read(
        self,
        part: Sequence[Any],
        blocks: Sequence[Block],
        read: Sequence[Block],
        reading: Pending,
        tensors_of: TensorsOf,
    ) -> None:
        """Wait for a part, and make its tensors views of memory."""
        reading.wait()
        for owned, block in zip(part, blocks, strict=True):
            if block in read:
                block.put(tensors_of(owned), block.window)
            elif block.begin is None and block.kept is None:
                block.put(tensors_of(owned), aligned_empty(block.padded_size, torch.uint8), copy=True)

    def _note_new_tensors(self, part: Sequence[Any], tensors_of: TensorsOf) -> None:
        """Begin to write blocks that are not in the file yet, or of which the step has made new tensors."""
        for owned in part:
            block, tensors = self.blocks[owned], tensors_of(owned)
            if not block.is_of(tensors):
                self.places.free(block)
                block = self.blocks[owned] = Block(tensors, block.space)
                block.put(tensors, aligned_empty(block.padded_size, torch.uint8), copy=True)
                return_freed_memory()  # the new tensors were many small blocks, as large as the whole state
            if block.begin is None and block.kept is None:
                self._write_back(block, tensors)

    def _write_back(self, block: Block, tensors: Sequence[Tensor]) -> None:
        """Begin to write a block to the file. Its tensors become windows into the file."""
        window = block.window
        try:
            if not self.write_error and block.begin is None:
                block.begin = self.file.take(block.padded_size)
                if block.before is not None:
                    self.file.give_back(*block.before)
        except OSError as error:
            self.on_write_error(error)
        if self.write_error:
            block.kept = window.clone()
            block.put(tensors, block.kept)
            return
        assert block.begin is not None
        block.put(tensors, self.file.window(block.begin, block.padded_size))
        block.rests = True
        self.lane.submit(partial(self._write, block, window), [], [])

    def _write(self, block: Block, window: Tensor) -> None:
        """Write a block to the file, or keep it after a failed write. Runs on the lane."""
        assert block.begin is not None
        try:
            if not self.write_error:
                writing = self.file.write(window, block.begin)
                block.checksums = page_checksums(window)  # meanwhile
                writing.wait()
                self.written_bytes += window.numel()
        except OSError as error:
            self.on_write_error(error)
        if self.write_error:
            block.kept = window.clone()

    def _finish_step(self, tensors_of: TensorsOf) -> None:
        """End a step: the tensors of every block are in memory, or at rest in the file."""
        self.lane.drain()
        for owned, block in [*self.blocks.items()]:
            tensors = tensors_of(owned)
            if block.kept is not None:
                block.put(tensors, block.kept)
            elif block.begin is None or (block.rests is not (block in self.places.begins)):
                continue
            else:  # the step was interrupted
                self.places.free(block)
                if not (block.rests and block.is_of(tensors)):
                    # The block was moved in part, or lies in memory that others will use.
                    block = self.blocks[owned] = Block(tensors, block.space)
                    block.put(tensors, aligned_empty(block.padded_size, torch.uint8), copy=True)


def _is_window(tensor: Tensor, master: Tensor) -> bool:
    begin = tensor.data_ptr() - master.data_ptr()
    return bool(tensor.numel()) and begin >= 0 and begin + tensor.nbytes <= master.nbytes
