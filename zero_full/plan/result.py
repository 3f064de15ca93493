"""The result of a memory plan, and its output as a table or JSON."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zero_full.formatting import human, terminal_width
from zero_full.plan.step_time import PARTS, StepTime

PERSISTENT = {
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
    "master": "master",
    "moments": "optimizer state",
    "communication": "shared memory",
    "received": "receive buffers",
}
TEMPORARY = {
    "gathered": "gathered parameters",
    "buckets": "unreduced gradients",
    "activations": "activations",
    "update": "optimizer temporaries",
}
NAMES = {
    **PERSISTENT,
    "between_steps": "between steps",
    "host": "offloaded to host",
    "disk": "offloaded to disk",
    **TEMPORARY,
    "peak": "peak",
    "sent": "sent in a step",
}
WIDE = 67  # characters: a row with the exact number of bytes
AT_MOST = "peak, at most"  # the sum of kinds that peak at different moments
WITHOUT_ACTIVATIONS = "+ activations"  # shown after the peak if activations are unknown


@dataclass(frozen=True)
class Phase:
    """Bytes of one kind of step, for an optimizer with several kinds, such as warmup and compressed steps."""

    name: str
    moments: int  # optimizer state after the step
    update: int  # peak of temporary memory in the update
    sent: int  # sent by this rank in the step
    saved: int  # in a checkpoint after the step


@dataclass(frozen=True)
class PipelinePart:
    """One rank's part of a pipeline: its stages, and its time in a batch."""

    place: int
    ranks: int  # of the pipeline
    schedule: str
    stages: tuple[int, ...]
    layers: tuple[tuple[int, int], ...]  # of each stage: the first, and the one after the last
    in_flight: tuple[int, ...]  # of each stage: most micro-batches whose activations are held at one time
    idle: float  # share of a batch's time in which the rank waits: see [Note: the idle share]
    handed_over: int | None  # bytes sent to other stages in a step; None: unknown, as no inputs were given


