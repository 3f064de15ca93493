"""Plan a pipeline: the bytes of the ranks at each place, their activations in flight, and their idle time.

Each place is simulated as a rank without a pipeline is, on its own layers (`simulation.py`). One micro-batch
runs through all stages with the runtime's own forward, on fake tensors. Its bytes, in the order of the
schedule (`zero_full/pipeline/timetable.py`), are the activations.

[Note: what torch holds] Besides the activations of micro-batches in flight, torch's stages and schedules hold

    receive buffers   of all micro-batches, for inputs and for gradients of outputs, from the first batch on
    sent tensors      until torch drops what it has waited for: "1f1b" keeps the gradients of one micro-batch,
                      and the outputs of the last one sent before the first backward; "gpipe" keeps all
                      gradients, and schedules of several stages per rank all tensors, until the batch ends
    gradients of      of all micro-batches, until the next batch, in schedules that split backward
    inputs

A neighbouring stage on the same rank gets the tensor itself, which then replaces the receive buffer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_full._compat import FakeTensorMode, backward_for_inputs
from zero_full.comm.communicator import Communicator
from zero_full.comm.fake_ranks import FakeGroup
from zero_full.comm.topology import Topology
from zero_full.config import Config, Resolved
from zero_full.errors import PlanError
from zero_full.nested import mapped, tensors_in
from zero_full.pipeline.handover import Handover
from zero_full.pipeline.module import PipelineModule
from zero_full.pipeline.schedules import KINDS
from zero_full.pipeline.setup import check_pipeline
from zero_full.pipeline.stage import LOSS, RunningBatch, StageLayers, find_handover, precision_of
from zero_full.pipeline.tied import Tie, sum_gradients
from zero_full.pipeline.timetable import (
    BACKWARD,
    FOR_INPUTS,
    FORWARD,
    Operation,
    duration,
    idle_shares,
    in_flight,
    operations,
)
from zero_full.plan.activations import FakeTracker, run_backward
from zero_full.plan.memory_tracker import MemoryTracker
from zero_full.plan.result import PipelinePart
from zero_full.plan.simulation import CPU, Cluster, Simulation
from zero_full.plan.work import Work, WorkRecorder
from zero_full.start.from_config import settings_of

ALIVE = "alive"


def places_of(module: PipelineModule, ranks: int | None, config: Config) -> list[PipelineModule]:
    """Describe the module at each place of a pipeline of `ranks` ranks; None: of its own `num_stages`.

    Raises as `initialize` would if the configuration cannot train it.
    """
    found = []
    for place in range(count := ranks or module.num_stages):
        pipe = FakeGroup(range(-place, count - place), 0)  # rank 0 is at this place
        with torch.device("meta"):
            made = PipelineModule(
                module.specs,
                topology=Topology(data=FakeGroup([0], 0), pipe=pipe),
                loss_fn=module.loss_fn,
                partition_method=module.partition_method,
                activation_checkpoint_interval=module.activation_checkpoint_interval,
                stages_per_rank=module.stages_per_rank,
                placement=module.placement,
                base_seed=module.base_seed,
            )
        check_pipeline(made, config)
        found.append(made)
    return found


# Bytes of a place ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PipelineCluster(Cluster):
    """The ranks of a pipeline, seen from one place."""

    module: PipelineModule | None = None

    def topology(self, config: Config) -> Topology:
        """Return fake process groups of the first rank at this place."""
        assert self.module is not None and self.module.given_topology is not None
        pipe = self.module.given_topology.pipe
        return replace(super().topology(config), pipe=pipe, is_copy=self.module.is_copy)


class PlaceSimulation(Simulation):
    """The model and optimizer of the first rank at one place of a pipeline."""

    def _passes(self, boundaries: Sequence[bool]) -> list[tuple[int, int]]:
        """Run a batch as `PipelineEngine.train_batch`: the step reduces gradients, which ties have summed."""
        found = super()._passes([False] * len(boundaries))
        reducer = self.optimizer.reducer
        with self.tracker.counting("buckets"):
            for tie in self._ties():
                communicators = self.optimizer.communicators
                ranks = Communicator(
                    tie.group,
                    communicators.device,
                    communicators.traffic,
                    None,
                    "tied layers",
                    False,
                )
                sum_gradients(tie, ranks, reducer)
        reducer.backward.is_boundary = True
        return found

    def _ties(self) -> Iterator[Tie]:
        """Yield the tied modules that this place shares with others."""
        assert isinstance(self.cluster, PipelineCluster)
        module, copied = self.cluster.module, self.model
        assert module is not None
        for key in sorted(module.shared_keys()):
            places = sorted({*map(module.place_of, module.owners[key])})
            if module.place in places:
                tied = copied.get_submodule(f"tied.{key}")
                yield Tie(key, [*tied.parameters()], FakeGroup(places, module.place))


# Bytes of a micro-batch ------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one micro-batch in one stage."""

    read: int  # inputs and labels that the stage reads from the data
    taken: int  # inputs from the stage before
    given: int  # outputs for the next stage
    held: int  # from the forward to the backward, with the outputs
    held_for_weights: int  # between the two parts of backward, with the outputs
    work: Mapping[str, Work] = field(default_factory=dict)  # of forward and of backward, if recorded


