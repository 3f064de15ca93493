"""Tensors go to files and come back, on compiled threads and on Python's."""

import errno
import os
import random
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.file_io import MiB, content, noise
from zero_full.kernels import files, load
from zero_full.kernels.crc32 import compiled_crc32, crc32_function
from zero_full.kernels.files import (
    PAGE,
    BlockIO,
    CompiledThreads,
    Failure,
    PythonThreads,
    Span,
    aligned_empty,
    describe,
)

SIZES = [1, 511, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 7 * PAGE + 77]
OFFSETS = [0, 1, 512, PAGE, 2 * PAGE + 1000]


@pytest.mark.parametrize("memory_offset", [0, 1, 64, 512])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("direct", [True, False])
def test_every_size_at_every_offset_comes_back_and_its_neighbours_stay(
    tmp_path: Path, compiled: bool, threads: int, direct: bool, memory_offset: int
) -> None:
    found = describe(tmp_path)

    def whole_pages(values: torch.Tensor, offset: int) -> int:
        """Bytes, if the device can take them from this memory."""
        pages = (offset + values.nbytes) // found.unit - -(-offset // found.unit)
        fits = found.direct and (values.data_ptr() - offset) % found.memory_unit == 0
        return max(0, pages) * found.unit * fits

    with BlockIO(threads, block_bytes=2 * PAGE, direct=direct, compiled=compiled) as io:
        for size in SIZES:
            for offset in OFFSETS:
                path, values = tmp_path / f"{size}-{offset}", noise(size, memory_offset)
                before = content(noise(offset + size + 3000))
                path.write_bytes(before)
                transfer = io.write(path, values, offset)
                transfer.wait()
                assert transfer.direct_bytes == whole_pages(values, offset) * direct, (size, offset)
                expected = before[:offset] + content(values) + before[offset + size :]
                assert path.read_bytes() == expected, (size, offset)
                back = noise(size, memory_offset).zero_()
                io.read(path, back, offset).wait()
                assert torch.equal(back, values), (size, offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (1000, 11)])
def test_every_dtype_and_shape_comes_back(
    tmp_path: Path, io: BlockIO, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    values = torch.randn(shape).to(dtype)
    io.write(tmp_path / "file", values).wait()
    assert (tmp_path / "file").read_bytes() == content(values)
    back = torch.empty(shape, dtype=dtype)
    io.read(tmp_path / "file", back).wait()
    assert torch.equal(back, values)


def test_a_parameter_can_be_read_and_written(tmp_path: Path, io: BlockIO) -> None:
    weight = torch.nn.Linear(30, 50).weight
    before = weight.detach().clone()
    io.write(tmp_path / "weight", weight).wait()
    with torch.no_grad():
        weight.zero_()
    io.read(tmp_path / "weight", weight).wait()
    assert torch.equal(weight, before)


def test_pieces_of_one_file_that_share_pages_are_written_at_once(tmp_path: Path, io: BlockIO) -> None:
    whole = noise(40 * PAGE)
    path, piece = tmp_path / "file", 3 * PAGE + 1234
    for begin in range(0, whole.numel(), piece):
        part = noise(
            min(piece, whole.numel() - begin), memory_offset=begin % PAGE
        )  # so that pages go directly
        part.copy_(whole[begin : begin + piece])
        io.write(path, part, begin)
    io.wait()
    assert path.read_bytes() == content(whole)
    io.read(path, whole.zero_()).wait()
    assert path.read_bytes() == content(whole)


def test_whole_pages_go_past_the_page_cache(tmp_path: Path, compiled: bool) -> None:
    found = describe(tmp_path)
    if not found.direct:
        pytest.skip(str(found))

    def from_disk(direct: bool) -> int:
        """Bytes that reading the file brings from the disk, as the kernel counts them."""

        def counted() -> int:
            lines = Path("/proc/self/io").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))

        before = counted()
        with BlockIO(direct=direct, compiled=compiled) as io:
            transfer = io.read(tmp_path / "file", values)
            transfer.wait()
        assert transfer.direct_bytes == (40 * found.unit if direct else 0)
        return counted() - before

    values = noise(40 * found.unit + 5)
    with BlockIO(compiled=compiled) as io:
        io.write(tmp_path / "file", values)
        io.sync(tmp_path / "file")
    with (tmp_path / "file").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if from_disk(direct=False) < 40 * found.unit:
        pytest.skip("files here are not on a disk")
    assert from_disk(direct=False) < found.unit  # now they are in the cache,
    assert from_disk(direct=True) >= 40 * found.unit  # and yet


