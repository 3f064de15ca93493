"""What becomes of a save that is being written when its run ends: in order, by an error, a signal, a kill."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.worlds import POOL, RankError, free_port
from tests.zero_full.checkpoint_runs import Layout, engine_of, go
from tests.zero_full.test_checkpoint_async import disk_full, slowly, writer
from zero_full.checkpoint import complete, latest_tag
from zero_full.checkpoint.disk import FileWriter
from zero_full.errors import CheckpointError


def stopped(comm: Any, folder: Path) -> None:
    """A signal comes, and a save fails after the step in which all ranks hear of the signal."""
    engine, go_on = engine_of(Layout()), threading.Event()
    engine.on_signal(folder, [signal.SIGUSR1], tag="last")
    write = FileWriter.write

    def fails_later(self: FileWriter, data: Any) -> None:
        if "-bad" in str(self.path):
            go_on.wait()
            disk_full()
        write(self, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileWriter, "write", fails_later)
        engine.save_checkpoint(folder, "bad", asynchronous=True)
        os.kill(os.getpid(), signal.SIGUSR1)
        engine.optimizer.register_step_post_hook(lambda *step: go_on.set())
        with pytest.raises(SystemExit):
            go(engine, comm.rank, range(1))
    engine.destroy()


def test_a_failure_does_not_keep_a_run_from_saving_when_it_is_told_to_stop(tmp_path: Path) -> None:
    POOL.run(stopped, 2, tmp_path)
    assert complete(tmp_path).keys() == {"last"}


def killed(comm: Any, folder: Path) -> None:
    """Rank 1 is killed while it writes."""
    engine = engine_of(Layout())
    engine.save_checkpoint(folder, "good")
    with writer(slowly if comm.rank == 0 else lambda: os.kill(os.getpid(), signal.SIGKILL)):
        engine.save_checkpoint(folder, "bad", asynchronous=True)
        try:
            engine.wait_for_checkpoint()
        except CheckpointError as error:
            (folder / "said").write_text(str(error))


def test_a_rank_that_is_killed_while_it_writes_lets_nobody_wait_forever(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1: the process died"):
        POOL.run(killed, 2, tmp_path, collective=2)
    assert "no message from rank 1 within 2 s" in (tmp_path / "said").read_text()
    assert latest_tag(tmp_path) == "good" and complete(tmp_path).keys() == {"good"}


# The end of a script ---------------------------------------------------------------------------------

SCRIPT = """
import atexit, os, sys, threading, time
import torch, zero_full
from zero_full.checkpoint.disk import FileWriter
from zero_full.comm import store_messages as notes

if os.environ["RANK"] == "1":  # it reads what the first one has to say when that one could be gone
    notes.FIRST_PAUSE_S = notes.LONGEST_PAUSE_S = 1.5
zero_full.init_distributed()
given = {{"train_micro_batch_size_per_gpu": 1, "optimizer": {{"type": "AdamW"}}}}
atexit.register(print, "at its end", file=sys.stderr)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
engine = zero_full.initialize(model=model, config=given)[0]
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
engine.save_checkpoint(sys.argv[1], "one")

early = False

def changed(self, data, write=FileWriter.write):
    while threading.main_thread().is_alive() and not early:  # nothing is written before the script has ended
        time.sleep(0.01)
    {before}
    write(self, data)

FileWriter.write = changed
engine.save_checkpoint(sys.argv[1], "two", asynchronous=True)
{end}
"""
UNHEARD = """
early = True
engine.optimizer.background.running.thread.join()
"""
HEARD = """
early = True
try:
    engine.wait_for_checkpoint()
except zero_full.CheckpointError as error:
    print(error, file=sys.stderr)
"""
DISK_FULL = f"raise OSError({errno.ENOSPC}, {os.strerror(errno.ENOSPC)!r})"


def started(folder: Path, world: int, before: str = "", end: str = "") -> list["subprocess.Popen[str]"]:
    """The script on so many ranks, of which the first one has the store that they meet in."""
    place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", SCRIPT.format(before=before, end=end), str(folder)]
    places = [{**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return [subprocess.Popen(command, env=each, stderr=subprocess.PIPE, text=True) for each in places]


def ended(ranks: list["subprocess.Popen[str]"]) -> list[tuple[str, int]]:
    """What each has said, and its exit code."""
    return [(process.communicate(timeout=120)[1], process.returncode) for process in ranks]


@pytest.mark.rotates
def test_a_script_that_ends_right_after_the_call_loses_nothing(tmp_path: Path) -> None:
    for said, code in ended(started(tmp_path, 2)):
        assert code == 0 and " failed: " not in said
    assert latest_tag(tmp_path) == "two" and complete(tmp_path).keys() == {"one", "two"}
    assert list(tmp_path.glob("partial-*")) == []


@pytest.mark.rotates
def test_a_script_that_ends_with_an_error_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    """And one whose last save has failed says so by its exit code, if it has asked no more."""
    runs = {
        "raises": ("", "raise ValueError('of the script')"),
        "fails": (DISK_FULL, ""),
        "fails before its last line": (DISK_FULL, UNHEARD),
        "has heard of it": (DISK_FULL, HEARD),
    }
    processes = [process for name, lines in runs.items() for process in started(tmp_path / name, 1, *lines)]
    said, codes = zip(*ended(processes), strict=True)
    assert codes == (1, 1, 1, 0)
    assert "the script has ended with an error: of the script" in said[0]
    full = "-two failed: [Errno 28] No space left on device"
    assert all(full in each for each in said[1:])
    for name, each in zip(runs, said, strict=True):
        assert "at its end" in each
        assert latest_tag(tmp_path / name) == "one" and complete(tmp_path / name).keys() == {"one"}
