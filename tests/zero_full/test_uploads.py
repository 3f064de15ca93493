"""Slices of parameters on the host, and an accelerator: who waits for whom, and that the host does not.

There is no accelerator here: its memory is the CPU's, and its streams are a log of what they are told.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zero_full.kernels.files import BlockIO
from zero_full.offload import nvme_params, param_store
from zero_full.offload.arena import Arena
from zero_full.offload.nvme_params import BufferPool, NvmeParamStore
from zero_full.offload.param_store import HostParamStore, ParamSlice
from zero_full.offload.spill_file import SpillFile

LOG: list[str] = []


class FakeEvent:
    """An event of a stream."""

    def __init__(self, name: str) -> None:
        self.name = name

    def synchronize(self) -> None:
        """The host waits."""
        LOG.append(f"the host waits for {self.name}")


class FakeStream:
    """What is asked of torch.Stream."""

    def __init__(self, name: str) -> None:
        self.name, self.events = name, 0

    def wait_stream(self, other: "FakeStream") -> None:
        LOG.append(f"{self.name} waits for all of {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        LOG.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> FakeEvent:
        self.events += 1
        return FakeEvent(f"{self.name} {self.events}")

    def __enter__(self) -> None:
        LOG.append(f"on {self.name}")

    def __exit__(self, *_: object) -> None:
        LOG.append("off")


COMPUTE, GATHERS = FakeStream("compute"), FakeStream("gathers")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def current(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the stream on which the caller queues its work."""
    LOG.clear()
    for stream in (COMPUTE, GATHERS):
        stream.events = 0
    now = [COMPUTE]
    for module in (param_store, nvme_params):
        monkeypatch.setattr(module, "current_stream", lambda device: now[0])
    monkeypatch.setattr(torch, "Stream", lambda device: FakeStream("uploads"))

    def set_to(stream: FakeStream) -> None:
        now[0] = stream

    return set_to


def taken() -> list[str]:
    """What was queued since the last call."""
    found, LOG[:] = list(LOG), []
    return found


def gathered(slice_: ParamSlice, numel: int, current: Any) -> Tensor:
    """The slice in a gathered buffer, by a job of the lane of gathers."""
    place = torch.zeros(numel)
    current(GATHERS)
    slice_.copy_to(place, COMPUTE)
    current(COMPUTE)
    return place


def test_a_copy_waits_for_memory_and_not_for_the_gather_before_it(current: Any) -> None:
    store = HostParamStore()
    first, second = (store.add(torch.full((4,), float(n))) for n in (1, 2))
    assert gathered(first, 4, current).tolist() == [1.0] * 4
    upload = ["uploads waits for all of compute", "on uploads", "off"]
    assert taken() == [*upload, "gathers waits for uploads 1"]
    assert gathered(second, 4, current).tolist() == [2.0] * 4
    assert taken() == [*upload, "gathers waits for uploads 2"], "in series with the gather before it"


def test_outside_of_a_lane_a_copy_waits_for_the_callers_stream(current: Any) -> None:
    slice_ = HostParamStore().add(torch.ones(4))
    current(GATHERS)
    slice_.copy_to(torch.zeros(4))
    assert taken()[0] == "uploads waits for all of gathers"


def test_a_step_on_the_device_copies_both_ways_and_the_host_waits_for_neither(current: Any) -> None:
    slice_ = HostParamStore().add(torch.ones(4))
    gathered(slice_, 4, current)
    taken()
    fetched = slice_.fetch(CPU)
    assert fetched.tolist() == [1.0] * 4 and fetched.data_ptr() != slice_.at_rest.data_ptr()  # type: ignore[attr-defined]
    assert taken() == ["compute waits for uploads 1"]
    slice_.update(fetched.add_(1))
    assert taken() == ["compute waits for compute 1"]
    assert gathered(slice_, 4, current).tolist() == [2.0] * 4
    assert "uploads waits for compute 2" in taken(), "a gather may take the values before the step"
    assert slice_.values.tolist() == [2.0] * 4
    assert taken() == ["the host waits for uploads 2"], "the host reads a slice that is still copied"
    assert slice_.values.tolist() == [2.0] * 4 and not taken()


def test_the_host_reads_a_slice_when_its_copy_down_is_done() -> None:
    slice_ = HostParamStore().add(torch.zeros(4))
    slice_.update(torch.ones(4))
    assert not taken()
    assert slice_.values.tolist() == [1.0] * 4 and taken() == ["the host waits for compute 1"]


@pytest.fixture
def in_file(tmp_path: Path) -> Any:
    """A store of slices in a file, all of which have one buffer."""
    file = SpillFile(tmp_path, BlockIO(1, 2**20))
    store = NvmeParamStore(file, BufferPool(1024), 0, HostParamStore())
    yield store
    store.close()


def test_a_buffer_is_reused_and_written_when_its_copies_are_done(in_file: Any, current: Any) -> None:
    slice_ = in_file.add(torch.arange(1024.0))
    in_file.lane.drain()
    assert taken() == ["the host waits for compute 1"], "a file is written before the copy down is done"
    assert torch.equal(gathered(slice_, 1024, current), torch.arange(1024.0))
    upload = ["uploads waits for all of compute", "on uploads", "off", "gathers waits for uploads 1"]
    assert taken() == upload
    fetched = slice_.fetch(torch.device("meta"))  # another device than the CPU, where masters are stepped
    assert fetched.numel() == 1024
    assert taken() == ["the host waits for uploads 1"], "a buffer is filled that is still copied from"
    slice_.update(torch.ones(1024))
    in_file.lane.drain()
    assert taken() == ["the host waits for compute 2", "the host waits for compute 3"]
    assert slice_.values.tolist() == [1.0] * 1024


# Page-locked buffers ---------------------------------------------------------------------------------


class Cuda:
    """Registers at most so many bytes."""

    def __init__(self, most: int) -> None:
        self.most, self.registered = most, dict[int, int]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        """An error's number, or 0."""
        if sum(self.registered.values()) + nbytes > self.most:
            return 2
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        """Of one that is registered."""
        del self.registered[address]


def test_buffers_of_files_are_page_locked_at_their_size_as_long_as_they_are_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    cuda = Cuda(5 * 4096)
    pool = BufferPool(5 * 1024, cuda)
    buffers = [pool.take(size, 4) for size in (3 * 4096, 4096)]
    held = {buffer.memory.data_ptr(): buffer.memory.nbytes for buffer in buffers if buffer}
    assert cuda.registered == held and sum(held.values()) == 4 * 4096, "no power of two"
    for buffer in buffers:
        assert buffer is not None
        pool.give(buffer)
    del buffer, buffers
    assert pool.take(2 * 4096, 4, exceed=True) is not None  # in the place of a free one
    pool.clear()
    assert not cuda.registered and not caplog.text
    pageable = [pool.take(6 * 4096, 4, exceed=True) for _ in range(2)]
    assert all(buffer is not None and buffer.memory.fill_(1).all() for buffer in pageable)
    assert not cuda.registered
    assert caplog.text.count("a buffer of parameters in a file (offload_param): 24,576 of 24,576 bytes") == 1


def test_without_a_name_for_a_warning_memory_that_cannot_be_locked_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r'pin_memory: .*"pin_memory": false'):
        Arena([4096], Cuda(0))
