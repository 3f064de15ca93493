"""What is copied between a device and the host: when, how much, and what happens when it goes wrong.

The CPU's memory is the device here, and copies are slow: see `tests/slow_copies.py`.
"""

import gc
import threading
import time
import weakref
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.hostile.lasting import left
from tests.slow_copies import Copied, Copies, SlowCopier, slow_copies
from tests.worlds import POOL
from tests.zero_full.runs import Net, data
from tests.zero_full.test_offload_optimizer import KEYS, SLOW, waiting
from zero_full.errors import CopyError, DisagreementError
from zero_full.offload import CopyThreads, HostTier
from zero_full.offload.host_device_copies import UNDER_WAY, HostGradientSlice
from zero_full.optim.fused_adam import FusedAdamStep
from zero_full.shard.group.checksum import fingerprint

WORLDS = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3)]  # ranks, stage


def engine_of(stage: int, host: bool = True, **keys: Any) -> Any:
    """An engine, and its optimizer is at `engine.optimizer`."""
    return zero_full.initialize(model=Net(), config=waiting(stage, "cpu" if host else "none", **keys))[0]


def one_step(engine: Any, step: int, rank: int) -> None:
    """All micro-batches of a step."""
    for micro in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(data(step, micro, rank, engine.module.layers[0].weight.dtype)))
        engine.step()


# When --------------------------------------------------------------------------------------------

LAYERS, WIDTH = 6, 64
NAP_S = 0.02  # a layer's backward
PATIENCE_S = 2.0


class Slow(torch.autograd.Function):
    """Nothing, and its backward takes a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """The same, later."""
        time.sleep(NAP_S)
        return grad


class SlowNet(nn.Module):
    """Layers that take their time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for layer in self.layers:
            x = Slow.apply(layer(x))  # type: ignore[no-untyped-call]
        return x.square().mean()


def timeline(comm: Any, stage: int) -> tuple[float, list[Copied], list[float], list[tuple[float, float]]]:
    """When backward of a second step was over, its copies, when slices were summed, and parts stepped."""
    bucket = WIDTH * (WIDTH + 1)
    zero = {"reduce_bucket_size": bucket, "sub_group_size": bucket}
    stepped, summed = [], []

    def step(stepper: FusedAdamStep, *rest: Any) -> None:
        began = time.monotonic()
        STEP(stepper, *rest)
        time.sleep(NAP_S)
        # On a busy machine a thread may start late: a part ends when those before the last one went up.
        while sum(copy.way == "up" for copy in copies.done) < len(stepped) - 1:
            if time.monotonic() > began + PATIENCE_S:
                break
            time.sleep(NAP_S)
        stepped.append((began, time.monotonic()))

    def square(slice_: HostGradientSlice) -> None:
        SQUARE(slice_)
        summed.append(time.monotonic())

    with ExitStack() as stack:
        copies = stack.enter_context(slow_copies(8 * bucket / NAP_S))
        stack.enter_context(mock.patch.object(FusedAdamStep, "step", step))
        stack.enter_context(mock.patch.object(HostGradientSlice, "_square", square))
        keys = waiting(stage, "cpu", zero, gradient_clipping=1.0)
        engine = zero_full.initialize(model=SlowNet(), config=keys)[0]
        for _ in range(2):
            copies.done.clear()
            stepped.clear()
            summed.clear()
            engine.backward(engine(torch.ones(2, WIDTH)))
            over = time.monotonic()
            engine.step()
        engine.destroy()
    return over, copies.done, summed, stepped


STEP, SQUARE = FusedAdamStep.step, HostGradientSlice._square


@pytest.mark.parametrize(("world", "stage"), WORLDS)
def test_gradients_go_down_beside_backward_and_parameters_up_beside_the_step(world: int, stage: int) -> None:
    for over, copies, summed, stepped in POOL.run(timeline, world, stage):
        down, up = ([copy for copy in copies if copy.way == way] for way in ("down", "up"))
        assert len(down) == len(up) == len(summed) == len(stepped) >= LAYERS - 1
        assert len([when for when in summed if when < over]) >= len(summed) // 2, "sums wait for the step"
        beside = [copy for copy in down if copy.ended < over]
        assert len(beside) >= len(down) // 2, "gradients wait for the end of backward"
        assert all(copy.ended <= stepped[0][0] for copy in down), "a step has begun without the norm"
        for copy, (_, ended) in zip(up, stepped, strict=True):
            assert copy.began >= ended, "parameters go up before they are stepped"
        early = [copy for copy in up if copy.began < stepped[-1][0]]
        assert len(early) >= len(up) // 2, "parameters wait for the end of the step"


