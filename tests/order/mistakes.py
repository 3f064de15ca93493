"""Mistakes that the search for races must find: each puts something wrong in one place of the package."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import zero_full
from tests.order.models import WIDTH, data
from tests.order.runs import Case, one_step
from tests.order.trace import SimEvent, SimStream
from zero_full.comm import lane
from zero_full.comm.lane import Job, Pending, StreamLane
from zero_full.offload.host_device_copies import HostGradientSlice
from zero_full.offload.nvme_params import Buffer
from zero_full.offload.param_store import HostParamSlice
from zero_full.shard.group.checksum import column_sums
from zero_full.shard.group.master import Master
from zero_full.shard.group.parameter_group import ParameterGroup, TrainedGroup
from zero_full.shard.group.parameters import FlatParameters, GatherState
from zero_full.shard.passes.gather import ParameterGatherer, UnitState
from zero_full.shard.passes.reduce import GradientReducer
from zero_full.shard.step.optimizer import ZeroOptimizer
from zero_full.shard.step.peers import Trip

TWO = {"gradient_accumulation_steps": 2}
BF16 = {"bf16": {"enabled": True}}
HOST = {"offload_optimizer": {"device": "cpu"}}
STATE_IN_FILE = {
    "offload_optimizer": {"device": "nvme", "max_in_cpu": 0},
    "sub_group_size": 2 * WIDTH * (WIDTH + 1),
}
PARAMS_ALONE = {"offload_param": {"device": "cpu"}}
PARAMS_ON_HOST = {**HOST, "offload_param": {"device": "cpu"}}
PARAMS_IN_FILE = {**HOST, "offload_param": {"device": "nvme", "max_in_cpu": 0}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.1}}}
Plant = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mistake:
    """What is wrong, and a run in which it matters."""

    plant: Plant
    case: Case
    inside: str = ""  # what the memory of one of the races found is called, or where it was made
    shows: bool = True  # whether some order of playback gives other values, too


def instead(owner: Any, name: str, mistaken: Callable[..., Any]) -> Plant:
    """The mistaken function in the place of one of the package's."""
    return lambda: mock.patch.object(owner, name, mistaken)


# Lanes -------------------------------------------------------------------------------------------


def submit_early_event(
    self: StreamLane, job: Job, tensors: Iterable[Tensor], producers: Iterable[Any]
) -> Pending:
    """The event is recorded before the job."""
    for stream in {self.producer(), *producers}:
        self.side.wait_stream(stream)
    early = lane._StreamJob(self, {self.producer()}, list(tensors))
    with self.side:
        job()
    return early


def submit_without_tensors(
    self: StreamLane, job: Job, tensors: Iterable[Tensor], producers: Iterable[Any]
) -> Pending:
    """Nobody keeps what the job uses."""
    return SUBMIT(self, job, [], producers)


def submit_after_others_only(
    self: StreamLane, job: Job, tensors: Iterable[Tensor], producers: Iterable[Any]
) -> Pending:
    """What the caller itself has queued is not waited for."""
    with mock.patch.object(self, "producer", lambda: self.side):
        return SUBMIT(self, job, tensors, [])


SUBMIT = StreamLane.submit


def wait_for_nothing(self: Any) -> None:
    """`wait` lets go of the tensors, and that is all."""
    self.kept.clear()


def launch_reading_late(self: GradientReducer, group: TrainedGroup) -> None:
    """What the job uses is looked up after the job has let go of it."""
    self._drain(1)
    self.launched.add(group)
    producers = self.producers.get(group, [])
    job = partial(
        group.gradients.reduce,
        group.gradients.detach(),
        self._message_dtype(group),
        self.backward.is_boundary,
        True,
    )
    pending: Any = self.lane.submit(job, [], producers)
    pending.kept.extend(group.gradients.device_memory())
    self.pending.append(pending)


# Gathers -----------------------------------------------------------------------------------------


def release_unfinished(self: FlatParameters) -> None:
    """What was gathered early and is not needed is let go while it is still on its way."""
    if self.state is GatherState.GATHERING:
        self.pending, self.state = None, GatherState.WHOLE
    RELEASE(self)


RELEASE = FlatParameters.release


def use_unfinished(self: FlatParameters) -> None:
    """Parameters are used before they have arrived."""
    self.pending, self.state = None, GatherState.WHOLE
    self.show()


def begin_gather_filled_late(self: FlatParameters, gathers: Any, exactly: bool = False) -> None:
    """Memory is made for the gathered parameters after the other stream was told what to wait for."""
    here = gathers.producer()

    def collect() -> None:
        with here:
            self.full.untyped_storage().resize_(self.full.nbytes)
        self.all_gather()

    self.state = GatherState.GATHERING
    self.pending = gathers.submit(collect, [], [here])


def begin_gather_dropping_node_copy(self: FlatParameters, gathers: Any, exactly: bool = False) -> None:
    """The node's copy is let go while the gather reads it."""
    self.full.untyped_storage().resize_(self.full.nbytes)
    self.state = GatherState.GATHERING
    self.pending = gathers.submit(self.all_gather, [], [gathers.producer()])
    self.node_copy = None


