"""Timetable of a pipeline: each rank's operations in order, its idle time, its micro-batches in flight.

The order of schedules with several stages per rank is torch's own. torch's classes of one stage per rank
compute it while they run, so theirs is repeated here, and tests compare it with what ranks have run.

[Note: the idle share] A rank is idle while the tensors that it needs next are not there. Its idle share is a
part of the time from the first operation of any rank to the last. All stages count as equally long: forward
1, the backward for inputs 1, that for weights 1, and recomputation 1. Messages take no time. If backward is
split, torch gives all of the first stage's to the part for weights, because its inputs need no gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from zero_full.pipeline.module import PipelineModule
from zero_full.pipeline.schedules import KINDS, make_schedule

FORWARD, BACKWARD, FOR_INPUTS, FOR_WEIGHTS = "F", "B", "I", "W"  # torch's letters


@dataclass(frozen=True)
class Operation:
    """Forward, or backward or a part of it, of one micro-batch in one stage."""

    kind: str  # FORWARD, BACKWARD, or one of the parts FOR_INPUTS and FOR_WEIGHTS
    stage: int
    micro_batch: int


@dataclass
class _Described:
    """Stage without layers, for torch's schedules, which read its place only."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    is_last: bool = False
    has_backward: bool = True

    def __post_init__(self) -> None:
        self.submod = nn.Identity()
        self.stage_index_to_group_rank: dict[int, int] = {}


def operations(name: str, module: PipelineModule, micro_batches: int) -> list[list[Operation]]:
    """Return the operations of each place in the module's pipeline; ConfigError for an invalid schedule."""
    ranks, total = module.num_stages, module.total_stages
    mine = [stage for stage in range(total) if module.place_of(stage) == 0]
    stages: list[Any] = [_Described(stage, total, ranks) for stage in mine]
    schedule = make_schedule(name, stages, micro_batches, _no_loss)
    if KINDS[name].several:
        return [
            [Operation(a.computation_type.value, a.stage_index, a.microbatch_index) for a in order if a]
            for _, order in sorted(schedule.pipeline_order.items())
        ]
    ahead = [ranks - stage if name == "1f1b" else micro_batches for stage in range(ranks)]
    return [_of_one_stage(stage, ahead[stage], micro_batches) for stage in range(ranks)]


def _of_one_stage(stage: int, ahead: int, micro_batches: int) -> list[Operation]:
    """Run `ahead` micro-batches forward; then one backward for each further forward; then the rest."""
    order = [Operation(FORWARD, stage, number) for number in range(ahead)]
    for number in range(micro_batches):
        order.append(Operation(BACKWARD, stage, number))
        if ahead + number < micro_batches:
            order.append(Operation(FORWARD, stage, ahead + number))
    return order


def _no_loss(output: Any, number: Any) -> Any:
    """Return the output, in place of a loss, for a schedule that never runs."""
    return output


def duration(operation: Operation, recomputes: bool) -> int:
    """Return how long an operation takes, in forwards. See [Note: the idle share]."""
    if operation.kind == BACKWARD:
        return 3 if recomputes else 2
    if operation.stage == 0:
        return {FORWARD: 1, FOR_INPUTS: 0, FOR_WEIGHTS: 2}[operation.kind]
    return 1


def idle_shares(orders: Sequence[Sequence[Operation]], takes: Callable[[Operation], float]) -> list[float]:
    """Return the idle share of each place, if an operation takes `takes`. See [Note: the idle share]."""
    last = max(operation.stage for order in orders for operation in order)
    ended: dict[Operation, float] = {}
    now, at = [0.0] * len(orders), [0] * len(orders)
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        before = [*at]
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                operation = order[at[rank]]
                needed = _needed(operation, last, ended)
                if any(each not in ended for each in needed):
                    break
                begin = max([now[rank], *(ended[each] for each in needed)])
                ended[operation] = now[rank] = begin + takes(operation)
                at[rank] += 1
        assert at != before, "the operations wait for each other"
    whole = max(now)
    return [1 - sum(map(takes, order)) / whole for order in orders]


def _needed(operation: Operation, last: int, ended: dict[Operation, float]) -> list[Operation]:
    """Return the operations on other stages that this one waits for."""
    kind, stage, number = operation.kind, operation.stage, operation.micro_batch
    if kind == FORWARD:
        return [Operation(FORWARD, stage - 1, number)] if stage else []
    if kind == FOR_WEIGHTS or stage == last:
        return []
    whole, part = Operation(BACKWARD, stage + 1, number), Operation(FOR_INPUTS, stage + 1, number)
    return [part if part in ended else whole]


def in_flight(order: Sequence[Operation]) -> dict[int, int]:
    """Return for each stage of a rank how many micro-batches' activations it holds at once, at most."""
    now, most = dict[int, int](), dict[int, int]()
    for operation in order:
        if operation.kind != FOR_INPUTS:  # the part for weights needs the activations, too
            change = 1 if operation.kind == FORWARD else -1
            now[operation.stage] = now.get(operation.stage, 0) + change
            most[operation.stage] = max(most.get(operation.stage, 0), now[operation.stage])
    return most