# How much ----------------------------------------------------------------------------------------


def copied(comm: Any, stage: int, precision: str, micro: int) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that were copied in a third step, as counted where copies are made, and by the ledger."""
    with slow_copies() as copies:
        engine = engine_of(stage, **KEYS[precision] | {"gradient_accumulation_steps": micro})
        ledger = engine.optimizer.sharded.copy_threads.copied
        for step in range(3):
            copies.done.clear()
            ledger.clear()
            one_step(engine, step, comm.rank)
        made = {way: sum(c.nbytes for c in copies.done if c.way == way) for way in ("down", "up")}
        owned = sum(group.layout.shard_numel for group in engine.optimizer.trained)
        told = engine.moved() | {"owned": owned}
        engine.destroy()
    return made, told


@pytest.mark.pairwise
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize(
    ("precision", "gradient", "parameter"),
    [("fp32", 4, 4), ("bf16", 4, 2), ("bf16 masters", 2, 2), ("16-bit gradients", 2, 2)],
)
@pytest.mark.parametrize(("world", "stage"), WORLDS)
def test_copies_of_a_step_are_the_formula(
    world: int, stage: int, precision: str, gradient: int, parameter: int, micro: int
) -> None:
    passes = 1 if stage == 1 else micro
    if world == 1 and (stage > 1 or micro == 1):
        gradient = min(gradient, parameter)  # nothing is added up on the way
    for made, ledger in POOL.run(copied, world, stage, precision, micro):
        owned = ledger.pop("owned")
        assert made == {"down": passes * gradient * owned, "up": parameter * owned}
        assert ledger == {"gradients down": made["down"], "parameters up": made["up"]}


# What goes wrong ---------------------------------------------------------------------------------


def failing(comm: Any, stage: int, way: str, alone: bool) -> tuple[str, bool]:
    """What a step says if a copy fails, on the last rank or on all; and whether it goes on afterwards."""
    with slow_copies(SLOW) as copies:
        engine = engine_of(stage, gradient_clipping=0.1)
        one_step(engine, 0, comm.rank)
        saved = engine.state_dict()
        copies.fail = way if not alone or comm.rank == comm.world_size - 1 else ""
        said = ""
        try:
            one_step(engine, 1, comm.rank)
        except (CopyError, DisagreementError) as error:
            said = str(error)
        copies.fail = ""
        if way == "down":
            engine.optimizer.zero_grad()
        else:
            engine.load_state_dict(saved)
        one_step(engine, 1, comm.rank)
        after = engine.module_state_dict()
        engine.destroy()
        plain = engine_of(stage, gradient_clipping=0.1)
        one_step(plain, 0, comm.rank)
        one_step(plain, 1, comm.rank)
        same = all(torch.equal(value, after[name]) for name, value in plain.module_state_dict().items())
        plain.destroy()
    return said, same


@pytest.mark.pairwise
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("way", ["down", "up"])
@pytest.mark.parametrize(("world", "stage"), WORLDS)
def test_a_copy_that_fails_is_told_on_every_rank_and_training_can_go_on(
    world: int, stage: int, way: str, alone: bool
) -> None:
    what = {"down": "gradients of layers", "up": "parameters layers"}[way]
    for said, same in POOL.run(failing, world, stage, way, alone):
        assert what in said and "the cable is broken" in said
        assert same


def interrupted(comm: Any, stage: int) -> list[str]:
    """Ends in the middle: backward raises, gradients are given up, the engine is destroyed."""
    with slow_copies(SLOW) as copies:
        engine = engine_of(stage)
        one_step(engine, 0, comm.rank)
        loss = engine(data(1, 0, comm.rank))
        handle = engine.module.layers[0].weight.register_hook(raise_error)
        with pytest.raises(RuntimeError, match="in the middle"):
            engine.backward(loss)
        handle.remove()
        engine.optimizer.zero_grad()
        assert not engine.optimizer.sharded.copy_threads.under_way
        engine.backward(engine(data(1, 0, comm.rank)))
        engine.destroy()
        made = len(copies.done)
        time.sleep(0.05)
        assert len(copies.done) == made, "a copy was still to be made"
    names = ("gradients-down", "gradients-on-host", "parameters-up")
    return [t.name for t in threading.enumerate() if any(name in t.name for name in names)]


def raise_error(grad: Tensor) -> None:
    raise RuntimeError("in the middle")


@pytest.mark.parametrize(("world", "stage"), [(1, 2), (2, 1), (2, 2)])
def test_what_ends_in_the_middle_leaves_no_copy_and_no_thread(world: int, stage: int) -> None:
    assert POOL.run(interrupted, world, stage) == [[]] * world


@pytest.mark.parametrize("stage", [1, 2])
def test_an_engine_that_nobody_holds_is_freed_with_what_copies(stage: int) -> None:
    def traces() -> list["weakref.ref[Any]"]:
        engine = engine_of(stage, gradient_accumulation_steps=2)
        one_step(engine, 0, 0)
        return [weakref.ref(each) for each in (engine.optimizer, engine.optimizer.sharded.copy_threads)]

    with slow_copies(SLOW):
        found = traces()
    gc.collect()
    assert [trace() for trace in found] == [None, None]


def many_steps(comm: Any, stage: int, count: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Open files, threads, MiB and tensors after the twentieth and the last step."""
    found, tensors = [], []
    with slow_copies():
        engine = engine_of(stage, gradient_accumulation_steps=2)
        for step in range(count):
            one_step(engine, step, comm.rank)
            if step in (19, count - 1):
                found.append(left())
                tensors.append(sum(isinstance(each, Tensor) for each in gc.get_objects()))
        engine.destroy()
    return found, tensors


