"""A save that is written beside the next steps: what it saves, who waits, and who hears of its failures."""

import errno
import gc
import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_full
from tests.worlds import POOL, run_each
from tests.zero_full.checkpoint_runs import (
    Layout,
    Rich,
    batch,
    differences,
    engine_of,
    everything,
    go,
)
from zero_full.checkpoint import complete, latest_tag
from zero_full.checkpoint.async_save import AsyncSave, StagingBuffer
from zero_full.checkpoint.disk import FileWriter
from zero_full.errors import CheckpointError
from zero_full.offload.arena import Arena

LAYOUTS = [
    *(Layout(world, stage) for world in (1, 2) for stage in (0, 1, 2, 3)),
    Layout(2, 2, host=True),
    Layout(1, 1, "bf16", host=True),
    Layout(2, 1, "bf16"),
    Layout(2, 3, "bf16", host=True),
    Layout(2, 3, "fp16", optimizer="SGD"),
    Layout(2, 2, "bf16", optimizer="Lamb"),
]


@contextmanager
def writer(before: Callable[[], object]) -> Iterator[None]:
    """In this block something is done before each write into a file."""
    write = FileWriter.write

    def changed(self: FileWriter, data: Any) -> None:
        before()
        write(self, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileWriter, "write", changed)
        yield


def slowly() -> None:
    time.sleep(0.01)


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# What is saved ---------------------------------------------------------------------------------------


def written(folder: Path) -> dict[str, Any]:
    """All that the ranks' files say."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}
    return found | {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))}


def saved_twice(comm: Any, layout: Layout, folder: Path) -> None:
    """Save and wait; then save and change everything that was saved before a byte of it is written."""
    torch.manual_seed(comm.rank)
    engine, go_on = engine_of(layout), threading.Event()
    go(engine, comm.rank, range(2))
    mine, tensor = {"list": [1]}, torch.arange(3)
    engine.save_checkpoint(folder, "waited", {"mine": mine, "tensor": tensor})
    held, counters = everything(engine), (engine.global_steps, engine.micro_steps)
    with writer(go_on.wait):
        engine.save_checkpoint(folder, "beside", {"mine": mine, "tensor": tensor}, asynchronous=True)
        mine["list"].append(2)
        tensor += 1
        go(engine, comm.rank, range(2, 4))
        with zero_full.GatheredParameters(engine.module.frozen.weight, modifier_rank=0):
            engine.module.frozen.weight.data += 1
        engine.module.seen.running_mean += 1
        assert complete(folder).keys() == {"waited"}
        go_on.set()
        engine.wait_for_checkpoint()
    assert differences(held, everything(engine)) and counters != (engine.global_steps, engine.micro_steps)
    engine.destroy()


@pytest.mark.rotates
@pytest.mark.parametrize("world", [1, 2])
def test_values_are_those_of_the_moment_of_the_call(tmp_path: Path, world: int) -> None:
    cases = [(layout, tmp_path / str(i)) for i, layout in enumerate(LAYOUTS) if layout.world == world]
    run_each(saved_twice, world, cases)
    for layout, folder in cases:
        waited, beside = written(folder / "waited"), written(folder / "beside")
        assert waited == beside and len(waited) == 2 * world, layout
        assert latest_tag(folder) == "beside"


def test_without_torch_distributed_and_without_an_engine(tmp_path: Path) -> None:
    """The function's form; values come back."""
    model = Rich()
    optimizer = zero_full.assemble.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    model(batch(0, 0, torch.float32)).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = zero_full.SaveOptions(asynchronous=True)
    with writer(slowly):
        zero_full.save_checkpoint(model, optimizer, tmp_path, "one", {"n": 1}, options=options)
        with torch.no_grad():
            for param in model.parameters():
                param += 1
        zero_full.wait_for_checkpoint(optimizer)
    found = zero_full.load_checkpoint(model, optimizer, tmp_path)
    assert found is not None and found.client_state == {"n": 1}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Cuda:
    """What is asked of CUDA, which is not here."""

    def __init__(self) -> None:
        self.locked, self.free = dict[int, int](), 10**9

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if nbytes > self.free:
            return 2
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.locked[address]


