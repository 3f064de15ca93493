"""The result of a memory plan, and its output as a table or JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from zero_full.formatting import human

PERSISTENT = {
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
    "master": "master",
    "moments": "optimizer state",
    "communication": "shared memory",
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
class Plan:
    """Predicted bytes on the rank with the most memory, by kind.

    Persistent memory and traffic equal a rank's ledger, to the byte. Temporary memory is the peak of each
    kind within a step on an accelerator. The total peak adds these up, so it is an upper bound. Fragmentation
    of the allocator and the memory of a device's libraries are not included.
    """

    stage: int
    world: int
    numel: int  # elements of the model's parameters
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

    @property
    def between_steps(self) -> int:
        """Bytes of persistent memory on the device."""
        return sum(getattr(self, kind) for kind in PERSISTENT)

    @property
    def peak(self) -> int:
        """Peak bytes, in backward or in the optimizer step. Without activations if these are unknown."""
        backward = self.gathered + self.buckets + (self.activations or 0)
        return self.between_steps + max(backward, self.update)

    def table(self) -> str:
        """Return a table of all kinds and totals, in readable units and in bytes."""
        rows = [
            *((f"  {name}", getattr(self, kind)) for kind, name in PERSISTENT.items()),
            (NAMES["between_steps"], self.between_steps),
            *([(NAMES["host"], self.host), ("  page-locked", self.pinned)] if self.host else []),
            *([(NAMES["disk"], self.disk)] if self.disk else []),
            *((f"  {name}", getattr(self, kind)) for kind, name in TEMPORARY.items()),
            (NAMES["peak"], self.peak),
            (NAMES["sent"], self.sent),
            *([("copied to the host in a step", self.down)] if self.host else []),
            *([("copied to the device in a step", self.up)] if self.host else []),
            *([("read from the disk in a step", self.read)] if self.disk else []),
            *([("written to the disk in a step", self.written)] if self.disk else []),
            ("in a checkpoint", self.saved),
        ]
        title = f"stage {self.stage}, {self.world:,} ranks, {self.numel:,} parameters: bytes a rank"
        lines = [title, *(_line(*row) for row in rows)]
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
        return "\n".join(lines)

    def as_json(self) -> str:
        """Return all numbers as one line of JSON."""
        whole = self.activations is not None
        sums = {"between_steps": self.between_steps, "peak": self.peak, "peak_has_activations": whole}
        return json.dumps({**asdict(self), **sums})


def _line(name: str, size: int | None) -> str:
    return _named(name, size) + (f"{size:>24,}" if size is not None else "")


def _named(name: str, size: int | None) -> str:
    return f"{name:<34}{human(size):>9}"


def side_by_side(plans: Sequence[Plan]) -> str:
    """Return a table with a column for each stage. Rows that are zero at all stages are left out."""
    lines = [
        f"{plans[0].world:,} ranks, {plans[0].numel:,} parameters: bytes a rank",
        _row("stage", [str(each.stage) for each in plans]),
    ]
    for kind, name in NAMES.items():
        sizes = [getattr(each, kind) for each in plans]
        if any(size != 0 for size in sizes):
            lines.append(_row(name, [human(size) for size in sizes]))
        if kind == "peak" and any(each.activations is None for each in plans):
            lines.append(_row("", [WITHOUT_ACTIVATIONS for each in plans]))
    return "\n".join(lines)


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<24}" + "".join(f"{cell:>14}" for cell in cells)
