"""Offload tiers: where masters and moments are stored between steps, and where they are stepped.

[Note: tiers] Masters and moments are allocated by a tier's `room`, and the optimizer steps them there. Before
a step `fetch` copies an averaged gradient to the state. Afterwards the new values go to the slice of the
parameters, wherever it is stored (`param_store.py`). With state on the host (ZeRO-Offload) the device holds
neither masters nor moments; gradients are copied down and parameters up. For an accelerator these copies run
beside other work: `flow`. State on a disk is in memory during its own part of a step only: `in_turn`.

A tier is a choice of the user. `open` returns the tier of one rank in a run, with its memory and files.

[Note: part of the state] With a `ratio` below 1 only this share of the state, by elements, is offloaded: that
of the parameters whose gradients come first in backward. The state of the first layers, whose gradients come
last, stays on the device, where its step does not wait for a copy.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from zero_full.offload.arena import Arena
from zero_full.offload.copies import Copier, StreamCopier
from zero_full.offload.host_device_copies import Flow
from zero_full.offload.param_store import HostShelf, Shelf

Owned = TypeVar("Owned")  # a slice of parameters that is stepped
CPU = torch.device("cpu")
GONE = "the optimizer's state has waited off the device, and destroy has let go of it: save before destroy"


class Tier(ABC):
    """Base of the tiers. See [Note: tiers]."""

    apart: bool  # whether masters always have their own memory, and never the parameters'
    kind = "optimizer"  # the name of its bytes in reports
    ratio: float = 1.0  # see [Note: part of the state]
    part_numel: int | None = None  # elements that are stepped at a time; None: all
    step_early = False  # whether slices are stepped speculatively during backward: [Note: early steps]
    early_bytes: int | None = None  # host memory for that; None: twice that of the slices
    delay_after: int | None = (
        None  # updates before the first delayed one, None: never: [Note: delayed updates]
    )
    moves = False  # whether state is read and written in every step, and may be `lost`
    copied_numel = 2**24  # elements of offloaded parameters that a step has copies of at a time
    place = ""  # the disk of this host that it uses, while it is open
    advice = ""  # a hint for the user about this choice
    failure = ""  # the reason why no further step can be taken
    lost = ""  # the message about state that could not be read

    def open(self, rooms: Sequence[int], device: torch.device) -> "Tier":
        """Return the tier of a run, with its memory, files, buffers and threads.

        `rooms`: bytes of each later call of `room`, for parameters on `device`.
        """
        return self

    def close(self) -> None:  # noqa: B027
        """Free the memory, and close files and threads."""

    def held(self) -> Sequence[Tensor]:
        """Host buffers of the tier, beside the rooms."""
        return []

    def moved(self) -> dict[str, int]:
        """Bytes moved so far between memory and disk, by direction."""
        return {}

    def shelf(self, device: torch.device) -> Shelf:
        """The store of parameter slices in this tier, for a model on `device`."""
        return Shelf()

    def refuse_too_little(self, need: int) -> None:  # noqa: B027
        """Raise OSError if `need` bytes, of all ranks of this host, do not fit in `place`."""

    @abstractmethod
    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate uninitialized memory for state of parameters on `device`."""

    @abstractmethod
    def fetch(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the device, or its copy, where state is stepped."""

    def in_turn(
        self, parts: Sequence[Sequence[Owned]], tensors_of: Callable[[Owned], list[Tensor]]
    ) -> Generator[Sequence[Owned]]:
        """Yield each part when its state is in memory. `tensors_of`: the tensors of a slice to be stored."""
        yield from parts

    def flow(self, device: torch.device, sums: bool) -> Flow | None:
        """The copies of gradients from `device` and parameters to it; None: nothing has to be copied."""
        return None


@dataclass(frozen=True)
class DeviceTier(Tier):
    """No offload: state is on the device. A master of the parameters' dtype shares their memory."""

    apart = False

    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory on the parameters' device."""
        return torch.empty(numel, dtype=dtype, device=device)

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor


@dataclass(frozen=True)
class HostTier(Tier):
    """ZeRO-Offload: state is in host memory and is stepped there."""

    pin_memory: bool = False  # page-locked memory, which CUDA copies faster
    ratio: float = 1.0
    step_early: bool = False
    early_bytes: int | None = None
    delay_after: int | None = None
    apart = True
    kind = "host"

    def __post_init__(self) -> None:
        """Raise ValueError for options that are out of range or exclude each other."""
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio must be from 0 to 1, not {self.ratio!r}")
        if self.delay_after is None:
            return
        if self.delay_after < 0:
            raise ValueError(f"delay_after must be a number of updates, or None, not {self.delay_after!r}")
        if self.step_early or self.ratio != 1:
            reason = (
                "step_early takes the same time" if self.step_early else "ratio leaves state on the device"
            )
            raise ValueError(f"delay_after delays whole updates, and {reason}: use one of the two")

    def locks(self, device: torch.device) -> bool:
        """Whether memory is page-locked for parameters on this device."""
        return self.pin_memory and device.type == "cuda"

    def open(self, rooms: Sequence[int], device: torch.device) -> Tier:
        """Return the tier with an arena, which is page-locked for CUDA if `pin_memory`."""
        arena = Arena(rooms, torch.cuda.cudart() if self.locks(device) else None)
        return OpenHost(**vars(self), arena=arena)

    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate host memory."""
        return torch.empty(numel, dtype=dtype, device=CPU, pin_memory=self.locks(device))

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return a copy on the host, or a CPU tensor itself."""
        return tensor.to(CPU)

    def copiers(self, device: torch.device) -> tuple[Copier, Copier] | None:
        """The copies down and up, which run at once; None if the device's memory is the host's."""
        if device.type in ("cpu", "meta"):
            return None
        return StreamCopier(device), StreamCopier(device)

    def flow(self, device: torch.device, sums: bool) -> Flow | None:
        """Copies on three threads, which start with their first job."""
        copiers = self.copiers(device)
        return None if copiers is None else Flow(self.room, device, copiers, sums)

    def shelf(self, device: torch.device) -> Shelf:
        """The store in host memory; for a model on the CPU, the model's own memory."""
        cudart = torch.cuda.cudart() if self.locks(device) else None
        return Shelf() if device.type == "cpu" else HostShelf(cudart)


@dataclass(frozen=True)
class OpenHost(HostTier):
    """A `HostTier` in a run, whose arena has the rooms that were announced to `open`."""

    arena: Arena = field(kw_only=True)

    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Take a room of the arena, or allocate host memory."""
        room = self.arena.take(numel, dtype)
        return super().room(numel, dtype, device) if room is None else room

    @property
    def lost(self) -> str:  # type: ignore[override]
        """The message about the state, which is freed when the run ends."""
        return GONE if self.arena.closed else ""

    def close(self) -> None:
        """Free the arena."""
        self.arena.close()


@dataclass(frozen=True)
class Waiting:
    """The offload of a run: the tier of optimizer state and the store of parameter slices."""

    tier: Tier
    shelf: Shelf

    @cached_property
    def can_lose(self) -> bool:
        """Whether `lost` may ever be more than an empty string."""
        return self.tier.moves or self.shelf.can_lose

    @property
    def lost(self) -> str:
        """The message about state or parameters that could not be read; "" if there are none."""
        return self.tier.lost or self.shelf.lost

    @property
    def trouble(self) -> str:
        """The reason why no further step can be taken; "" if there is none."""
        tier, shelf = self.tier, self.shelf
        return tier.lost or shelf.lost or tier.failure or shelf.failure

    def close(self) -> None:
        """Close files, buffers and threads."""
        self.tier.close()
        self.shelf.close()