leave = ParameterGatherer._leave


def leave_here(
    self: ParameterGatherer, unit: UnitState, groups: Sequence[ParameterGroup], keep: bool = False
) -> None:
    """A module has run on another stream than the one that its parameters' memory belongs to."""
    for group in groups:
        group.parameters.owner_stream = None
    leave(self, unit, groups, keep)


def publish_before_copy(self: ZeroOptimizer) -> None:
    """Slices travel, and only then follow their masters."""
    pending = [self.lane.submit(v.all_gather, [], [self.lane.producer()]) for v in self.sharded.flats]
    for group in self.trained:
        group.master.copy_master()
    for each in pending:
        each.wait()


def send_on_two_lanes(self: ZeroOptimizer, groups: Any, early: Any = None) -> None:
    """The next forward's gathers begin already, and the same buffers are sent after the step."""
    assert self.gatherer is not None
    for group in groups:
        if group.parameters.state is GatherState.SHARDED:
            group.parameters.begin_gather(self.gatherer.lane)
    for group in groups:
        self.lane.submit(group.parameters.all_gather, [], [self.lane.producer()]).wait()


def send_for_each_module(self: ZeroOptimizer, groups: Any, early: Any = None) -> None:
    """New parameters are waited for by the modules that hold them, and by nobody else who reads them."""
    pending = {g: self.lane.submit(g.parameters.all_gather, [], [self.lane.producer()]) for g in groups}
    for group, each in pending.items():
        params = [member.param for member in group.members]
        for module in self.watch.model.modules():
            if any(p is held for p in params for held in module.parameters(recurse=False)):
                module.register_forward_pre_hook(lambda module, args, each=each: each.wait())


@torch.no_grad()
def loading(engine: zero_full.Engine, step: int) -> None:
    """A step, a forward that leaves gathers behind, and masters are loaded with other values."""
    with torch.enable_grad():
        one_step(engine, step)
    state = engine.optimizer.state_dict()
    loss = engine(data(step, 9, engine.optimizer.sharded.flats[0].dtype))
    for key, each in state["tensors"].items():
        if key.startswith("parameters/"):
            each["values"].mul_(0.5)
    engine.optimizer.load_state_dict(state)
    assert float(loss) > 0


def saving(engine: zero_full.Engine, step: int) -> None:
    """A checkpoint is written beside a step."""
    with TemporaryDirectory() as folder:
        engine.save_checkpoint(folder, asynchronous=True)
        one_step(engine, step)
        engine.wait_for_checkpoint()


def resuming(engine: zero_full.Engine, step: int) -> None:
    """A step, and its state is loaded with other values."""
    one_step(engine, step)
    state = engine.optimizer.state_dict()
    for key, each in state["tensors"].items():
        if key.startswith("parameters/"):
            each["values"].mul_(0.5)
    engine.optimizer.load_state_dict(state)


@torch.no_grad()
def evaluating(engine: zero_full.Engine, step: int) -> None:
    """A step, and two forwards, of which the second may leave out layers that the first one has taught."""
    with torch.enable_grad():
        one_step(engine, step)
    for micro in (8, 9):
        engine(data(step, micro, torch.float32))
    engine.empty_partition_cache()


# Reductions --------------------------------------------------------------------------------------


def drain_but_the_last(self: GradientReducer, leave: int) -> None:
    """A step does not wait for the last reductions."""
    DRAIN(self, max(leave, 1))


DRAIN = GradientReducer._drain


def update_while_clearing(self: ZeroOptimizer, *args: Any) -> Any:
    """The averaged slices are cleared beside the step that reads them."""
    slices = [g.gradients.grad_slice for g in self.trained if g.gradients.grad_slice is not None]
    self.lane.submit(lambda: torch._foreach_zero_(slices), slices, [])
    return UPDATE(self, *args)


UPDATE = ZeroOptimizer._update


def work_unarrived(self: Trip) -> None:
    """An owner works on matrices whose pieces are still on their way."""
    self.pending = lane.Done()
    WORK(self)


WORK = Trip.work


def come_back_unarrived(self: Trip) -> None:
    """Pieces are moved before what was made of them is back."""
    self.pending = lane.Done()
    COME_BACK(self)


COME_BACK = Trip.come_back


def order_nothing(self: StreamLane, earlier: Any, later: Any) -> None:
    """Several streams write to one flat buffer, and none waits for the one that has made it."""


# Copies between device and host ------------------------------------------------------------------

COPIERS = "host_device_copies"  # the file that makes their streams


def wait_unless_copying(self: SimStream, event: SimEvent) -> None:
    """Slices are copied before they are reduced, or stepped."""
    if COPIERS not in self.name:
        WAIT(self, event)


WAIT = SimStream.wait_event


def return_early(self: SimEvent) -> None:
    """Nobody waits for the end of a copy."""
    if COPIERS not in self.queue.name:
        SYNCHRONIZE(self)


SYNCHRONIZE = SimEvent.synchronize