def test_memory_that_is_not_aligned_goes_through_the_page_cache(tmp_path: Path, io: BlockIO) -> None:
    transfer = io.write(tmp_path / "file", noise(8 * PAGE, memory_offset=1))
    transfer.wait()
    assert transfer.direct_bytes == 0


def threads_of(compiled: bool) -> CompiledThreads | PythonThreads:
    path = load.load(torch.device("cpu")).path
    return CompiledThreads(path, 2) if compiled and path else PythonThreads(2)


def test_a_block_that_direct_access_refuses_goes_through_the_page_cache(
    tmp_path: Path, compiled: bool
) -> None:
    values, path = noise(2 * PAGE, memory_offset=1), tmp_path / "file"
    threads = threads_of(compiled)
    opened = files._open(str(path), write=True, direct=True)
    assert opened.direct is not None
    direct, buffered = opened.direct.fileno(), opened.buffered.fileno()

    def write(fallback: int) -> Failure:
        span = Span(direct, fallback, values.data_ptr(), values.nbytes, 0)
        return threads.finish(threads.start([span], PAGE, True, values))

    if write(direct).error != errno.EINVAL:
        pytest.skip("this file system does not mind")
    assert write(buffered) == Failure(0, 0)
    assert path.read_bytes() == content(values)
    opened.close()
    threads.close()


