"""What a plan says, and how it looks."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from zero_full.formatting import human

KEPT = {
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
    "master": "master",
    "moments": "optimizer state",
    "communication": "shared memory",
}
PASSING = {
    "gathered": "gathered parameters",
    "buckets": "gradients on their way",
    "activations": "activations",
    "update": "copies for the optimizer",
}
NAMES = {
    **KEPT,
    "between_steps": "between steps",
    "host": "waiting on the host",
    "disk": "waiting on the disk",
    **PASSING,
    "peak": "peak",
    "sent": "sent in a step",
}
LACKING = "+ activations"  # behind a peak, where nobody has said what a batch is


@dataclass(frozen=True)
class Phase:
    """Bytes in a step of one of several kinds, of an optimizer whose steps are not all alike."""

    name: str
    moments: int  # kept behind such a step
    update: int
    sent: int
    saved: int


@dataclass(frozen=True)
class Plan:
    """Bytes on the rank that holds most, by kind.

    What is kept, and what is sent in a step, is what a rank's ledger shows, to the byte. What passes within a
    step is, kind by kind, the most at one time on an accelerator; the peak adds these up, which is the worst
    that can come together. Not in it: what an allocator leaves unused, and what a device's libraries take.
    """

    stage: int
    world: int
    numel: int  # elements of the model's parameters
    # Kept from step to step; gradients until `zero_grad`, which the engine calls after the step.
    parameters: int
    buffers: int
    gradients: int
    master: int  # a copy of what this rank owns of the parameters, if those have 16 bits
    moments: int  # what the optimizer remembers
    communication: int  # windows in shared memory
    host: int  # beside that, and not on the device: what waits in the host's memory
    pinned: int  # of that, in page-locked memory
    disk: int  # what waits in this rank's file
    saved: int  # in a checkpoint by this rank: an asynchronous save keeps a copy in the host's memory
    # Beside that, at a step's worst moment.
    gathered: int  # whole parameters of units, while they are used
    buckets: int  # gradients that are not reduced yet, or are being reduced
    activations: int | None  # None: nobody has said what a batch is
    update: int  # what the step makes for the optimizer; by then the three above are gone
    sent: int  # bytes that this rank sends in a step
    down: int  # copied in a step from the device to the host, for state that waits there
    up: int  # and back
    read: int  # from the file in a step
    written: int  # and to it
    phases: tuple[Phase, ...] = ()  # where there are some, the same numbers above are those of the largest

    @property
    def between_steps(self) -> int:
        """All that is kept."""
        return sum(getattr(self, kind) for kind in KEPT)

    @property
    def peak(self) -> int:
        """The most at one time: in backward, or while the optimizer steps. Without activations if unknown."""
        backward = self.gathered + self.buckets + (self.activations or 0)
        return self.between_steps + max(backward, self.update)

    def table(self) -> str:
        """Every kind in human units and in bytes, and the totals."""
        rows = [
            *((f"  {name}", getattr(self, kind)) for kind, name in KEPT.items()),
            (NAMES["between_steps"], self.between_steps),
            *([(NAMES["host"], self.host), ("  page-locked", self.pinned)] if self.host else []),
            *([(NAMES["disk"], self.disk)] if self.disk else []),
            *((f"  {name}", getattr(self, kind)) for kind, name in PASSING.items()),
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
            lines[place] = f"{_named(NAMES['peak'], self.peak)} {LACKING}"
        if self.phases:
            lines += ["", "in steps of each kind; what is above is the largest"]
        for phase in self.phases:
            lines += [
                f"  {phase.name}",
                _line("    optimizer state", phase.moments),
                _line("    copies for the optimizer", phase.update),
                _line("    sent in a step", phase.sent),
            ]
        return "\n".join(lines)

    def as_json(self) -> str:
        """One line with every number."""
        whole = self.activations is not None
        sums = {"between_steps": self.between_steps, "peak": self.peak, "peak_has_activations": whole}
        return json.dumps({**asdict(self), **sums})


def _line(name: str, size: int | None) -> str:
    return _named(name, size) + (f"{size:>24,}" if size is not None else "")


def _named(name: str, size: int | None) -> str:
    return f"{name:<34}{human(size):>9}"


def side_by_side(plans: Sequence[Plan]) -> str:
    """A column for each stage. What none of them has is left out."""
    lines = [
        f"{plans[0].world:,} ranks, {plans[0].numel:,} parameters: bytes a rank",
        _row("stage", [str(each.stage) for each in plans]),
    ]
    for kind, name in NAMES.items():
        sizes = [getattr(each, kind) for each in plans]
        if any(size != 0 for size in sizes):
            lines.append(_row(name, [human(size) for size in sizes]))
        if kind == "peak" and any(each.activations is None for each in plans):
            lines.append(_row("", [LACKING for each in plans]))
    return "\n".join(lines)


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<24}" + "".join(f"{cell:>14}" for cell in cells)
