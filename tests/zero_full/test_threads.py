"""Every thread that the package starts begins on its rank's device, whatever starts it.

There is no accelerator here, so the functions of torch that know of devices are stand-ins.
"""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zero_full
from tests.slow_copies import slow_copies
from tests.zero_full.runs import Net, config, data
from zero_full import threads
from zero_full.checkpoint import disk
from zero_full.kernels.files import BlockIO, aligned_empty
from zero_full.start import launch

DEVICE = 5  # of this rank
BF16 = {"bf16": {"enabled": True}}


class Device:
    """An accelerator, with one current device a thread."""

    def __init__(self) -> None:
        self.of: dict[int, int] = {threading.get_ident(): DEVICE}

    def set(self, index: int) -> None:
        """Make it the calling thread's."""
        self.of[threading.get_ident()] = index

    def get(self) -> int:
        """The calling thread's."""
        return self.of.get(threading.get_ident(), 0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(threads, "current_device", lambda: torch.device("cuda", device.get()))
    monkeypatch.setattr(torch.accelerator, "set_device_index", device.set)
    return device


@pytest.fixture
def started(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """The device of each thread that was started, at its end, by the name of the thread."""
    found: dict[str, int] = {}
    run = threading.Thread.run

    def noted(thread: threading.Thread) -> None:
        try:
            run(thread)
        finally:
            found[thread.name] = device.get()

    monkeypatch.setattr(threading.Thread, "run", noted)
    yield found
    assert found and set(found.values()) == {DEVICE}, found


def names_of(started: dict[str, int]) -> set[str]:
    """Without the numbers of an executor's threads."""
    return {re.sub(r"_\d+$", "", name.removeprefix("zero_full-")) for name in started}


def test_a_thread_has_the_device_of_who_made_it(started: dict[str, int]) -> None:
    with threads.start_threads(2, "two") as executor:
        list(executor.map(lambda _: None, range(4)))
    thread = threads.make_thread(lambda: None, "one")
    thread.start()
    thread.join()
    assert names_of(started) == {"one", "two"}


def test_a_device_that_the_process_has_not_used_stays_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: DEVICE)
    assert threads.current_device() == torch.device("cuda", DEVICE)
    monkeypatch.setattr(module, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1 // 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: 1 // 0)
    assert threads.current_device() is None
    with threads.start_threads(1, "x") as executor:
        executor.submit(len, "").result()
    for none in (lambda: None, lambda: torch.device("mps")):  # no accelerator; one that has no such question
        monkeypatch.setattr(torch.accelerator, "current_accelerator", none)
        monkeypatch.delattr(module, "is_initialized", raising=False)
        assert threads.current_device() is None


ZERO: dict[str, dict[str, Any]] = {
    "delayed": {"offload_optimizer": {"device": "cpu", "delay_update_after": 1}},
    "in files": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
    "collectives": {"overlap_comm": True},
}
THREADS = {
    "delayed": {"gradients-down", "gradients-on-host", "parameters-up", "delayed-update"},
    "in files": {"gradients-down", "gradients-on-host", "parameters-up", "blocks"},
    "collectives": {"collectives"},
}


@pytest.mark.parametrize("kind", ZERO)
def test_every_thread_of_a_run_begins_on_the_ranks_device(
    kind: str, started: dict[str, int], tmp_path: Path
) -> None:
    zero = ZERO[kind]
    if kind == "in files":
        zero = {key: {**value, "nvme_path": str(tmp_path)} for key, value in zero.items()}
    stage = 3 if kind == "in files" else 2
    with slow_copies():
        engine = zero_full.initialize(model=Net(), config=config(stage, zero_optimization=zero, **BF16))[0]
        for step in range(3):
            engine.backward(engine(data(step, 0, 0, torch.bfloat16)))
            engine.step()
        engine.save_checkpoint(tmp_path / "saved", "tag", asynchronous=True)
        engine.destroy()
    assert names_of(started) >= {"save", *THREADS[kind]}


def test_threads_of_files_begin_there_too(
    started: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "PIECE", disk.BLOCK)
    disk.write_file(tmp_path / "flushed", bytes(2 * disk.BLOCK))
    reader = disk.FileReader(tmp_path / "flushed", 2 * disk.BLOCK)
    monkeypatch.setattr(disk, "MIN_THREADED", 1)
    assert len([*reader.checksums(range(2))]) == 2
    with BlockIO(compiled=False) as io:
        io.write(tmp_path / "blocks", aligned_empty(1000, torch.float32).zero_()).wait()
    assert names_of(started) >= {"write", "checksums", "zero_full_io"}


def test_a_group_is_destroyed_at_exit_on_the_ranks_device(
    started: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    launch._tear_down()
    assert [*started] == ["zero_full-destroy"]
