"""Measure the bandwidths that offloading uses: memory, device and disk (`doctor --measure`).

A single process measures. Other work on the machine, and later other ranks, share the bandwidth.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from zero_full.errors import MeasureError
from zero_full.formatting import human
from zero_full.kernels.files import BlockIO, aligned_empty, describe

Rows = list[tuple[str, str]]
PIECE = 2**26  # bytes per copy or transfer
MAX_PIECES = 64  # largest number of pieces in the file
SECONDS = 2.0  # per kind of copy


def memory_rows(seconds: float = SECONDS, piece: int = PIECE) -> Rows:
    """Measure copies within host memory, and to and from an accelerator if one is available."""
    source, target = (torch.ones(piece, dtype=torch.uint8) for _ in range(2))
    threads = torch.get_num_threads()
    within = _rate(lambda: target.copy_(source), piece, seconds)
    rows = [("memory to memory", f"{_per_second(within)}, {threads} thread{'s' if threads > 1 else ''}")]
    if torch.accelerator.is_available():
        rows += _device_rows(seconds, piece)
    return rows


def _device_rows(seconds: float, piece: int) -> Iterator[tuple[str, str]]:
    device = torch.accelerator.current_accelerator()
    there = torch.ones(piece, dtype=torch.uint8, device=device)
    for kind, pin in (("page-locked", True), ("pageable", False)):
        here = torch.empty(piece, dtype=torch.uint8, pin_memory=pin)
        down = _rate(lambda here=here: _copied(here, there), piece, seconds)  # type: ignore[misc]
        up = _rate(lambda here=here: _copied(there, here), piece, seconds)  # type: ignore[misc]
        yield f"{kind} memory, {device}", f"to the host {_per_second(down)}, to the device {_per_second(up)}"


def _copied(to: Tensor, source: Tensor) -> None:
    to.copy_(source)
    torch.accelerator.synchronize()


def disk_rows(place: str, seconds: float = SECONDS, piece: int = PIECE) -> Rows:
    """Measure the disk of a directory as NVMe offloading uses it: write, read and delete a file."""
    directory = Path(place)
    if not directory.is_dir():
        raise MeasureError(f"{place} is not a directory. Pass a directory on the disk to measure")
    if not (hasattr(os, "preadv") and hasattr(os, "fdatasync")):
        raise MeasureError(f"{place} cannot be measured on this system, only on Linux. Omit the directory")
    try:
        how = describe(directory)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".zero_full_") as file, BlockIO() as io:
            buffer = aligned_empty(piece, torch.uint8)
            buffer.copy_(torch.randint(256, (piece,), dtype=torch.uint8))  # a disk may compress zeros
            most = _room(directory, piece)
            count, writing = _repeated(lambda n: _write(io, file.name, buffer, n), most, seconds)
            again, reading = _repeated(lambda n: _read(io, file.name, buffer, n), count, seconds)
    except OSError as error:
        raise MeasureError(f"{place} cannot be measured: {error}") from error
    note = "" if how.direct else " (possibly from the page cache instead of the disk)"
    return [
        (f"write to {place}", f"{_per_second(count * piece / writing)}, {human(count * piece)}"),
        (f"read from {place}", f"{_per_second(again * piece / reading)}, {human(again * piece)}{note}"),
        ("by", str(how)),
    ]


def _room(directory: Path, piece: int) -> int:
    """Return the number of pieces that use at most half of the free space."""
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    if free < 2 * piece:
        raise MeasureError(
            f"{directory} has {human(free)} free, and at least {human(2 * piece)} are needed. Pass another "
            "directory"
        )
    return min(MAX_PIECES, free // 2 // piece)


def _write(io: BlockIO, path: str, buffer: Tensor, number: int) -> None:
    io.write(path, buffer, number * buffer.nbytes).wait()
    io.sync(path)  # the system's page cache must not count, while the disk's own cache may


def _read(io: BlockIO, path: str, buffer: Tensor, number: int) -> None:
    io.read(path, buffer, number * buffer.nbytes).wait()


def _repeated(move: Callable[[int], object], most: int, seconds: float) -> tuple[int, float]:
    """Call `move` until the time is up. Returns the number of calls and the elapsed seconds."""
    begin, count = time.perf_counter(), 0
    while count < most and (not count or time.perf_counter() - begin < seconds):
        move(count)
        count += 1
    return count, time.perf_counter() - begin


def _rate(copy: Callable[[], object], size: int, seconds: float) -> float:
    """Return bytes per second, after a first copy that allocates pages and starts threads."""
    copy()
    count, elapsed = _repeated(lambda number: copy(), 10**6, seconds)
    return count * size / elapsed


def _per_second(rate: float) -> str:
    return f"{human(round(rate))}/s"