class _OneMicroBatch(nn.Module):
    """Runs one micro-batch through a stage, and measures the bytes that are held after each part."""

    def __init__(
        self, chunk: StageLayers, tracker: MemoryTracker, splits: bool, recorder: WorkRecorder | None
    ) -> None:
        super().__init__()
        self.chunk, self.tracker, self.splits, self.recorder = chunk, tracker, splits, recorder

    def forward(self, inputs: Any) -> tuple[Handover, int, int]:
        """Return the handover to the next stage, and the bytes held after forward and between the parts."""
        chunk = self.chunk
        chunk.gives = find_handover(chunk, inputs)
        sent = () if chunk.takes is None else chunk.takes.carriers(CPU, requires_grad=True)
        received = None if chunk.is_last else chunk.gives.carriers(CPU)
        self.tracker.begin(())
        with self.tracker, self.tracker.counting(ALIVE), self.recorder or nullcontext():
            outputs = chunk(*sent)
            held = between = self.tracker.alive_bytes()
            if self.splits and sent and chunk.batch.failure is None:
                made = (outputs,) if isinstance(outputs, Tensor) else outputs
                kept = backward_for_inputs(made, received, sent, chunk.parameters())
                of_inputs = sum(t.grad.nbytes for t in sent if t.grad is not None)
                between = self.tracker.alive_bytes() - of_inputs
                del kept
            elif self.recorder is not None and chunk.batch.failure is None:
                made = (outputs,) if isinstance(outputs, Tensor) else outputs
                run_backward([t for t in made if t.requires_grad], self.recorder)
        if (error := chunk.batch.failure) is not None:
            raise error
        return chunk.gives, held, between


def stage_bytes(
    places: Sequence[PipelineModule], config: Config, batch: Sequence[Any], records: bool = False
) -> list[StageBytes]:
    """Run one micro-batch through all stages, without values.

    batch    the inputs of the first layer, and the labels: all but the last are inputs
    records  record the work of forward and backward, unless the schedule splits backward
    """
    if len(batch) < 2:
        raise PlanError(
            "the activations of a pipeline depend on its loss: pass inputs and labels of a micro-batch, "
            "inputs=[inputs, labels], or --batch with the labels last"
        )
    found: list[StageBytes] = []
    takes: Handover | None = None
    splits = KINDS[config.pipeline.schedule].splits_backward
    autocast, casts_to = precision_of(config, CPU)
    with FakeTensorMode(), torch.device("cpu"):
        *first, labels = (mapped(_fake, each) for each in batch)
        inputs = first[0] if len(first) == 1 else tuple(first)
        for stage in range(places[0].total_stages):
            module = places[places[0].place_of(stage)]
            chunk = StageLayers(module, stage, takes, LOSS, CPU, autocast, casts_to, _untimed)
            chunk.batch = RunningBatch([inputs], [labels])
            recorder = WorkRecorder() if records and not splits else None
            probe = _OneMicroBatch(chunk, FakeTracker(), splits, recorder)
            try:
                given = inputs if takes is None else takes.example(CPU)
                state = _state(probe, module, config)
                gives, held, between = torch.func.functional_call(probe, state, (given,))
            except Exception as error:
                part = module.parts[stage]
                raise PlanError(
                    f"stage {stage} (layers {part.start} to {part.stop - 1}) failed on a micro-batch without "
                    f"values with {type(error).__name__}: {error}\nA plan runs forward without values, so "
                    "forward must not depend on them. Without a batch, all but activations is planned"
                ) from error
            read = _bytes(inputs) * (takes is None) + _bytes(labels) * chunk.is_last
            taken = 0 if takes is None else _bytes(takes.carriers("meta"))
            work = {} if recorder is None else recorder.parts
            found.append(StageBytes(read, taken, _bytes(gives.carriers("meta")), held, between, work))
            takes = gives
    return found


def _untimed(phase: str) -> AbstractContextManager[None]:
    """Return a context that does nothing, in place of a timer of forward and backward."""
    return nullcontext()


def _state(probe: nn.Module, module: PipelineModule, config: Config) -> dict[str, Tensor]:
    """Return fake parameters and buffers of a stage, in the dtypes of the run."""
    dtypes = settings_of(config).dtypes.for_model(module)
    names, buffers = {p: name for name, p in module.named_parameters()}, dtypes.of_buffers(probe)
    state = {name: _fake(p, dtypes.of(p.dtype, names[p])) for name, p in probe.named_parameters()}
    return state | {name: _fake(b, buffers[name]) for name, b in probe.named_buffers()}


