"""Writes of user code to gradients, masters and state, which the next step compares between ranks.

[Note: written by hand] A gradient that user code assigns to `param.grad` or passes to `safe_set_full_grad`
replaces the average, of which each rank keeps a slice. If ranks wrote different tensors, the step would mix
slices of both. At stage 0 it would leave different parameters on the ranks. There are two kinds of writes:

    whole    a whole tensor, or a cleared gradient: must be equal on every rank
    slices   elements of this rank's slice (`safe_set_local_*`): must be equal on the slice's replicas

Entries stay until all ranks have agreed on them, because the values are in the buffers by then. So a step
that has raised raises again when it is repeated. Without writes there is no cost.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from zero_full.shard.group.checksum import fingerprint
from zero_full.shard.group.dtensors import local_of
from zero_full.shard.group.parameters import Member

GRADIENT = "gradient"
CLEARED = "cleared"
BY_HAND = ", by hand"
REMEDY = (
    "Written values are used as they are, so write the same on every rank. Average a gradient of this rank "
    "alone first (torch.distributed.all_reduce), or discard all gradients with zero_grad()"
)
Entry = tuple[str, Member | None]  # kind of tensor, and its parameter; None: all parameters


class HandWritten:
    """Fingerprints of tensors that user code has written. See [Note: written by hand]."""

    def __init__(self) -> None:
        self.whole: dict[Entry, Tensor | str] = {}
        self.slices: dict[Entry, Tensor | str] = {}

    def note(self, what: str, member: Member, value: Tensor | str) -> None:
        """Note a write of a parameter's whole gradient, master or optimizer state, or `CLEARED`."""
        self.slices.pop((what, member), None)  # overwritten
        self.whole[what, member] = value if isinstance(value, str) else _fingerprint(value)

    def note_slice(self, what: str, member: Member, value: Tensor) -> None:
        """Note a write to this rank's elements of a gradient, master or optimizer state."""
        self.slices[what, member] = _fingerprint(value)

    def note_all_cleared(self) -> None:
        """Note that user code cleared every gradient of this rank.

        It is one entry for all parameters, because ranks may have gradients of different ones.
        """
        self.forget_gradients()
        self.whole[GRADIENT, None] = CLEARED

    def forget_gradients(self) -> None:
        """Remove the entries of gradients, because they are discarded."""
        for entries in (self.whole, self.slices):
            for entry in [each for each in entries if each[0] == GRADIENT]:
                del entries[entry]

    def forget(self) -> None:
        """Remove all entries, because all ranks have agreed on them."""
        self.whole.clear()
        self.slices.clear()

    def of_all(self, members: Collection[Member]) -> list[tuple[str, str]]:
        """Return names and digests of the whole tensors of these parameters, to be equal on every rank."""
        return _digests(self.whole, members)

    def of_slices(self, members: Collection[Member]) -> list[tuple[str, str]]:
        """Return names and digests of elements of this rank's slice, to be equal on its replicas."""
        return _digests(self.slices, members)


def _fingerprint(value: Tensor) -> Tensor:
    """Compute a fingerprint on the tensor's device, so that the host waits for it only in the step."""
    return fingerprint(local_of(value).detach().contiguous().reshape(-1))


def _digests(entries: dict[Entry, Tensor | str], members: Collection[Member]) -> list[tuple[str, str]]:
    """Return names and digests of the entries of these parameters, sorted by name."""
    if not entries:
        return []
    mine = set(members)
    found, by_device = list[tuple[str, str]](), dict[torch.device, dict[str, Tensor]]()
    for (what, member), value in entries.items():
        if member is None or member in mine:
            name = (f"every {what}" if member is None else f"{what} of {member.name}") + BY_HAND
            if isinstance(value, str):
                found.append((name, value))
            else:
                by_device.setdefault(value.device, {})[name] = value
    for there in by_device.values():  # one wait per device
        values: list[int] = torch.stack([*there.values()]).tolist()
        found += [(name, f"values {value % 2**32:08x}") for name, value in zip(there, values, strict=True)]
    return sorted(found)  # ranks may have written in different orders
