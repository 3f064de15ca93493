"""A bucket's gradients may come from several streams: the reduction waits for all of them (#8061).

There is no accelerator here, so the streams are stand-ins that keep a log of what they are told.
"""

import weakref
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_full
from tests.zero_full.runs import Net, config, data
from zero_full.comm.lane import Done, StreamLane, lane_for

LOG: list[tuple[Any, ...]] = []


class FakeStream:
    """What `StreamLane` asks of torch.Stream."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name

    def wait_stream(self, other: "FakeStream") -> None:
        LOG.append((self.name, "waits for", other.name))

    def wait_event(self, event: str) -> None:
        LOG.append((self.name, "waits for", event))

    def record_event(self) -> str:
        LOG.append((self.name, "records an event"))
        return "the event"

    def __enter__(self) -> None:
        LOG.append((self.name, "is current"))

    def __exit__(self, *_: object) -> None:
        LOG.append((self.name, "is not current"))


@pytest.fixture
def stream() -> StreamLane:
    LOG.clear()
    main = FakeStream("main")
    return StreamLane(FakeStream("side"), lambda: main)


def job() -> None:
    LOG.append(("the job",))


@pytest.mark.parametrize("names", [[], ["first"], ["first", "second", "third"]])
def test_8061_the_job_waits_for_every_producer_and_for_the_current_stream(
    stream: StreamLane, names: list[str]
) -> None:
    # Only the stream that completed the bucket was waited for: others were still writing.
    stream.submit(job, [], [FakeStream(name) for name in names])
    start = LOG.index(("side", "is current"))
    assert set(LOG[:start]) == {("side", "waits for", name) for name in [*names, "main"]}
    assert LOG[start:] == [
        ("side", "is current"),
        ("the job",),
        ("side", "is not current"),
        ("side", "records an event"),
    ]


def test_tensors_are_kept_until_somebody_waits(stream: StreamLane) -> None:
    tensors = [torch.ones(1), torch.ones(1)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    pending = stream.submit(job, tensors, [])
    tensors.clear()
    assert all(each() is not None for each in alive)
    pending.wait()
    assert all(each() is None for each in alive)


def test_waiting_holds_back_the_stream_that_waits_and_the_producers_and_not_the_host(
    stream: StreamLane,
) -> None:
    pending = stream.submit(job, [], [FakeStream("first")])
    LOG.clear()
    pending.wait()
    assert sorted(LOG) == [(name, "waits for", "the event") for name in ("first", "main")]


def test_an_accelerator_gets_a_stream_of_its_own_that_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make(device: torch.device, priority: int) -> FakeStream:
        made.append((device, priority))
        return FakeStream("side")

    monkeypatch.setattr(torch, "Stream", make)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: FakeStream(str(device)))
    device = torch.device("cuda", 1)
    lane = lane_for(device, overlap=True)
    assert isinstance(lane, StreamLane) and made == [(device, -1)] and lane.producer().name == "cuda:1"


class Recorder:
    """A lane on which every gradient seems to come from a stream of its own."""

    stops_host = False

    def __init__(self) -> None:
        self.made: list[str] = []
        self.given: list[list[str]] = []
        self.ordered: list[tuple[str, str]] = []

    def producer(self) -> str:
        self.made.append(f"stream {len(self.made)}")
        return self.made[-1]

    def order(self, earlier: str, later: str) -> None:
        self.ordered.append((earlier, later))

    def submit(self, job: Callable[[], None], tensors: Iterable[Tensor], producers: Iterable[str]) -> Done:
        self.given.append(list(producers))
        job()
        return Done()


@pytest.mark.pairwise
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("bucket", [1, 200, 10**6])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_8061_a_reduction_is_told_the_producer_of_every_gradient_in_its_bucket(
    stage: int, bucket: int, contiguous: bool
) -> None:
    zero = {"reduce_bucket_size": bucket, "contiguous_gradients": contiguous}
    keys = config(stage, bf16={"enabled": True}, zero_optimization=zero)  # alone, but reduced into fp32
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=keys)
    for step in range(2):
        lane = Recorder()
        optimizer.reducer.lane = lane
        engine.backward(engine(data(step, 0, 0, torch.bfloat16)))
        assert [len(names) for names in lane.given] == [len(b.members) for b in optimizer.trained]
        assert sorted(name for names in lane.given for name in names) == sorted(lane.made)
        assert len(lane.made) == 6
        assert lane.ordered == [pair for names in lane.given for pair in pairwise(names)]
        engine.step()
