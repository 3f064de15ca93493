"""Tiers: where masters and moments wait between steps, and where they are stepped.

[Note: tiers] A tier is a choice, of which `Settings` has one. A rank's `keeper` has the memory: owned state
is made in its `room`, and the optimizer steps it there. Before a step `fetch` brings an averaged gradient to
where the state is, and afterwards `put_away` sends the new values of the parameters' slice back. With state
on the host (ZeRO-Offload) the device holds neither masters nor moments, and what travels are gradients one
way and parameters the other.

[Note: part of the state] With a `ratio` below 1 only so much of the state waits elsewhere, by elements: that
of the parameters whose gradients come first in backward. What comes last, the first layers, stays on the
device, where its step need not wait for a copy.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_full.offload.arena import Arena

CPU = torch.device("cpu")


class StateKeeper:
    """The memory that a rank's owned state is in: the parameters' device."""

    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for state of parameters that are on `device`. It is not filled."""
        return torch.empty(numel, dtype=dtype, device=device)

    def close(self) -> None:
        """No more rooms are asked for. Those that somebody holds stay valid."""


class HostKeeper(StateKeeper):
    """Host memory: what was foreseen is in the arena, and anything else beside it."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Host memory."""
        room = self.arena.take(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=CPU) if room is None else room

    def close(self) -> None:
        """Nothing is page-locked any more."""
        self.arena.close()


class Tier(ABC):
    """See [Note: tiers]."""

    apart: bool  # whether masters never lie in the parameters' own memory
    ratio: float = 1.0  # see [Note: part of the state]

    @abstractmethod
    def place(self, device: torch.device) -> torch.device:
        """Where state of parameters that are on `device` is stepped."""

    def keeper(self, rooms: Sequence[int], device: torch.device) -> StateKeeper:
        """Memory for a rank whose parameters are on `device`. `rooms`: the bytes of each to be asked for."""
        return StateKeeper()

    @abstractmethod
    def fetch(self, tensor: Tensor) -> Tensor:
        """This tensor of the device, or a copy of it, where state is stepped."""

    def put_away(self, updated: Tensor, on_device: Tensor) -> None:
        """What was stepped becomes the values of a tensor of the device, unless it is the same memory."""
        if updated is not on_device:
            on_device.copy_(updated)


@dataclass(frozen=True)
class DeviceTier(Tier):
    """State stays beside the parameters. A master of their own type is their memory."""

    apart = False

    def place(self, device: torch.device) -> torch.device:
        """The parameters' device."""
        return device

    def fetch(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor


@dataclass(frozen=True)
class HostTier(Tier):
    """State waits in host memory and is stepped there. Copies wait until they are done."""

    pin_memory: bool = False  # masters in page-locked memory, which CUDA copies faster; else no difference
    ratio: float = 1.0
    apart = True

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be meant."""
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio must be from 0 to 1, not {self.ratio!r}")

    def place(self, device: torch.device) -> torch.device:
        """The host."""
        return CPU

    def keeper(self, rooms: Sequence[int], device: torch.device) -> StateKeeper:
        """An arena, page-locked if that was asked for and makes a difference."""
        return HostKeeper(Arena(rooms, torch.cuda.cudart() if self.locks(device) else None))

    def locks(self, device: torch.device) -> bool:
        """Whether memory is page-locked for parameters on this device."""
        return self.pin_memory and device.type == "cuda"

    def fetch(self, tensor: Tensor) -> Tensor:
        """A copy on the host; on a CPU the tensor itself."""
        return tensor.to(CPU)
