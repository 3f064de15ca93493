"""Forecast the seconds of a training step from a plan's work and a machine's measured rates.

[Note: the time of a step] A rank computes forward and backward, moves gradients and parameters, and updates
its slices. Each part is a sum over its operations, at the measured seconds for their sizes:

    forward, backward   matrix products, attention, passes over tensors; a fixed time of a pass and operation
    reduce, gather      the runtime's collectives, and its copies of gradients into buffers
    update              the optimizer's step: seconds of an element, and the gradients' norm if it is needed
    runtime             Python of the runtime: seconds of a step and of each parameter, at this stage
    messages            tensors that a pipeline's stage receives from others
    idle                the time in which a pipeline's rank has nothing to compute
    waiting             for the slowest rank: a share of what ranks compute
    hidden              the share of collectives within backward and forward that overlap_comm hides

A feature without a measured rate is not forecast at all: `NotForecastError` says which.
"""

from dataclasses import asdict, dataclass
from typing import Any

from zero_full.plan.machine_file import MachineRates, seconds_at
from zero_full.plan.work import (
    BACKWARD,
    FORWARD,
    NORM,
    AdamStep,
    AttentionCall,
    Collective,
    Item,
    MatrixProduct,
    MemoryPass,
    Work,
)

HEAD = 64  # elements of the head whose attention was measured


PARTS = {
    "forward": "forward",
    "backward": "backward",
    "reduce": "reduce gradients",
    "gather": "gather parameters",
    "update": "optimizer",
    "runtime": "runtime, in Python",
    "messages": "messages between stages",
    "idle": "idle in the pipeline",
    "waiting": "waiting for other ranks",
    "hidden": "hidden by overlap",
}


class NotForecastError(Exception):
    """Raised with the reason why a step's time is not forecast."""


@dataclass(frozen=True)
class StepTime:
    """Forecast seconds of a step on one rank, by part. See [Note: the time of a step]."""

    forward: float
    backward: float
    reduce: float
    gather: float
    update: float
    runtime: float
    messages: float = 0.0
    idle: float = 0.0
    waiting: float = 0.0
    hidden: float = 0.0  # to be subtracted
    tokens: int | None = None  # in a step of all ranks; None: the inputs have no tokens

    @property
    def total(self) -> float:
        """Seconds of a step."""
        parts = (self.forward, self.backward, self.reduce, self.gather, self.update, self.runtime)
        return sum(parts) + self.messages + self.idle + self.waiting - self.hidden

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all ranks together; None: unknown."""
        return None if self.tokens is None else self.tokens / self.total

    def as_dict(self) -> dict[str, Any]:
        """Return all parts and sums, for JSON."""
        return {**asdict(self), "total": self.total, "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True)
class StepWork:
    """The work of a step of one rank, and what decides about its time besides."""

    forward: Work
    backward: Work
    runtime: Work  # of all micro-batches and the update
    stage: int
    parameters: int  # tensors that are trained
    micro_batches: int
    transport: str
    overlaps: bool
    tokens: int | None


def step_time(work: StepWork, rates: MachineRates) -> StepTime:
    """Return the forecast. Raises NotForecastError if a part of the work has no measured rate."""
    for part in (work.forward, work.backward, work.runtime):
        check_known(part)
    forward, backward = (
        work.micro_batches * pass_seconds(part, rates, direction)
        for part, direction in ((work.forward, FORWARD), (work.backward, BACKWARD))
    )
    hides = rates.hidden if work.overlaps else 0.0
    of_step, of_parameter = _known(rates.runtime, str(work.stage), "the runtime at stage")
    moved = moved_seconds(work.runtime, rates, work.transport)
    return StepTime(
        forward=forward,
        backward=backward,
        reduce=moved.reduce,
        gather=moved.gather,
        update=moved.update,
        runtime=of_step + of_parameter * work.parameters * work.micro_batches,
        waiting=rates.waiting * (forward + backward + moved.update),
        hidden=hides * min(moved.in_pass, forward + backward),
        tokens=work.tokens,
    )


def check_known(work: Work) -> None:
    """Raise NotForecastError if the time of an operation does not follow from its bytes."""
    if work.unknown:
        raise NotForecastError(f"no rate of {', '.join(sorted(work.unknown))} is measured")


@dataclass(frozen=True)
class RuntimeSeconds:
    """Seconds of the runtime's work in a step."""

    reduce: float
    gather: float
    update: float
    in_pass: float  # of reduce and gather: collectives within forward and backward


def moved_seconds(work: Work, rates: MachineRates, transport: str) -> RuntimeSeconds:
    """Return the seconds of the runtime's collectives, copies and update."""
    reduce = gather = update = in_pass = 0.0
    for item, count in work.items.items():
        if not isinstance(item, Collective | MemoryPass | AdamStep):
            continue
        seconds = count * _seconds(item, rates, transport)
        if isinstance(item, AdamStep) or (isinstance(item, MemoryPass) and item.kind == NORM):
            update += seconds
        elif isinstance(item, Collective) and item.kind == "all_gather":
            gather += seconds
        else:  # a reduction, or a copy of gradients
            reduce += seconds
        if isinstance(item, Collective) and item.in_pass:
            in_pass += seconds
    return RuntimeSeconds(reduce, gather, update, in_pass)


def operations_seconds(work: Work, rates: MachineRates) -> float:
    """Return the seconds of a model's operations, without the fixed time of each."""
    return sum(count * _seconds(item, rates, "") for item, count in work.items.items())


def pass_seconds(work: Work, rates: MachineRates, direction: str) -> float:
    """Return the seconds of the model's operations in one direction of a pass."""
    of_pass, of_operation = rates.operations[direction]
    return operations_seconds(work, rates) + of_pass + work.operations * of_operation


def _seconds(item: Item, rates: MachineRates, transport: str) -> float:
    """Return the seconds of one operation."""
    if isinstance(item, MatrixProduct):
        points = _known(rates.products, f"{item.dtype} {item.layout}", "matrix products in")
        return item.count * seconds_at(points, item.rows, item.inner, item.columns)
    if isinstance(item, AttentionCall):
        points = _known(rates.attention, f"{item.dtype} {item.direction}", "attention in")
        longest: float = points[-1][0]
        more = max(1.0, item.tokens / longest)  # beyond the measured tokens, seconds grow with their square
        return item.heads * item.width / HEAD * more * seconds_at(points, item.tokens)
    if isinstance(item, MemoryPass):
        points = _known(rates.passes, f"{item.kind} {item.dtype}", "passes:", f"{item.kind} float32")
        return seconds_at(points, item.size)
    if isinstance(item, Collective):
        name = f"{transport} {item.kind} {item.dtype}"
        return seconds_at(_known(rates.collectives, name, "collectives:"), item.size)
    of_element: float = _known(rates.adam, item.dtypes, "Adam in")
    return item.numel * of_element


def _known(table: Any, name: str, what: str, other: str = "") -> Any:
    """Return an entry, or that of another name. Raises NotForecastError if neither was measured."""
    if name not in table and other not in table:
        raise NotForecastError(f"{what} {name} are not measured")
    return table.get(name, table.get(other))
