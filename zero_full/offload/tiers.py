"""Tiers: where masters and moments wait between steps, and where they are stepped.

[Note: tiers] Owned state is made in a tier's `room`, and the optimizer steps it there. Before a step
`fetch` brings an averaged gradient to where the state is; afterwards the new values go to the parameters'
slice, wherever that waits (`shelf.py`). With state on the host (ZeRO-Offload) the device holds neither
masters nor moments, and what travels are gradients one way and parameters the other. State that waits
farther away comes nearer for its own part of a step only: `in_turn`.

A tier is a choice that a run makes. `open` makes of it what one rank needs in the run.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from zero_full.offload.shelf import HostShelf, Shelf

Owned = TypeVar("Owned")  # what is stepped: a slice of parameters


class Tier(ABC):
    """See [Note: tiers]."""

    apart: bool  # whether masters never lie in the parameters' own memory
    kind = "optimizer"  # under which name its bytes are told
    part_numel: int | None = None  # elements that are stepped at a time; None: as many as there are
    copied_numel = 2**24  # elements of parameters that wait there, of which a step has copies at a time
    can_lose = False  # whether `lost` may ever say something
    failure = ""  # in words, why no further step can be taken
    lost = ""  # in words, what of the state is gone

    def open(self) -> "Tier":
        """The same with what it needs in a run: files, buffers and threads."""
        return self

    def close(self) -> None:  # noqa: B027
        """Let go of all that."""

    def shelf(self, device: torch.device) -> Shelf:
        """What keeps slices of parameters of `device` there. They are not stepped there."""
        return Shelf()

    def refuse_too_little(self, need: int) -> None:  # noqa: B027
        """OSError or MemoryError if there is no room for so many bytes of this host's ranks."""

    @abstractmethod
    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for state of parameters that are on `device`. It is not filled."""

    @abstractmethod
    def fetch(self, tensor: Tensor) -> Tensor:
        """This tensor of the device, or a copy of it, where state is stepped."""

    def in_turn(
        self, parts: Sequence[Sequence[Owned]], tensors_of: Callable[[Owned], list[Tensor]]
    ) -> Generator[Sequence[Owned]]:
        """Yield each part when its state is where it is stepped. `tensors_of`: all that is to wait of one."""
        yield from parts


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
    apart = True
    kind = "host"

    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Host memory."""
        pinned = self.pin_memory and device.type != "cpu"
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pinned)

    def fetch(self, tensor: Tensor) -> Tensor:
        """A copy on the host; on a CPU the tensor itself."""
        return tensor.to("cpu")

    def shelf(self, device: torch.device) -> Shelf:
        """Host memory; of a model on the CPU, its own."""
        return Shelf() if device.type == "cpu" else HostShelf(self.pin_memory)


@dataclass(frozen=True)
class Waiting:
    """All that waits elsewhere in a run: state in a tier, slices of parameters on a shelf."""

    tier: Tier
    shelf: Shelf

    @property
    def can_lose(self) -> bool:
        """Whether `lost` may ever say something."""
        return self.tier.can_lose or self.shelf.can_lose

    @property
    def lost(self) -> str:
        """In words, what is gone."""
        return self.tier.lost or self.shelf.lost

    @property
    def trouble(self) -> str:
        """In words, why no further step can be taken."""
        return self.lost or self.tier.failure or self.shelf.failure

    def close(self) -> None:
        """Let go of files, buffers and threads."""
        self.tier.close()
        self.shelf.close()
