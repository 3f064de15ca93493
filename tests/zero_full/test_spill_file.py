"""A file that is seen as memory: what is mapped, and for how long."""

import gc
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch

import zero_full
from tests.zero_full.runs import Net, config
from tests.zero_full.test_nvme_state import count
from zero_full.kernels.files import PAGE, BlockIO, aligned_empty
from zero_full.offload import BlockTier, spill_file
from zero_full.offload.limits import Limit
from zero_full.offload.spill_file import SpillFile, whole_pages


def mapped(file: SpillFile) -> list[int]:
    """Bytes of each part of this process's memory that is a window into the file."""
    found = Path(file.path).stat()
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mine = [line[0].split("-") for line in lines if line[4] == str(found.st_ino)]
    return [int(stop, 16) - int(start, 16) for start, stop in mine]


def test_each_piece_of_a_file_is_mapped_once_and_as_long_as_somebody_holds_it(tmp_path: Path) -> None:
    file, windows = SpillFile(tmp_path, BlockIO(1, 2**20, direct=False)), []
    sizes = [1, PAGE, 5000, 3 * PAGE, 0] * 40
    descriptors = count("fd")
    for number, size in enumerate(sizes):
        begin = file.take(size)
        windows.append((begin, file.window(begin, size).fill_(number + 1)))
        assert file.window(begin, size).data_ptr() == windows[-1][1].data_ptr()
    assert sum(mapped(file)) == file.size, "however many there are"
    assert count("fd") == descriptors
    for number, (begin, window) in enumerate(windows):
        if window.numel():
            memory = aligned_empty(whole_pages(window.numel()), torch.uint8)
            file.read(memory, begin).wait()
            assert (memory[: window.numel()] == number + 1).all() and not memory[window.numel() :].any()
    kept = windows[3][1]
    for begin, window in windows[::2]:
        file.give_back(begin, window.numel())
    assert sum(mapped(file)) == file.size, "somebody has them"
    del windows, window
    gc.collect()
    taken = [max(whole_pages(size), PAGE) for size in sizes]
    assert sum(mapped(file)) == sum(taken[1::2])
    file.end()
    gc.collect()
    assert kept.numel() == 3 * PAGE and (kept == 4).all()
    assert count("fd") < descriptors


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("{}/file", "nvme_path: no file can be made in '{}/file'"),
        ("{}/file/below", "nvme_path: no file can be made in '{}/file/below'"),
        ("/proc/nothing", "nvme_path: no file can be made in '/proc/nothing'"),
        ("{}/\0", "nvme_path: no file can be made in '{}/\\x00'"),
        ("{}/" + 300 * "x", "nvme_path: no file can be made in '{}/xxx"),
        ("$SCRATCH/state", r"nvme_path: $SCRATCH/state has a variable in it"),
        ("~nobody-of-that-name/state", "nvme_path: ~nobody-of-that-name/state cannot be found"),
    ],
)
def test_a_path_that_cannot_be_is_refused_by_the_name_of_its_key(
    path: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises((OSError, ValueError)) as refused:
        BlockTier(path=path.format(tmp_path)).open([], torch.device("cpu"))
    assert text.format(tmp_path) in str(refused.value)
    assert [each.name for each in tmp_path.iterdir()] == ["file"], "and nothing is made of it"


def test_a_directory_with_a_strange_name_that_is_there_can_be_meant(tmp_path: Path) -> None:
    (tmp_path / "$odd").mkdir()
    BlockTier(path=tmp_path / "$odd").open([], torch.device("cpu")).close()


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_directory_in_memory_is_told_once_and_has_no_more_room_than_there_is_memory(
    in_memory: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    zero |= {"offload_optimizer": place, "offload_param": {**place, "max_in_cpu": 0}}
    least = 10**6
    with (
        mock.patch.object(spill_file, "is_in_memory", lambda directory: in_memory),
        mock.patch.object(spill_file, "memory_limits", lambda host: [Limit("", "", least, "")]),
    ):
        assert (spill_file.free_bytes(tmp_path) == least) is in_memory
        zero_full.initialize(model=Net(), config=config(3, zero_optimization=zero))[0].destroy()
        least = 1000
        with pytest.raises(OSError, match=r"has 1\.00 kB free") if in_memory else nullcontext():
            zero_full.initialize(model=Net(), config=config(3, zero_optimization=zero))[0].destroy()
    told = [line for line in caplog.messages if "is in this host's memory (tmpfs)" in line]
    assert len(told) == in_memory


def test_what_is_a_directory_in_memory() -> None:
    assert not spill_file.is_in_memory(Path("/proc"))
    if Path("/dev/shm").is_dir():
        assert spill_file.is_in_memory(Path("/dev/shm"))