@dataclass(frozen=True)
class Plan:
    """Predicted bytes on the rank with the most memory, by kind.

    Persistent memory and traffic equal a rank's ledger, to the byte. Temporary memory is the peak of each
    kind within a step on an accelerator. The kinds peak at different moments: with inputs, the total peak is
    the largest sum at one moment (`passes`), else the sum of the rows, an upper bound. Rounding and
    fragmentation of the allocator and the memory of a device's libraries are not included.

    Of a pipeline, a plan is of the ranks at one place: at the place with the highest peak, with the plans of
    all places in `places`.
    """

    stage: int
    world: int  # data-parallel ranks, each beside the ranks of a tensor-parallel mesh and of a pipeline
    numel: int  # elements of the model's parameters; of all stages of a pipeline
    # Persistent between steps. Gradients last until `zero_grad`, which the engine calls after the step.
    parameters: int
    buffers: int
    gradients: int
    master: int  # this rank's fp32 master weights, if parameters are 16-bit
    moments: int  # optimizer state
    communication: int  # shared-memory windows
    host: int  # offloaded to host memory; not part of the device's bytes
    pinned: int  # page-locked part of `host`
    disk: int  # offloaded to this rank's spill file
    saved: int  # this rank's part of a checkpoint; an asynchronous save keeps a copy in host memory
    whole: int  # parameters that `engine.generation()` gathers, if they fit, beside those between steps
    # Temporary, at the peak within a step.
    gathered: int  # all-gathered parameters in use
    buckets: int  # gradients before or during their reduction
    activations: int | None  # None: unknown, as no inputs were given
    update: int  # temporaries of the optimizer step, after the three above are freed
    sent: int  # sent by this rank in a step
    down: int  # copied from the device to the host in a step, for offloaded state
    up: int  # copied from the host to the device in a step
    read: int  # read from the spill file in a step
    written: int  # written to the spill file in a step
    phases: tuple[Phase, ...] = ()  # kinds of steps, if several; the numbers above are those of the largest
    tensor_ranks: int = 1
    # Activations, gradients and gathered parameters at the worst moment of a pass. None: unknown.
    passes: int | None = None
    # Of a pipeline only.
    # Buffers to receive from other stages, for all micro-batches. torch keeps them between steps until 2.14,
    # and from 2.15 on allocates each when it is due, so there this is an upper bound.
    received: int = 0
    pipeline: PipelinePart | None = None
    places: tuple["Plan", ...] = ()  # of all ranks of the pipeline
    step_time: StepTime | None = None  # forecast; None: without a machine file, or `not_forecast` says why
    not_forecast: str = ""

    @property
    def between_steps(self) -> int:
        """Bytes of persistent memory on the device."""
        return sum(getattr(self, kind) for kind in PERSISTENT)

    @property
    def peak(self) -> int:
        """Peak bytes, in a pass or in the optimizer step. Without activations if these are unknown."""
        passes = self.passes
        if passes is None:
            passes = self.gradients + self.gathered + self.buckets + (self.activations or 0)
        return self.between_steps + max(passes - self.gradients, self.update)

    @property
    def peak_name(self) -> str:
        """The name of the peak in tables, which says if it is an upper bound."""
        return AT_MOST if self.passes is None and self.activations is not None else NAMES["peak"]

    def table(self) -> str:
        """Return a table of all kinds and totals, in readable units and in bytes."""
        rows = [
            *(
                (f"  {name}", getattr(self, kind))
                for kind, name in PERSISTENT.items()
                if kind != "received" or self.pipeline
            ),
            (NAMES["between_steps"], self.between_steps),
            *([(NAMES["host"], self.host), ("  page-locked", self.pinned)] if self.host else []),
            *([(NAMES["disk"], self.disk)] if self.disk else []),
            *((f"  {name}", getattr(self, kind)) for kind, name in TEMPORARY.items()),
            (self.peak_name, self.peak),
            (NAMES["sent"], self.sent),
            *([("copied to the host in a step", self.down)] if self.host else []),
            *([("copied to the device in a step", self.up)] if self.host else []),
            *([("read from the disk in a step", self.read)] if self.disk else []),
            *([("written to the disk in a step", self.written)] if self.disk else []),
            *([("sent to other stages in a step", self.pipeline.handed_over)] if self.pipeline else []),
            ("in a checkpoint", self.saved),
            *([("whole in generation()", self.whole)] if self.whole else []),
        ]
        title = f"stage {self.stage}, {_ranks(self)}, {self.numel:,} parameters: bytes a rank"
        lines = ["\n".join(textwrap.wrap(title, terminal_width())), *(_line(*row) for row in rows)]
        if self.activations is None:
            place = next(place for place, (name, _) in enumerate(rows, 1) if name == NAMES["peak"])
            lines[place] = f"{_named(NAMES['peak'], self.peak)} {WITHOUT_ACTIVATIONS}"
        if self.phases:
            lines += ["", "by kind of step; the rows above show the largest"]
        for phase in self.phases:
            lines += [
                f"  {phase.name}",
                _line("    optimizer state", phase.moments),
                _line("    optimizer temporaries", phase.update),
                _line("    sent in a step", phase.sent),
            ]
        return "\n".join([*lines, *_by_place(self), *_time_lines(self)])

    def as_json(self) -> str:
        """Return all numbers as one line of JSON."""
        return json.dumps(_with_sums(self))


def _with_sums(plan: Plan) -> dict[str, Any]:
    """Return all numbers of a plan, and the totals, also of the places of a pipeline."""
    sums = {"between_steps": plan.between_steps, "peak": plan.peak}
    places = [_with_sums(place) for place in plan.places]
    known = plan.activations is not None
    time = time_numbers(plan.step_time)
    return {**asdict(plan), **sums, "peak_has_activations": known, "places": places, "step_time": time}


def time_numbers(time: StepTime | None) -> dict[str, Any] | None:
    """Return a forecast for JSON."""
    return None if time is None else time.as_dict()


def _ranks(plan: Plan) -> str:
    """Return the number of ranks as text."""
    if plan.tensor_ranks > 1:
        return f"{plan.world:,} data ranks x {plan.tensor_ranks:,} tensor ranks"
    if plan.pipeline is not None:
        return (
            f"{plan.world:,} data ranks x {plan.pipeline.ranks:,} pipeline ranks ({plan.pipeline.schedule})"
        )
    return f"{plan.world:,} ranks"