def wait_for_no_copy(self: Master) -> None:
    """New parameters are used while they are on their way up."""
    if self.sending is not None:
        self.sending, self.synced_sums = None, column_sums(self.parameters.shard)


def wait_unless_uploading(self: SimStream, other: SimStream) -> None:
    """Slices go up into memory that another stream still uses."""
    if "param_store" not in self.name:
        WAIT_STREAM(self, other)


WAIT_STREAM = SimStream.wait_stream

MISTAKES = {
    "a stream that waits for nobody": Mistake(
        instead(SimStream, "wait_stream", lambda self, other: None), Case(2)
    ),
    "the caller's own stream is forgotten": Mistake(
        instead(StreamLane, "submit", submit_after_others_only), Case(3)
    ),
    "event before the job": Mistake(instead(StreamLane, "submit", submit_early_event), Case(1)),
    "wait does nothing": Mistake(instead(lane._StreamJob, "wait", wait_for_nothing), Case(1)),
    "no reference is kept": Mistake(instead(StreamLane, "submit", submit_without_tensors), Case(2)),
    "references are looked up too late": Mistake(
        instead(GradientReducer, "_launch", launch_reading_late), Case(2)
    ),
    "release without waiting": Mistake(
        instead(FlatParameters, "release", release_unfinished),
        Case(3, "changing", drive=evaluating),
        "begin_gather",
        shows=False,  # nobody makes anything in that memory meanwhile
    ),
    "use without waiting": Mistake(instead(FlatParameters, "finish_gather", use_unfinished), Case(3)),
    "memory is made after the job was put": Mistake(
        instead(FlatParameters, "begin_gather", begin_gather_filled_late), Case(3), shows=False
    ),
    "a node's copy is dropped on its way": Mistake(
        instead(FlatParameters, "begin_gather", begin_gather_dropping_node_copy),
        Case(3, zero={"zero_hpz_partition_size": 2}, ranks=4),
        "keep_node_copy",
    ),
    "published before copied": Mistake(
        instead(ZeroOptimizer, "follow_masters", publish_before_copy), Case(1, keys=BF16, drive=resuming)
    ),
    "one buffer on two lanes": Mistake(
        instead(ZeroOptimizer, "publish", send_on_two_lanes), Case(3), "begin_gather", shows=False
    ),
    "a weight is read outside its module": Mistake(
        instead(ZeroOptimizer, "publish", send_for_each_module),
        Case(1, "borrowing"),
        "parameters layers.3.linear",
    ),
    "the streams that modules run on are forgotten": Mistake(
        instead(ParameterGatherer, "_leave", leave_here), Case(3, "two streams"), "begin_gather"
    ),
    "the last reductions are not waited for": Mistake(
        instead(GradientReducer, "_drain", drain_but_the_last), Case(2, keys={"gradient_clipping": 0.1})
    ),
    "slices are cleared while they are read": Mistake(
        instead(ZeroOptimizer, "_update", update_while_clearing), Case(2), "_slice_memory"
    ),
    "matrices are worked on before they are whole": Mistake(
        instead(Trip, "work", work_unarrived), Case(2, keys=MUON, depth=8)
    ),
    "pieces are moved before anything has come back": Mistake(
        instead(Trip, "come_back", come_back_unarrived), Case(2, keys=MUON, depth=8)
    ),
    "two producers write one buffer": Mistake(
        instead(StreamLane, "order", order_nothing),
        Case(1, "two streams", zero={"reduce_bucket_size": 10**6}),
        shows=False,
    ),
    "a copy does not wait for what it copies": Mistake(
        instead(SimStream, "wait_event", wait_unless_copying), Case(2, keys=BF16, zero=HOST)
    ),
    "a copy returns early": Mistake(
        instead(SimEvent, "synchronize", return_early), Case(2, keys=BF16, zero=HOST)
    ),
    "parameters are used before they are up": Mistake(
        instead(Master, "wait_for_copy", wait_for_no_copy), Case(2, keys=BF16, zero=HOST)
    ),
    "gradients are read before they are down": Mistake(
        instead(HostGradientSlice, "arrived", lambda self: self.memory), Case(2, keys=TWO, zero=HOST)
    ),
    "a slice on the host is written while it is copied": Mistake(
        instead(HostParamSlice, "values", property(lambda self: self.at_rest)),
        Case(3, keys=BF16, zero=PARAMS_ON_HOST, drive=loading),
        "slice of layers",
    ),
    "a buffer of parameters is read into while it is copied": Mistake(
        instead(Buffer, "synchronize", lambda self: None),
        Case(3, keys=BF16, zero=PARAMS_IN_FILE),
        "nvme_params",
    ),
    "a checkpoint is written while it is copied": Mistake(
        instead(SimStream, "synchronize", lambda self: None),
        Case(1, keys=BF16, ranks=1, drive=saving),  # several ranks agree after the copy, and so wait for it
        "async_save",
    ),
    "a slice goes up before its place is free": Mistake(
        instead(SimStream, "wait_stream", wait_unless_uploading), Case(3, keys=BF16, zero=PARAMS_ALONE)
    ),
}