def _fake(value: Any, dtype: torch.dtype | None = None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=dtype or value.dtype).requires_grad_(value.requires_grad)


def _bytes(tree: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(tree))


# Bytes of a batch ------------------------------------------------------------------------------------


def part_of(
    module: PipelineModule, resolved: Resolved, stages: Sequence[StageBytes]
) -> tuple[PipelinePart, int | None, int]:
    """Return a place's part, its peak of activations, and the bytes of its receive buffers.

    stages  of all stages; empty: not known
    """
    config, count = resolved.config, resolved.config.gradient_accumulation_steps
    name = config.pipeline.schedule
    orders = operations(name, module, count)
    takes = partial(duration, recomputes=module.activation_checkpoint_interval > 0)
    flying, mine = in_flight(orders[module.place]), module.stages
    sent = sum(_sent(module, stages, stage) for stage in mine) * count if stages else None
    part = PipelinePart(
        place=module.place,
        ranks=module.num_stages,
        schedule=name,
        stages=tuple(mine),
        layers=tuple((module.parts[stage].start, module.parts[stage].stop) for stage in mine),
        in_flight=tuple(flying[stage] for stage in mine),
        idle=idle_shares(orders, takes)[module.place],
        handed_over=sent,
    )
    if not stages:
        return part, None, 0
    received = sum(_received(name, module, stages, stage) for stage in mine) * count
    read = sum(stages[stage].read for stage in mine) * count
    return part, read + max(_held_after(name, module, stages, orders[module.place])), received


def _is_here(module: PipelineModule, stage: int) -> bool:
    """Return whether this place has the stage. It has none of a number out of range."""
    return stage in module.stages


def _sent(module: PipelineModule, stages: Sequence[StageBytes], stage: int) -> int:
    """Return the bytes that a stage sends to other ranks, for one micro-batch."""
    forward = 0 if _is_here(module, stage + 1) else stages[stage].given
    return forward + (0 if _is_here(module, stage - 1) else stages[stage].taken)


def _received(name: str, module: PipelineModule, stages: Sequence[StageBytes], stage: int) -> int:
    """Return the bytes of one micro-batch that are kept from batch to batch: see [Note: what torch holds]."""
    return stages[stage].taken + stages[stage].given + _gradients_kept(name, module, stages, stage)


def _gradients_kept(name: str, module: PipelineModule, stages: Sequence[StageBytes], stage: int) -> int:
    """Return the bytes of one micro-batch's gradients of inputs that stay until the next batch begins."""
    is_buffer = _is_here(module, stage - 1)  # of the stage before
    return stages[stage].taken if KINDS[name].splits_backward and not is_buffer else 0


def _held_after(
    name: str, module: PipelineModule, stages: Sequence[StageBytes], order: Sequence[Operation]
) -> Iterator[int]:
    """Yield the bytes of micro-batches in flight and of sent tensors, after each operation of a place.

    They are counted from the end of the batch before. See [Note: what torch holds].
    """
    several, splits = KINDS[name].several, KINDS[name].splits_backward
    kept_of = {stage: _gradients_kept(name, module, stages, stage) for stage in module.stages}
    now = -sum(kept_of[each.stage] for each in order if each.kind == FOR_INPUTS)  # freed when a batch begins
    before_backward = next(place for place, each in enumerate(order) if each.kind != FORWARD)
    kept = replace(order[before_backward], micro_batch=before_backward - 2) if name == "1f1b" else None
    sending = dict[int, int]()  # by stage, bytes of gradients that torch has not waited for
    for operation in order:
        of, stage = stages[operation.stage], operation.stage
        in_buffer = of.given if _is_here(module, stage + 1) else 0  # the outputs are the next stage's buffer
        stays = of.given if not in_buffer and (several or operation == kept) else 0  # the sent outputs
        if operation.kind == FORWARD:
            now += of.held - in_buffer
        elif operation.kind == FOR_INPUTS:
            now += of.held_for_weights - of.held + kept_of[stage]
        else:
            now -= (of.held if operation.kind == BACKWARD else of.held_for_weights) - in_buffer - stays
        if operation.kind == BACKWARD and not splits and not _is_here(module, stage - 1):
            before = sending.get(stage, 0)
            sending[stage] = of.taken if name == "1f1b" else before + of.taken
            now += sending[stage] - before
        # For a moment, the buffer of the batch before is still there.
        replacing = in_buffer if operation.kind == FORWARD else 0
        if operation.kind in (BACKWARD, FOR_INPUTS) and _is_here(module, stage - 1):
            replacing = of.taken
        yield now + replacing