def _by_place(largest: Plan) -> Iterator[str]:
    """Yield the lines that compare the places of a pipeline, one line for each place."""
    if largest.pipeline is None or not largest.places:
        return
    yield from ("", f"by place in the pipeline; the rows above show place {largest.pipeline.place}")
    sizes = f"{'between steps':>14}{'activations':>13}{'peak':>10}"
    yield f"{'place':<6}{'layers':<16}{sizes}{'in flight':>11}{'idle':>8}"
    for plan in largest.places:
        part = plan.pipeline
        assert part is not None
        layers = " ".join(f"{first}-{end - 1}" for first, end in part.layers)
        flying = " ".join(map(str, part.in_flight))
        sizes = f"{human(plan.between_steps):>14}{human(plan.activations):>13}{human(plan.peak):>10}"
        yield f"{part.place:<6}{layers:<16}{sizes}{flying:>11}{part.idle:>8.1%}"


def _time_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines of the forecast time, or why it is not forecast; none without a machine file."""
    time = plan.step_time
    if plan.not_forecast:
        yield from ("", *textwrap.wrap(f"time not forecast: {plan.not_forecast}", terminal_width()))
    if time is None:
        return
    yield from ("", "seconds of a step, a forecast")
    for part, name in PARTS.items():
        seconds = getattr(time, part)
        if seconds:
            yield f"  {name:<32}{'-' if part == 'hidden' else ''}{1e3 * seconds:.1f} ms"
    yield f"{'step':<34}{1e3 * time.total:.1f} ms"
    if time.tokens_per_second is not None:
        yield f"{'tokens per second, all ranks':<34}{time.tokens_per_second:,.0f}"


def _line(name: str, size: int | None) -> str:
    exact = f"{size:>24,}" if size is not None and terminal_width() >= WIDE else ""
    return _named(name, size) + exact


def _named(name: str, size: int | None) -> str:
    return f"{name:<{min(34, terminal_width() - 9)}}{human(size):>9}"


def side_by_side(plans: Sequence[Plan]) -> str:
    """Return a table with a column for each stage. Rows that are zero at all stages are left out.

    In a narrow terminal, return a table for each stage instead.
    """
    if terminal_width() < len(_row("", [""] * len(plans))):
        return "\n\n".join(each.table() for each in plans)
    lines = [
        f"{_ranks(plans[0])}, {plans[0].numel:,} parameters: bytes a rank",
        _row("stage", [str(each.stage) for each in plans]),
    ]
    for kind, name in NAMES.items():
        sizes = [getattr(each, kind) for each in plans]
        if kind == "peak" and any(each.peak_name == AT_MOST for each in plans):
            name = AT_MOST
        if any(size != 0 for size in sizes):
            lines.append(_row(name, [human(size) for size in sizes]))
        if kind == "peak" and any(each.activations is None for each in plans):
            lines.append(_row("", [WITHOUT_ACTIVATIONS for each in plans]))
    lines += _time_rows(plans)
    return "\n".join(lines)


def _time_rows(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield rows of the forecast times of several plans; none without a machine file."""
    if any(each.step_time is not None for each in plans):
        yield _row("step, a forecast", [time_cell(each.step_time) for each in plans])
    if any(each.step_time is not None and each.step_time.tokens is not None for each in plans):
        yield _row("tokens/s, all ranks", [rate_cell(each.step_time) for each in plans])
    for reason in dict.fromkeys(each.not_forecast for each in plans if each.not_forecast):
        stages = ", ".join(str(each.stage) for each in plans if each.not_forecast == reason)
        yield f"time not forecast at stage {stages}: {reason}"


def time_cell(time: StepTime | None) -> str:
    """Return the seconds of a step for a table."""
    return "not forecast" if time is None else f"{1e3 * time.total:.1f} ms"


def rate_cell(time: StepTime | None) -> str:
    """Return the tokens per second for a table."""
    rate = None if time is None else time.tokens_per_second
    return "" if rate is None else f"{rate:,.0f}"


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<24}" + "".join(f"{cell:>14}" for cell in cells)
