"""Large files: the disk begins beside the writing, threads verify, values are read where they belong."""

import ctypes
import errno
import fcntl
import os
import threading
import zlib
from pathlib import Path

import pytest
import torch

import zero_full
from zero_full.checkpoint import disk, open_checkpoint
from zero_full.checkpoint.disk import BLOCK, FileReader, FileWriter
from zero_full.errors import CheckpointError

SIZE = 10 * BLOCK + 12345


def written(path: Path, data: bytes) -> list[int]:
    """Write it in uneven pieces; the checksums."""
    file, sizes = FileWriter(path), [1, BLOCK - 1, 3 * BLOCK + 7, 0, 2 * BLOCK, len(data)]
    try:
        for size in sizes:
            file.write(memoryview(data)[file.size : file.size + size])
        return file.finish()
    finally:
        file.close()


def sums(data: bytes) -> list[int]:
    """The checksum of each block."""
    return [zlib.crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]


@pytest.mark.parametrize("beside", [1, 2 * BLOCK, disk.FLUSH_BYTES])
def test_a_file_is_the_same_however_often_the_disk_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: int
) -> None:
    data, flushes, flush = os.urandom(SIZE), list[bool](), os.fsync

    def counted(descriptor: int) -> None:
        flushes.append(threading.current_thread() is threading.main_thread())
        flush(descriptor)

    monkeypatch.setattr(disk, "O_DIRECT", 0)
    monkeypatch.setattr(disk, "PIECE", 2 * BLOCK)
    monkeypatch.setattr(disk, "FLUSH_BYTES", beside)
    monkeypatch.setattr(os, "fsync", counted)
    assert written(tmp_path / "file", data) == sums(data)
    assert (tmp_path / "file").read_bytes() == data
    assert flushes[-1] and flushes.count(False) in (range(4, 9) if beside < SIZE else [0])


def test_an_error_that_the_system_tells_beside_the_writing_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells it once: a later flush of the same file succeeds."""
    calls = list[int]()

    def failing(descriptor: int) -> None:
        calls.append(descriptor)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk, "O_DIRECT", 0)
    monkeypatch.setattr(disk, "PIECE", 2 * BLOCK)
    monkeypatch.setattr(disk, "FLUSH_BYTES", 6 * BLOCK)
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match=r"Input/output error while flushing: .*file"):
        written(tmp_path / "file", os.urandom(SIZE))
    assert len(calls) == 1


def test_whole_pages_bypass_the_page_cache_and_aligned_memory_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that refuses it, at once or at a later write, gets the same bytes through the cache."""
    if not disk.O_DIRECT:
        pytest.skip("this platform has no O_DIRECT")
    data, real, direct, refused = os.urandom(SIZE), os.write, list[tuple[int, int]](), list[int]()
    held = disk.private_memory(
        SIZE + disk.PAGE
    )  # as an asynchronous save holds it: pages of file and memory fit
    memory = held[100 : 100 + SIZE]
    memory[:] = data
    begins = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def watched(descriptor: int, part: memoryview) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & disk.O_DIRECT:
            if len(direct) in refused:
                code = errno.EOPNOTSUPP if refused[0] else errno.EINVAL
                raise OSError(code, os.strerror(code))
            direct.append((ctypes.addressof(ctypes.c_char.from_buffer(part)), len(part)))
        return real(descriptor, part)

    monkeypatch.setattr(disk, "PIECE", 4 * BLOCK)
    monkeypatch.setattr(os, "write", watched)
    for number, at in enumerate(([], [0], [1])):
        direct.clear()
        refused[:] = at
        file = FileWriter(tmp_path / str(number))
        file.write(bytes(100))
        file.write(memory)
        blocks = file.finish()
        assert (tmp_path / str(number)).read_bytes() == bytes(100) + data
        assert blocks == sums(bytes(100) + data)
        if not at and direct:  # the first page was collected, all others are written where they are
            first = begins + disk.PAGE - 100
            assert direct[0] == (first, 4 * BLOCK) and sum(size for _, size in direct) > 9 * BLOCK
        else:
            assert len(direct) == sum(at)
        assert written(tmp_path / f"{number}, uneven", data) == sums(data)
        assert (tmp_path / f"{number}, uneven").read_bytes() == data


@pytest.mark.parametrize("count", [1, disk.MIN_THREADED - 1, disk.MIN_THREADED, 11])
def test_threads_find_the_same_checksums(tmp_path: Path, count: int) -> None:
    data = os.urandom(SIZE)
    blocks = written(tmp_path / "file", data)
    file = FileReader(tmp_path / "file", SIZE)
    wanted = list(range(11 - count, 11))
    assert list(file.checksums(wanted)) == blocks[11 - count :]
    os.truncate(tmp_path / "file", SIZE - 1)
    with pytest.raises(OSError, match="ends before byte"):
        list(file.checksums(wanted))
    file.close()


def test_values_that_need_no_conversion_are_read_where_they_belong(tmp_path: Path) -> None:
    """As if they were copied there: in every type, in a part of a tensor, and autograd sees the write."""
    model = torch.nn.Linear(1500, 1500)
    optimizer = zero_full.assemble.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    zero_full.save_checkpoint(model, optimizer, tmp_path, "one")
    source, key, want = open_checkpoint(tmp_path), "parameters/weight", model.weight.detach().reshape(-1)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        whole = torch.zeros(2, want.numel(), dtype=dtype)
        for target, start in ((whole[0], 0), (whole[1, 5:99], 5), (whole.T[100:200, 1], 100)):
            version = target._version
            source.read_into(key, start, target)
            assert torch.equal(target, want[start : start + target.numel()].to(dtype))
            assert target._version > version
    source.close()
    file = tmp_path / "one/rank_00000.safetensors"
    data = bytearray(file.read_bytes())
    data[5 * BLOCK] ^= 1
    file.write_bytes(data)
    source = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=f"the checksum of bytes {5 * BLOCK} to {6 * BLOCK}"):
        source.read_into(key, 0, whole[0].float())
    source.close()
