"""Tiers: where masters and moments wait between steps, and where they are stepped.

[Note: tiers] Owned state is made in a tier's `room`, and the optimizer steps it there. Before a step
`fetch` brings an averaged gradient to where the state is, and afterwards `put_away` sends the new values of
the parameters' slice back. With state on the host (ZeRO-Offload) the device holds neither masters nor
moments, and what travels are gradients one way and parameters the other. State that waits farther away
comes nearer for its own part of a step only: `in_turn`.

A tier is a choice that a run makes. `open` makes of it what one rank needs in the run.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Owned = TypeVar("Owned")  # what is stepped: a slice of parameters


class Tier(ABC):
    """See [Note: tiers]."""

    apart: bool  # whether masters never lie in the parameters' own memory
    kind = "optimizer"  # under which name its bytes are told
    part_numel: int | None = None  # elements that are stepped at a time; None: as many as there are
    can_lose = False  # whether `lost` may ever say something
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
