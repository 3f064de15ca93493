"""Block I/O while things come and go: many transfers, threads, tensors, pools, processes."""

import array
import errno
import gc
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from tests.kernels.file_io import MiB, Run, content, noise
from zero_full.kernels import files
from zero_full.kernels.files import MOST_IN_FLIGHT, PAGE, BlockIO


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_many_files_are_on_their_way_at_once_with_a_bounded_number_open(tmp_path: Path, io: BlockIO) -> None:
    tensors = [noise(100 + 3 * PAGE + i, memory_offset=i % 2) for i in range(3 * MOST_IN_FLIGHT)]
    idle = open_files()
    for i, tensor in enumerate(tensors):
        io.write(tmp_path / f"{i}", tensor)
    assert open_files() <= idle + 2 * MOST_IN_FLIGHT
    io.wait()
    assert open_files() == idle
    back = [torch.empty_like(tensor) for tensor in tensors]
    for transfer in [io.read(tmp_path / f"{i}", tensor) for i, tensor in enumerate(back)]:
        transfer.wait()
        transfer.wait()
    assert all(map(torch.equal, back, tensors))


def test_several_python_threads_share_one_pool(tmp_path: Path, io: BlockIO) -> None:
    wrong: list[object] = []

    def use(me: int) -> None:
        try:
            for i in range(20):
                values, path = noise(5000 + 100 * me + i), tmp_path / f"{me}"
                io.write(path, values).wait()
                back = torch.empty_like(values)
                io.read(path, back).wait()
                wrong.extend([] if torch.equal(back, values) else [(me, i)])
        except BaseException as error:
            wrong.append(error)

    users = [threading.Thread(target=use, args=(i,)) for i in range(6)]
    for user in users:
        user.start()
    for user in users:
        user.join(30)
    assert not wrong


def test_several_python_threads_wait_for_the_same_transfer(tmp_path: Path, io: BlockIO) -> None:
    raised: list[OSError] = []

    def wait(transfer: files.Transfer) -> None:
        try:
            transfer.wait()
        except OSError as error:
            raised.append(error)

    for path in (tmp_path / "file", Path("/dev/full")):
        transfer = io.write(path, noise(2 * MiB))
        waiting = [threading.Thread(target=wait, args=(transfer,)) for _ in range(4)]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join(30)
    assert [error.errno for error in raised] == [errno.ENOSPC] * 4


def test_a_tensor_lives_until_it_has_arrived_and_no_longer(tmp_path: Path, io: BlockIO) -> None:
    memory = array.array("B", bytes(range(256)) * 16 * PAGE)
    alive, expected = weakref.ref(memory), memory.tobytes()
    values = torch.frombuffer(memory, dtype=torch.uint8)
    del memory
    transfer = io.write(tmp_path / "file", values)
    values.data = torch.empty(0, dtype=torch.uint8)  # as whoever releases a parameter does
    del values
    gc.collect()
    assert alive() is not None
    transfer.wait()
    assert (tmp_path / "file").read_bytes() == expected
    assert alive() is None


def test_a_forgotten_pool_still_finishes(tmp_path: Path, compiled: bool) -> None:
    def start() -> None:
        io = BlockIO(threads=1, block_bytes=PAGE, compiled=compiled)
        for i in range(5):
            io.write(tmp_path / f"{i}", noise(MiB))

    gc.collect()
    gc.freeze()  # so that the next collection has little to look at, and is over before the transfers are
    start()
    with pytest.warns(ResourceWarning):  # about the files
        gc.collect()
        deadline = time.monotonic() + 30
        expected = [content(noise(MiB))] * 5
        while [path.read_bytes() for path in sorted(tmp_path.iterdir())] != expected:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        gc.collect()
    gc.unfreeze()


def test_a_forked_child_is_told_and_its_parent_goes_on(
    tmp_path: Path, compiled: bool, in_new_process: Run
) -> None:
    script = f"""
io = BlockIO(threads=1, block_bytes=4096, compiled={compiled})
values = torch.ones(2**22, dtype=torch.uint8)
transfer = io.write(argument, values)
child = os.fork()
if child == 0:
    sync, write = lambda: io.sync(argument), lambda: io.write(argument, values)
    for use in (transfer.wait, io.wait, io.close, sync, write):
        try:
            use()
        except RuntimeError as error:
            print(error, flush=True)
    try:
        with io:
            raise KeyError
    except KeyError:
        own = BlockIO(compiled={compiled})
        own.write(argument + ".child", values)
        own.close()
        print("bye")
    sys.exit(7)
print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
transfer.wait()
io.close()
"""
    done = in_new_process(script)
    assert done.code == 0, done.err
    assert done.out.count("Make a new BlockIO in the child") == 5
    assert done.out.endswith("bye\nchild ended with 7\n")
    assert done.err == ""
    assert (tmp_path / "file").read_bytes() == (tmp_path / "file.child").read_bytes() == b"\1" * 2**22


ENDINGS = {
    "its last line": "",
    "an error": "raise SystemExit(3)",
    "an error in a with": "with io: raise SystemExit(3)",
    "a forgotten pool": "del io",
    "a thread that goes on": (
        "def go_on():\n"
        "  with contextlib.suppress(RuntimeError):\n"
        "    while True: io.write(argument + '.more', values).wait()\n"
        "threading.Thread(target=go_on, daemon=True).start()"
    ),
}


@pytest.mark.rotates
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_that_ends_with_transfers_in_flight_finishes_them(
    tmp_path: Path, compiled: bool, ending: str, in_new_process: Run
) -> None:
    script = f"""
io = BlockIO(threads=1, block_bytes=4096, compiled={compiled})
for i in range(4):
    path = pathlib.Path(f"{{argument}}.{{i}}")
    values = aligned_empty(2**20, torch.uint8).fill_(1)
    io.write(path, values)
    at_the_end.append(lambda path=path: print(path.read_bytes() == b"\\1" * 2**20))
io.read("/dev/zero", torch.empty(2**24, dtype=torch.uint8))
"""
    done = in_new_process(script + ENDINGS[ending])
    assert done.code == (3 if "error" in ending else 0), done.err
    assert done.err == ""
    assert done.out == "True\n" * 4