def test_memory_that_an_accelerator_copies_to_is_locked_as_long_as_it_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda, page = Cuda(), mmap.PAGESIZE
    buffers = [StagingBuffer()]
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def reserved(*sizes: int, device: str = "cuda") -> tuple[int, list[int]]:
        """Page-locked bytes, and the rooms' sizes; each room is in one registration, for a copy."""
        (buffer,) = buffers
        buffer._reserve(list(sizes), {device})
        for room in (room for room in buffer.rooms if cuda.locked and room.nbytes):
            begin, end = room.data_ptr(), room.data_ptr() + room.nbytes
            assert sum(at <= begin and end <= at + size for at, size in cuda.locked.items()) == 1
        return sum(cuda.locked.values()), [room.nbytes for room in buffer.rooms]

    assert reserved(1000, 24, device="xpu") == (0, [1000, 24])
    assert reserved(3000, 0, 10) == (page, [3000, 0, 10])
    before = [room.data_ptr() for room in buffers[0].rooms]
    assert reserved(3000, 0, 10) == (page, [3000, 0, 10])
    assert [room.data_ptr() for room in buffers[0].rooms] == before, "the next save takes the same memory"
    monkeypatch.setattr(Arena.__init__, "__defaults__", (None, page, ""))  # small chunks
    assert reserved(page, page, 2 * page)[0] == 4 * page and len(cuda.locked) == 3
    assert not caplog.text
    cuda.free = page
    assert reserved(page, 2 * page) == (0, [page, 2 * page]), "not even the first chunk stays locked"
    assert "the copy of an asynchronous save: 8,192 of 12,288 bytes of host memory cannot be" in caplog.text
    cuda.free = 10**9
    assert reserved(10)[0] == page
    buffers[0].release()
    assert cuda.locked == {} and buffers[0].rooms == []
    assert reserved(20)[0] == page
    buffers.clear()
    gc.collect()
    assert cuda.locked == {}


# One at a time ---------------------------------------------------------------------------------------


def in_turn(comm: Any, folder: Path) -> None:
    engine, latest = engine_of(Layout(comm.world_size)), list[str | None]()
    go(engine, comm.rank, range(1))
    with writer(slowly):
        for tag in ("one", "two"):
            engine.save_checkpoint(folder, tag, asynchronous=True)
            latest.append(latest_tag(folder))
        arena = engine.optimizer.background.staging.arena
        engine.save_checkpoint(folder, "three")
        latest += [latest_tag(folder)]
        engine.save_checkpoint(folder, "four", asynchronous=True)
        assert engine.optimizer.background.staging.arena is arena
        latest += [Path(str(engine.load_checkpoint(folder)[0])).name]
        engine.save_checkpoint(folder, "five", asynchronous=True)
        optimizer = engine.optimizer
        engine.destroy()
        latest += [latest_tag(folder)]
    assert latest == [None, "one", "three", "four", "five"], latest
    assert len(complete(folder)) == 5 and not list(folder.glob("partial-*"))
    assert optimizer.closed and not optimizer.background.staging.rooms


@pytest.mark.parametrize("world", [1, 2])
def test_one_save_at_a_time_and_loads_and_destroy_wait_for_it(tmp_path: Path, world: int) -> None:
    POOL.run(in_turn, world, tmp_path)


def another_way(comm: Any, folder: Path) -> str:
    engine = engine_of(Layout())
    with pytest.raises(CheckpointError) as refusal:
        engine.save_checkpoint(folder, "one", asynchronous=comm.rank == 0)
    engine.destroy()
    return str(refusal.value)


def test_ranks_save_in_the_same_way(tmp_path: Path) -> None:
    for text in POOL.run(another_way, 2, tmp_path):
        assert "asynchronous differs between ranks: True on rank 0; False on rank 1" in text
    assert list(tmp_path.iterdir()) == []


# Failures --------------------------------------------------------------------------------------------


