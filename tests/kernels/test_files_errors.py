"""Block I/O says what is wrong, to whoever asks first, and goes on."""

import errno
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.kernels.file_io import Run, content, noise
from zero_full.kernels import load
from zero_full.kernels.files import MOST_IN_FLIGHT, PAGE, BlockIO


def test_an_error_names_the_path_the_place_and_the_reason(tmp_path: Path, io: BlockIO) -> None:
    values = noise(3 * PAGE)
    with pytest.raises(FileNotFoundError, match="missing"):
        io.read(tmp_path / "missing", values)
    with pytest.raises(FileNotFoundError, match="missing"):
        io.write(tmp_path / "missing" / "file", values)
    for start in (io.read, io.write):
        with pytest.raises(IsADirectoryError, match=str(tmp_path)):
            start(tmp_path, values)
    full = io.write("/dev/full", values, offset=PAGE)
    for _ in range(2):
        with pytest.raises(
            OSError, match=r"space left.*writing 12288 bytes at offset 4096.*/dev/full"
        ) as caught:
            full.wait()
        assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("size", [0, 1, PAGE, 2 * PAGE + 10])
@pytest.mark.parametrize("memory_offset", [0, 1])
def test_a_file_that_is_too_short_says_how_much_it_has(
    tmp_path: Path, io: BlockIO, size: int, memory_offset: int
) -> None:
    (tmp_path / "short").write_bytes(bytes(size))
    transfer = io.read(tmp_path / "short", noise(2 * PAGE + 11, memory_offset))
    with pytest.raises(OSError, match=f"short has {size} bytes, too few to read {2 * PAGE + 11} bytes"):
        transfer.wait()


def test_one_failure_leaves_the_others_alone_and_is_raised_once_by_whoever_asks_first(
    tmp_path: Path, compiled: bool
) -> None:
    io = BlockIO(threads=2, block_bytes=PAGE, compiled=compiled)
    bad, good = io.write("/dev/full", noise(50 * PAGE)), io.write(tmp_path / "good", noise(50 * PAGE))
    good.wait()
    with pytest.raises(OSError, match="/dev/full"):
        bad.wait()
    io.wait()
    io.write("/dev/full", noise(PAGE))
    with pytest.raises(OSError, match="/dev/full"):
        io.wait()
    io.wait()
    io.write("/dev/full", noise(PAGE))
    io.write(tmp_path / "late", noise(9 * PAGE))
    with pytest.raises(OSError, match="/dev/full"):
        io.close()
    io.close()
    assert (tmp_path / "good").read_bytes() == content(noise(50 * PAGE))
    assert (tmp_path / "late").read_bytes() == content(noise(9 * PAGE))
    with pytest.raises(ValueError, match=r"late.*closed"):
        io.read(tmp_path / "late", noise(PAGE))


def test_a_failure_that_was_pushed_out_by_later_transfers_is_not_lost(tmp_path: Path, io: BlockIO) -> None:
    io.write("/dev/full", noise(PAGE))
    for i in range(MOST_IN_FLIGHT + 5):
        io.write(tmp_path / f"{i}", noise(10))
    with pytest.raises(OSError, match="/dev/full"):
        io.wait()


def test_an_error_in_the_body_is_not_hidden_by_one_at_the_end(compiled: bool) -> None:
    with pytest.raises(KeyError), BlockIO(compiled=compiled) as io:
        io.write("/dev/full", noise(PAGE))
        raise KeyError


def test_a_file_that_may_not_be_written_says_so(compiled: bool, in_new_process: Run) -> None:
    script = f"""
io = BlockIO(compiled={compiled})
if os.getuid() == 0:  # who may everything
    os.setgid(65534); os.setuid(65534)
with io, tempfile.TemporaryDirectory() as directory:
    path = directory + "/file"
    open(path, "wb").write(bytes(10))
    os.chmod(path, 0o444)
    io.read(path, torch.empty(10, dtype=torch.uint8)).wait()
    try:
        io.write(path, torch.empty(10, dtype=torch.uint8)).wait()
    except PermissionError as error:
        print(error)
"""
    done = in_new_process(script)
    assert "Permission denied: '" in done.out, done.err


def test_a_write_of_which_a_part_fits_goes_on_and_fails_where_the_room_ends(
    tmp_path: Path, compiled: bool, in_new_process: Run
) -> None:
    script = f"""
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
with BlockIO(direct=False, compiled={compiled}) as io:
    try:
        io.write(argument, torch.ones(9000, dtype=torch.uint8)).wait()
    except OSError as error:
        print(error)
"""
    done = in_new_process(script)
    assert "File too large" in done.out, done.err
    assert "failed at 6000" in done.out
    assert (tmp_path / "file").read_bytes() == b"\1" * 6000


def test_what_cannot_be_transferred_is_refused(tmp_path: Path, io: BlockIO) -> None:
    path = tmp_path / "file"
    for wrong, reason in [
        (torch.empty(4, 4).t(), r"\(4, 4\) is not contiguous"),
        (torch.empty(1).expand(3), "is not contiguous"),
        (torch.empty(3, device="meta"), "is on meta: copy it to host memory"),
        (torch.eye(3).to_sparse(), "is not contiguous"),
    ]:
        with pytest.raises(ValueError, match=reason):
            io.write(path, wrong)
    with pytest.raises(ValueError, match=r"offset=-1 of .*file"):
        io.read(path, torch.empty(1), offset=-1)
    assert not path.exists()
    for settings in ({"threads": 0}, {"block_bytes": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            BlockIO(**settings)


def test_without_a_compiler_python_threads_are_used_or_the_reason_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load, "load", lambda device: load.Loaded(None, "no compiler here"))
    with BlockIO() as io:
        assert not io.compiled
    with pytest.raises(RuntimeError, match="no compiler here"):
        BlockIO(compiled=True)


@pytest.mark.parametrize("place", ["finish", "forget"])
def test_who_is_interrupted_while_waiting_can_wait_again(
    tmp_path: Path, io: BlockIO, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = getattr(io.threads, place)

    def interrupted(started: object) -> None:
        whole(started)
        raise KeyboardInterrupt

    for path, size in ((tmp_path / "file", 3 * PAGE), (Path("/dev/full"), PAGE)):
        transfer = io.write(path, noise(size))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(io.threads, place, interrupted)
            transfer.wait()
        with pytest.raises(OSError, match="space left") if path.name == "full" else nullcontext():
            transfer.wait()
    io.wait()
    assert (tmp_path / "file").read_bytes() == content(noise(3 * PAGE))
