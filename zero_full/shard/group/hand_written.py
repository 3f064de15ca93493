"""What user code has written by hand since the last step, to be compared between ranks in the next one.

[Note: written by hand] A gradient that was assigned to `param.grad` or given to `safe_set_full_grad` takes
the place of an average, of which each rank keeps a slice. If ranks gave different tensors, the step would mix
slices of both, or leave ranks with different parameters where each keeps everything. Two kinds of writes:

    whole    a whole tensor, or that a gradient was cleared: the same on every rank
    slices   elements of this rank's slice (`safe_set_local_*`): the same on the ranks that repeat the slice

Entries stay until all ranks have agreed on them, so a step that has raised raises again when it is repeated:
what was written is in the buffers by then. What nothing was written to costs nothing.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_full.shard.group.checksum import fingerprint
from zero_full.shard.group.parameters import Member

GRADIENT = "gradient"
CLEARED = "cleared"
BY_HAND = ", by hand"
REMEDY = (
    "What is written by hand counts as it is, so write the same on every rank: average a gradient of this "
    "rank's own first (torch.distributed.all_reduce), or give all gradients up with zero_grad()"
)
Entry = tuple[str, Member | None]  # of what, and of which parameter; None: of all


class HandWritten:
    """See [Note: written by hand]."""

    def __init__(self) -> None:
        self.whole: dict[Entry, Tensor | str] = {}
        self.slices: dict[Entry, Tensor | str] = {}

    def note(self, what: str, member: Member, value: Tensor | str) -> None:
        """A parameter's gradient, master or optimizer state has become this, or was `CLEARED`."""
        self.slices.pop((what, member), None)
        self.whole[what, member] = _mark(value)

    def note_slice(self, what: str, member: Member, value: Tensor) -> None:
        """This rank's elements of it have become this."""
        self.slices[what, member] = _mark(value)

    def note_all_cleared(self) -> None:
        """Every gradient of this rank was cleared, whichever parameters have one here."""
        self.forget_gradients()
        self.whole[GRADIENT, None] = CLEARED

    def forget_gradients(self) -> None:
        """The gradients are given up."""
        for entries in (self.whole, self.slices):
            for entry in [each for each in entries if each[0] == GRADIENT]:
                del entries[entry]

    def forget(self) -> None:
        """All ranks have agreed on it."""
        self.whole.clear()
        self.slices.clear()

    def of_all(self, members: Collection[Member]) -> list[tuple[str, str]]:
        """What must be the same on every rank, about these parameters: names, and digests of values."""
        return _told(self.whole, members)

    def of_slices(self, members: Collection[Member]) -> list[tuple[str, str]]:
        """What must be the same on the ranks that repeat a slice."""
        return _told(self.slices, members)


def _mark(value: Tensor | str) -> Tensor | str:
    """A number made of the values, where they are: nobody waits for a device before the step."""
    if isinstance(value, str):
        return value
    return fingerprint(value.detach().contiguous().reshape(-1))


def _told(entries: dict[Entry, Tensor | str], members: Collection[Member]) -> list[tuple[str, str]]:
    if not entries:
        return []
    mine = set(members)
    found = [(what, m, value) for (what, m), value in entries.items() if m is None or m in mine]
    digests = iter(_numbers([value for *_, value in found if isinstance(value, Tensor)]))
    told = [
        (_name(what, m), value if isinstance(value, str) else f"values {next(digests) % 2**32:08x}")
        for what, m, value in found
    ]
    return sorted(told)  # ranks may have written in different orders


def _name(what: str, member: Member | None) -> str:
    return (f"every {what}" if member is None else f"{what} of {member.name}") + BY_HAND


def _numbers(marks: Sequence[Tensor]) -> list[int]:
    """The host waits once for each device."""
    numbers: dict[int, int] = {}
    for device in dict.fromkeys(mark.device for mark in marks):
        there = [place for place, mark in enumerate(marks) if mark.device == device]
        values: list[Any] = torch.stack([marks[place] for place in there]).tolist()
        numbers.update(zip(there, values, strict=True))
    return [numbers[place] for place in range(len(marks))]