@pytest.mark.rotates
@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_many_steps_leave_nothing_behind(stage: int, count: int) -> None:
    for (early, late), (few, many) in POOL.run(many_steps, 2, stage, count):
        assert late[0] <= early[0] and late[1] <= early[1] and late[2] <= early[2] + 4
        assert many <= few


# The parts ---------------------------------------------------------------------------------------


def wait_for(event: threading.Event) -> None:
    """As a job."""
    event.wait(10)


def copy_threads_with(copies: Copies) -> CopyThreads:
    """One that makes such copies."""
    device = torch.device("cpu")
    made = HostTier().allocate, device, (SlowCopier(copies, "down"), SlowCopier(copies, "up")), True
    return CopyThreads(*made)


def test_staging_memory_is_not_written_while_it_is_still_added_from() -> None:
    copy_threads, blocked = copy_threads_with(Copies()), threading.Event()
    slice_ = HostGradientSlice(copy_threads, "x", 4, torch.float32)
    slice_.memory.zero_()
    copy_threads.on_host.submit(partial(wait_for, blocked), [], [])
    for number in range(1, 5):
        slice_.receive(torch.full((4,), float(number)), adds=True, last=number == 4)
    time.sleep(0.05)
    blocked.set()
    assert slice_.arrived().tolist() == [10.0] * 4
    assert slice_.squared() == 400.0
    copy_threads.close()


def test_what_is_forgotten_does_not_arrive_later() -> None:
    copy_threads = copy_threads_with(Copies(1e-3))
    slice_ = HostGradientSlice(copy_threads, "x", 4, torch.float32)
    slice_.receive(torch.ones(4), adds=False, last=True)
    slice_.forget()
    assert slice_.zero().tolist() == [0.0] * 4
    assert slice_.squared() == 0.0
    copy_threads.close()


def test_few_slices_of_the_device_wait_for_their_copies() -> None:
    copy_threads = copy_threads_with(Copies(1e-3))
    slices = [HostGradientSlice(copy_threads, str(number), 4, torch.float32) for number in range(4)]
    for slice_ in slices:
        copy_threads.wait_for_turn()
        slice_.receive(torch.ones(4), adds=False, last=True)
        assert len(copy_threads.under_way) <= UNDER_WAY
    copy_threads.close()
    assert not copy_threads.under_way


