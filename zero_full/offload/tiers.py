"""Tiers: where masters and moments wait between steps, and where they are stepped.

[Note: tiers] Owned state is made in a tier's `room`, and the optimizer steps it there. Before a step
`fetch` brings an averaged gradient to where the state is, and afterwards `put_away` sends the new values of
the parameters' slice back. With state on the host (ZeRO-Offload) the device holds neither masters nor
moments, and what travels are gradients one way and parameters the other. Where the host's memory is not the
device's they travel beside the work: `flow`. State that waits farther away comes nearer for its own part of a
step only: `in_turn`.

A tier is a choice that a run makes. `open` makes of it what one rank needs in the run.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from zero_full.offload.copies import Copier, StreamCopier
from zero_full.offload.flow import Flow

Owned = TypeVar("Owned")  # what is stepped: a slice of parameters


class Tier(ABC):
    """See [Note: tiers]."""

    apart: bool  # whether masters never lie in the parameters' own memory
    kind = "optimizer"  # under which name its bytes are told
    part_numel: int | None = None  # elements that are stepped at a time; None: as many as there are
    step_early = False  # whether slices are stepped beside backward, on a guess; see `shard/early.py`
    early_bytes: int | None = None  # that this may cost; None: as much again as there is
    moves = False  # whether state lies elsewhere between steps than in them, and may get `lost` on the way
    failure = ""  # in words, why no further step can be taken
    lost = ""  # in words, what of the state is gone

    def open(self) -> "Tier":
        """The same with what it needs in a run: files, buffers and threads."""
        return self

    def close(self) -> None:  # noqa: B027
        """Let go of all that."""

    def refuse_too_little(self, need: int) -> None:  # noqa: B027
        """OSError or MemoryError if there is no room for so many bytes of this host's ranks."""

    @abstractmethod
    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for state of parameters that are on `device`. It is not filled."""

    @abstractmethod
    def fetch(self, tensor: Tensor) -> Tensor:
        """This tensor of the device, or a copy of it, where state is stepped."""

    def put_away(self, updated: Tensor, on_device: Tensor) -> None:
        """What was stepped becomes the values of a tensor of the device, unless it is the same memory."""
        if updated is not on_device:
            on_device.copy_(updated)

    def in_turn(
        self, parts: Sequence[Sequence[Owned]], tensors_of: Callable[[Owned], list[Tensor]]
    ) -> Generator[Sequence[Owned]]:
        """Yield each part when its state is where it is stepped. `tensors_of`: all that is to wait of one."""
        yield from parts

    def flow(self, device: torch.device, sums: bool) -> Flow | None:
        """What brings gradients from this device and parameters to it; None: nothing has to be copied."""
        return None


@dataclass(frozen=True)
class DeviceTier(Tier):
    """State stays beside the parameters. A master of their own type is their memory."""

    apart = False

    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory on the parameters' device."""
        return torch.empty(numel, dtype=dtype, device=device)

    def fetch(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor


@dataclass(frozen=True)
class HostTier(Tier):
    """State waits in host memory and is stepped there. Copies wait until they are done."""

    pin_memory: bool = False  # page-locked, which an accelerator copies faster; on a CPU no difference
    step_early: bool = False
    early_bytes: int | None = None
    apart = True
    kind = "host"

    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Host memory."""
        pinned = self.pin_memory and device.type != "cpu"
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pinned)

    def fetch(self, tensor: Tensor) -> Tensor:
        """A copy on the host; on a CPU the tensor itself."""
        return tensor.to("cpu")

    def copiers(self, device: torch.device) -> tuple[Copier, Copier] | None:
        """Down and up, which an accelerator does at once; None: the host's memory is the device's."""
        if device.type in ("cpu", "meta"):
            return None
        return StreamCopier(device), StreamCopier(device)

    def flow(self, device: torch.device, sums: bool) -> Flow | None:
        """On three threads, which start when there is something to do."""
        copiers = self.copiers(device)
        return None if copiers is None else Flow(self.room, device, copiers, sums)
