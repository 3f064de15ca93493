"""How fast this machine moves what waits on the host or on a disk: `python -m zero_full doctor --measure`.

One process moves at a time, and nothing else should: other work and other ranks share what is measured.
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
PIECE = 2**26  # bytes that are copied at a time, or are one transfer
MOST = 64  # such pieces in a file
SECONDS = 2.0  # for each kind of copy


def memory_rows(seconds: float = SECONDS, piece: int = PIECE) -> Rows:
    """Copies within the host's memory, and to and from an accelerator if there is one."""
    source, target = (torch.ones(piece, dtype=torch.uint8) for _ in range(2))
    threads = torch.get_num_threads()
    within = _rate(lambda: target.copy_(source), piece, seconds)
    rows = [("memory to memory", f"{_told(within)}, {threads} thread{'s' if threads > 1 else ''}")]
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
        yield f"{kind} memory, {device}", f"to the host {_told(down)}, to the device {_told(up)}"


def _copied(to: Tensor, source: Tensor) -> None:
    to.copy_(source)
    torch.accelerator.synchronize()


def disk_rows(place: str, seconds: float = SECONDS, piece: int = PIECE) -> Rows:
    """Files in this directory, as state that waits there is moved: one is written, read and removed."""
    directory = Path(place)
    if not directory.is_dir():
        raise MeasureError(f"{place} is no directory: give one on the disk that is to be measured")
    if not (hasattr(os, "preadv") and hasattr(os, "fdatasync")):
        raise MeasureError(f"{place} cannot be measured: this reads and writes in the way of Linux")
    try:
        how = describe(directory)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".zero_full_") as file, BlockIO() as io:
            buffer = aligned_empty(piece, torch.uint8)
            buffer.copy_(torch.randint(256, (piece,), dtype=torch.uint8))  # zeros may cost a disk nothing
            most = _room(directory, piece)
            count, writing = _repeated(lambda n: _write(io, file.name, buffer, n), most, seconds)
            again, reading = _repeated(lambda n: _read(io, file.name, buffer, n), count, seconds)
    except OSError as error:
        raise MeasureError(f"{place} cannot be measured: {error}") from error
    note = "" if how.direct else " (perhaps from the page cache, and not from the disk)"
    return [
        (f"write to {place}", f"{_told(count * piece / writing)}, {human(count * piece)}"),
        (f"read from {place}", f"{_told(again * piece / reading)}, {human(again * piece)}{note}"),
        ("by", str(how)),
    ]


def _room(directory: Path, piece: int) -> int:
    """How many pieces a file may have, so that half of what is free stays so."""
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    if free < 2 * piece:
        raise MeasureError(f"{directory} has {human(free)} free, and at least {human(2 * piece)} are needed")
    return min(MOST, free // 2 // piece)


def _write(io: BlockIO, path: str, buffer: Tensor, number: int) -> None:
    io.write(path, buffer, number * buffer.nbytes).wait()
    io.sync(path)  # the disk's own cache counts, the system's does not


def _read(io: BlockIO, path: str, buffer: Tensor, number: int) -> None:
    io.read(path, buffer, number * buffer.nbytes).wait()


def _repeated(move: Callable[[int], object], most: int, seconds: float) -> tuple[int, float]:
    """How often it was done until the time was up, and how long that took."""
    begin, count = time.perf_counter(), 0
    while count < most and (not count or time.perf_counter() - begin < seconds):
        move(count)
        count += 1
    return count, time.perf_counter() - begin


def _rate(copy: Callable[[], object], size: int, seconds: float) -> float:
    """Bytes a second, after a first time that makes pages and starts threads."""
    copy()
    count, elapsed = _repeated(lambda number: copy(), 10**6, seconds)
    return count * size / elapsed


def _told(rate: float) -> str:
    return f"{human(round(rate))}/s"