class Streams:
    """Streams that are not there: a log of what is queued, and how many of their events have passed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.passed = 0  # events of the copiers' streams that the device has reached
        self.recorded = 0
        monkeypatch.setattr(torch, "Stream", lambda device: FakeStream(self, str(device)))
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: FakeStream(self, "main"))


class FakeStream:
    """What is asked of torch.Stream."""

    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def record_event(self) -> Any:
        """An event that has passed when the test says so."""
        self.streams.log.append(f"mark on {self.name}")
        self.streams.recorded += self.name != "main"
        number = self.streams.recorded
        return SimpleNamespace(query=lambda: number <= self.streams.passed, name=self.name)

    def wait_event(self, event: Any) -> None:
        self.streams.log.append(f"{self.name} waits for {event.name}")

    def __enter__(self) -> None:
        self.streams.log.append(f"on {self.name}")

    def __exit__(self, *_: object) -> None:
        self.streams.log.append("off")


QUEUED = ["on cuda:1", "cuda:1 waits for main", "mark on cuda:1", "off"]  # for one copy
FAR = torch.device("cuda", 1)


def test_an_accelerator_copies_on_a_stream_of_its_own_after_the_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams(monkeypatch)
    down, _ = HostTier().copiers(FAR) or (None, None)
    assert down is not None and HostTier().copiers(torch.device("cpu")) is None
    target, source = torch.zeros(2), torch.ones(2)
    kept = weakref.ref(source)
    pending = down.copy(target, source, down.mark())
    del source
    assert target.tolist() == [1.0, 1.0] and streams.log == ["mark on main", *QUEUED]
    waiting = [threading.Thread(target=pending.wait) for _ in range(2)]
    for thread in waiting:
        thread.start()
    time.sleep(0.02)
    assert all(thread.is_alive() for thread in waiting) and kept() is not None
    streams.passed = 1
    for thread in waiting:
        thread.join(10)
        assert not thread.is_alive()
    assert kept() is None, "the pending copy keeps memory of the device after its end"


def test_a_copy_is_queued_while_the_one_before_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device goes from one to the next: the host need not see the end of the first."""
    streams = Streams(monkeypatch)
    copiers = HostTier().copiers(FAR)
    assert copiers is not None
    copy_threads = CopyThreads(HostTier().allocate, FAR, copiers, True)
    slices = [
        HostGradientSlice(copy_threads, str(number), 4, torch.float32) for number in range(UNDER_WAY + 1)
    ]
    for number, slice_ in enumerate(slices[:UNDER_WAY], 1):
        copy_threads.wait_for_turn()
        slice_.receive(torch.full((4,), float(number)), adds=False, last=True)
    up = [copy_threads.send_up(torch.zeros(4), torch.ones(4)) for _ in range(4)]
    deadline = time.monotonic() + 20
    while streams.log.count("off") < UNDER_WAY + 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert streams.log.count("off") == streams.recorded == UNDER_WAY + 4
    assert len(copy_threads.under_way) == UNDER_WAY
    late = threading.Thread(target=copy_threads.wait_for_turn)
    late.start()
    late.join(0.05)
    assert late.is_alive(), "a third slice may be made while two are under way"
    streams.passed = 10**6
    late.join(10)
    for pending in up:
        pending.wait()
    assert [slice_.arrived().tolist() for slice_ in slices[:UNDER_WAY]] == [[1.0] * 4, [2.0] * 4]
    assert [slice_.squared() for slice_ in slices[:UNDER_WAY]] == [4.0, 16.0]
    copy_threads.close()


def test_the_end_of_a_run_waits_for_parameters_that_go_up(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    copiers = HostTier().copiers(FAR)
    assert copiers is not None
    copy_threads = CopyThreads(HostTier().allocate, FAR, copiers, True)
    copy_threads.send_up(torch.zeros(4), torch.ones(4))
    closing = threading.Thread(target=copy_threads.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    streams.passed = 1
    closing.join(10)
    assert not closing.is_alive()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_fingerprint_tells_of_every_change(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1000, generator=generator).to(dtype)
    known = fingerprint(values)
    assert torch.equal(fingerprint(values.clone()), known)
    for place in range(0, 1000, 7):
        changed = values.clone()
        changed[place] += 1
        assert not torch.equal(fingerprint(changed), known)
        swapped = values.clone()
        swapped[[place, place - 1]] = values[[place - 1, place]]
        assert torch.equal(swapped, values) or not torch.equal(fingerprint(swapped), known)
    for shift in range(1, 5):
        assert not torch.equal(fingerprint(values.roll(shift)), known)
    assert not torch.equal(fingerprint(torch.zeros_like(values)), fingerprint(torch.ones_like(values)))
    assert not torch.equal(fingerprint(values), fingerprint(-values))


@pytest.mark.parametrize("length", [1, 7, 16, 17])
def test_a_fingerprint_does_not_depend_on_how_it_is_cut(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(50.0)
    known = fingerprint(values)
    monkeypatch.setattr("zero_full.shard.group.checksum.CHUNK", length)
    assert torch.equal(fingerprint(values), known)