@pytest.mark.parametrize(
    ("code", "falls_back"),
    [(errno.EFAULT, True), (errno.EOPNOTSUPP, True), (errno.EIO, False)],
)
def test_only_what_direct_access_lacks_goes_through_the_page_cache(
    code: int, falls_back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO is the disk's: through the page cache it would come later, or never."""
    real, (direct, buffered) = os.pwritev, (os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in "ab")
    values, threads = noise(PAGE), PythonThreads(1)

    def refuse(file: int, parts: Any, offset: int) -> int:
        if file == direct:
            raise OSError(code, os.strerror(code))
        return real(file, parts, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    span = Span(direct, buffered, values.data_ptr(), values.nbytes, 0)
    failed = threads.finish(threads.start([span], PAGE, True, values))
    assert failed == (Failure(0, 0) if falls_back else Failure(code, 0))
    assert (tmp_path / "b").read_bytes() == (content(values) if falls_back else b"")
    for file in (direct, buffered):
        os.close(file)
    threads.close()


def test_where_direct_access_cannot_be_the_page_cache_is_used_and_the_reason_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = files._open("/dev/null", write=True, direct=True)
    assert opened.direct is None
    assert opened.reason == "opening with O_DIRECT failed: Invalid argument"
    opened.close()
    monkeypatch.setattr(files, "_units", lambda _: (0, 0))
    assert not describe(tmp_path).direct
    assert "page cache: the file system does not support O_DIRECT" in str(describe(tmp_path))
    monkeypatch.setattr(files, "O_DIRECT", 0)
    assert "page cache: this system has no O_DIRECT" in str(describe(tmp_path))
    with BlockIO() as io:
        transfer = io.write(tmp_path / "file", noise(8 * PAGE))
        transfer.wait()
    assert transfer.direct_bytes == 0
    assert (tmp_path / "file").read_bytes() == content(noise(8 * PAGE))


def test_describe_speaks_of_a_directory_or_of_a_file_to_be_and_leaves_nothing(tmp_path: Path) -> None:
    found = describe(tmp_path)
    assert found == describe(tmp_path / "not there yet")
    assert found.unit % PAGE == 0
    assert ("O_DIRECT for" in str(found)) == found.direct
    assert list(tmp_path.iterdir()) == []


def test_python_threads_go_on_after_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("preadv", "pwritev"):
        whole = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda file, parts, at, whole=whole: whole(file, [memoryview(parts[0])[:1000]], at)
        )
    with BlockIO(compiled=False) as io:
        io.write(tmp_path / "file", noise(5 * PAGE)).wait()
        back = torch.empty(5 * PAGE, dtype=torch.uint8)
        io.read(tmp_path / "file", back).wait()
    assert torch.equal(back, noise(5 * PAGE))


def test_sync_waits_and_flushes_the_file_and_its_name(
    tmp_path: Path, io: BlockIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[tuple[str, str, int]] = []

    def note(call: str, file: int) -> None:
        path = Path(f"/proc/self/fd/{file}").readlink()
        flushed.append((call, path.name, path.stat().st_size if path.is_file() else 0))

    for call in ("fdatasync", "fsync"):
        monkeypatch.setattr(os, call, partial(note, call))
    io.write(tmp_path / "file", noise(3 * MiB))
    io.sync(tmp_path / "file")
    assert flushed == [("fdatasync", "file", 3 * MiB), ("fsync", tmp_path.name, 0)]


@pytest.mark.parametrize("numel", [0, 1, 1000, 5 * PAGE])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_aligned_memory_begins_at_a_page(numel: int, dtype: torch.dtype) -> None:
    tensor = aligned_empty(numel, dtype)
    assert tensor.data_ptr() % PAGE == 0
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((numel,), dtype, True)
    assert not tensor.is_pinned()


@pytest.mark.parametrize("begins_at_a_page", [True, False])
def test_pinned_memory_is_no_larger_than_wanted_if_it_begins_at_a_page(
    begins_at_a_page: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    empty = torch.empty

    def pinned_empty(size: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        sizes.append(size)
        begin = -(whole := empty(size + 2 * PAGE, dtype=dtype)).data_ptr() % PAGE + 64 * (
            not begins_at_a_page
        )
        return whole[begin : begin + size]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", pinned_empty)
    tensor = aligned_empty(2**20, torch.float32, pin=True)
    assert sizes == ([2**22] if begins_at_a_page else [2**22, 2**22 + PAGE])
    assert (tensor.data_ptr() % PAGE, tensor.shape, tensor.dtype) == (0, (2**20,), torch.float32)


def test_a_file_that_grows_past_the_page_cache_has_its_room_before_the_first_write(
    tmp_path: Path, io: BlockIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not describe(tmp_path).direct:
        pytest.skip("no file grows past the page cache here")
    path, sizes = tmp_path / "file", list[tuple[int, bool]]()
    start = io.threads.start

    def noted(*arguments: Any) -> Any:
        sizes.append((path.stat().st_size, path.stat().st_blocks * 512 >= path.stat().st_size))
        return start(*arguments)

    monkeypatch.setattr(io.threads, "start", noted)
    for size, offset in ((20 * PAGE, 0), (5 * PAGE, 0), (3 * PAGE + 5, 30 * PAGE)):
        io.write(path, noise(size), offset).wait()
    assert sizes == [(20 * PAGE, True), (20 * PAGE, True), (33 * PAGE + 5, sizes[2][1])]
    back = noise(20 * PAGE).zero_()
    io.read(path, back).wait()
    assert content(back) == content(noise(5 * PAGE)) + content(noise(20 * PAGE))[5 * PAGE :]


class LateCopy:
    """A device's copy that arrives when somebody waits for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def synchronize(self) -> None:
        self.tensor.fill_(7)


@pytest.mark.parametrize("how", ["its event is given", "the memory is pinned"])
def test_what_a_device_is_still_copying_is_waited_for(
    tmp_path: Path, io: BlockIO, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = noise(3 * PAGE)
    copy = LateCopy(values)
    if how == "the memory is pinned":
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
        monkeypatch.setattr(torch.accelerator, "synchronize", copy.synchronize)
        io.write(tmp_path / "file", values).wait()
    else:
        io.write(tmp_path / "file", values, after=copy).wait()
    assert (tmp_path / "file").read_bytes() == b"\7" * (3 * PAGE)
    (tmp_path / "file").write_bytes(b"\1" * (3 * PAGE))
    io.read(tmp_path / "file", values, after=None if "pinned" in how else copy).wait()
    assert content(values) == b"\1" * (3 * PAGE)


def test_memory_is_pinned_only_where_there_is_cuda() -> None:
    tensor = aligned_empty(10_000, torch.float32, pin=True)
    assert tensor.is_pinned() == torch.cuda.is_available()
    assert tensor.data_ptr() % PAGE == 0


def test_checksums_are_those_of_zlib(compiled: bool) -> None:
    """Of every length around the pieces in which they are computed, at any address, and in parts."""
    path = load.load(torch.device("cpu")).path
    if compiled and path is None:
        pytest.skip("nothing is compiled")
    crc32 = (compiled_crc32(str(path)) if compiled else zlib.crc32) or zlib.crc32
    data, drawn = memoryview(bytearray(os.urandom(5000))), random.Random(0)
    for size in [*range(300), 4096, 4999, 5000]:
        begin, before = drawn.randrange(len(data) - size + 1), drawn.getrandbits(32)
        part = data[begin : begin + size]
        assert crc32(part, before) == zlib.crc32(part, before), size
        cut = drawn.randrange(size + 1)
        assert crc32(part[cut:], crc32(part[:cut], 0)) == zlib.crc32(part), (size, cut)
    assert crc32_function()(memoryview(bytes(data)), 0) == zlib.crc32(data), "memory that is read-only"