@contextmanager
def hears_late(late: bool) -> Iterator[None]:
    """In this block this rank hears later than the others how a save has ended."""
    part = AsyncSave._write_and_publish

    def later(self: AsyncSave) -> str:
        outcome = part(self)
        time.sleep(0.3 if late else 0)
        return outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncSave, "_write_and_publish", later)
        yield


def until_known(engine: zero_full.Engine) -> None:
    deadline = time.monotonic() + 20
    while not engine.optimizer.background.has_failed():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def failing(comm: Any, folder: Path, late: int, fails: int) -> tuple[list[float], list[float], list[str]]:
    """Losses without a failure and with two; what was said."""
    layout = Layout(comm.world_size, more={"gradient_accumulation_steps": 2})
    losses, said = list[list[float]](), list[str]()
    for disturbed in (False, True):
        torch.manual_seed(comm.rank)
        engine = engine_of(layout)
        losses.append(go(engine, comm.rank, range(2)))
        engine.save_checkpoint(folder, "good")
        for step in (2, 4):
            if disturbed:
                with writer(disk_full if comm.rank == fails else slowly), hears_late(comm.rank == late):
                    engine.save_checkpoint(folder, "bad", asynchronous=True)
                    if comm.rank != late:
                        until_known(engine)
                    losses[-1] += go(engine, comm.rank, range(step, step + 1))
                    loss = engine(batch(step + 1, comm.rank, torch.float32))
                    losses[-1].append(float(loss.detach()))
                    engine.backward(loss)
                    with pytest.raises(CheckpointError) as error:
                        engine.step()
                    said.append(str(error.value))
                    engine.step()
            else:
                losses[-1] += go(engine, comm.rank, range(step, step + 2))
        assert engine.global_steps == 3
        assert complete(folder).keys() == {"good"} and latest_tag(folder) == "good"
        assert [path.name for path in folder.iterdir() if "partial" in path.name] == []
        if disturbed:
            engine.save_checkpoint(folder, "better", asynchronous=True)
        engine.destroy()
    return losses[0], losses[1], said


@pytest.mark.parametrize(("world", "late", "fails"), [(1, 1, 0), (2, 0, 1), (2, 1, 1), (2, 1, 0)])
def test_a_failure_is_raised_by_the_next_step_on_all_ranks_and_the_run_goes_on(
    tmp_path: Path, world: int, late: int, fails: int
) -> None:
    """Also on a rank that has not heard of it. The step was not taken: whoever calls again loses nothing."""
    who = f"rank {fails}: " if world > 1 else ""
    for undisturbed, disturbed, said in POOL.run(failing, world, tmp_path, late, fails):
        assert undisturbed == disturbed and len(said) == 2
        assert all(f"-bad failed: {who}[Errno 28] No space left" in t for t in said)
    assert latest_tag(tmp_path) == "better" and complete(tmp_path).keys() == {"good", "better"}


def heard(comm: Any, folder: Path) -> int:
    """How many kinds of calls have raised a failure, once."""
    calls: dict[str, Callable[[zero_full.Engine], object]] = {
        "wait": lambda engine: engine.wait_for_checkpoint(),
        "save": lambda engine: engine.save_checkpoint(folder, "next"),
        "load": lambda engine: engine.load_checkpoint(folder),
        "destroy": lambda engine: engine.destroy(),
    }
    cases = [(name, call, False) for name, call in calls.items()]
    for name, call, alone in [*cases, ("save", calls["save"], True), ("load", calls["load"], True)]:
        engine = engine_of(Layout(comm.world_size))
        with writer(disk_full if comm.rank == 1 else slowly):
            engine.save_checkpoint(folder, "bad", asynchronous=True)
            if alone and comm.rank == 0:  # so its own `save` has nothing left to raise
                with pytest.raises(CheckpointError, match="No space left on device"):
                    engine.wait_for_checkpoint()
            with pytest.raises(CheckpointError, match="No space left on device"):
                call(engine)
            assert engine.optimizer.closed == (name == "destroy")
        engine.destroy()
        assert not complete(folder)
    return len(calls)


def test_a_failure_is_raised_by_whatever_waits_for_the_save_on_every_rank(tmp_path: Path) -> None:
    assert POOL.run(heard, 2, tmp_path) == [4, 4]
