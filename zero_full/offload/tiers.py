"""Tiers: where masters and moments wait between steps, and where they are stepped.

[Note: tiers] Owned state is made in a tier's `room`, and the optimizer steps it there. Before a step
`fetch` brings an averaged gradient to where the state is; afterwards the new values go to the parameters'
slice, wherever that waits (`param_store.py`). With state on the host (ZeRO-Offload) the device holds neither
masters nor moments, and what travels are gradients one way and parameters the other. Where the host's memory
is not the device's they travel beside the work: `flow`. State that waits farther away comes nearer for its
own part of a step only: `in_turn`.

A tier is a choice that a run makes. `open` makes of it what one rank needs in the run.

[Note: part of the state] With a `ratio` below 1 only so much of the state waits elsewhere, by elements: that
of the parameters whose gradients come first in backward. What comes last, the first layers, stays on the
device, where its step need not wait for a copy.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from zero_full.offload.arena import Arena
from zero_full.offload.copies import Copier, StreamCopier
from zero_full.offload.host_device_copies import Flow
from zero_full.offload.param_store import HostShelf, Shelf

Owned = TypeVar("Owned")  # what is stepped: a slice of parameters
CPU = torch.device("cpu")
GONE = "the optimizer's state has waited off the device, and destroy has let go of it: save before destroy"


class Tier(ABC):
    """See [Note: tiers]."""

    apart: bool  # whether masters never lie in the parameters' own memory
    kind = "optimizer"  # under which name its bytes are told
    ratio: float = 1.0  # see [Note: part of the state]
    part_numel: int | None = None  # elements that are stepped at a time; None: as many as there are
    step_early = False  # whether slices are stepped beside backward, on a guess: [Note: early steps]
    early_bytes: int | None = None  # that this may cost; None: twice what slices have there
    delay_after: int | None = None  # updates that end with their step, None: all: [Note: delayed updates]
    moves = False  # whether state lies elsewhere between steps than in them, and may get `lost` on the way
    copied_numel = 2**24  # elements of parameters that wait there, of which a step has copies at a time
    place = ""  # which disk of this host it is on, while it is open
    advice = ""  # in words, what whoever has chosen it should know about it
    failure = ""  # in words, why no further step can be taken
    lost = ""  # in words, what of the state is gone

    def open(self, rooms: Sequence[int], device: torch.device) -> "Tier":
        """The same with what it needs in a run: memory, files, buffers and threads.

        `rooms`: the bytes of each `room` that will be asked for, by parameters on `device`.
        """
        return self

    def close(self) -> None:  # noqa: B027
        """Let go of all that."""

    def held(self) -> Sequence[Tensor]:
        """Host memory that it keeps beside the rooms."""
        return []

    def moved(self) -> dict[str, int]:
        """Bytes moved so far between memory and what is farther away, by which way."""
        return {}

    def shelf(self, device: torch.device) -> Shelf:
        """What keeps slices of parameters of `device` there. They are not stepped there."""
        return Shelf()

    def refuse_too_little(self, need: int) -> None:  # noqa: B027
        """OSError if there is no room for so many bytes, of all ranks of this host in the same `place`."""

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

    pin_memory: bool = False  # masters in page-locked memory, which CUDA copies faster; else no difference
    ratio: float = 1.0
    step_early: bool = False
    early_bytes: int | None = None
    delay_after: int | None = None
    apart = True
    kind = "host"

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be meant."""
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
        """With an arena, page-locked if that was asked for and makes a difference."""
        arena = Arena(rooms, torch.cuda.cudart() if self.locks(device) else None)
        return OpenHost(**vars(self), arena=arena)

    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Host memory."""
        return torch.empty(numel, dtype=dtype, device=CPU, pin_memory=self.locks(device))

    def fetch(self, tensor: Tensor) -> Tensor:
        """A copy on the host; on a CPU the tensor itself."""
        return tensor.to(CPU)

    def copiers(self, device: torch.device) -> tuple[Copier, Copier] | None:
        """Down and up, which an accelerator does at once; None: the host's memory is the device's."""
        if device.type in ("cpu", "meta"):
            return None
        return StreamCopier(device), StreamCopier(device)

    def flow(self, device: torch.device, sums: bool) -> Flow | None:
        """On three threads, which start when there is something to do."""
        copiers = self.copiers(device)
        return None if copiers is None else Flow(self.room, device, copiers, sums)

    def shelf(self, device: torch.device) -> Shelf:
        """Host memory; of a model on the CPU, its own."""
        cudart = torch.cuda.cudart() if self.locks(device) else None
        return Shelf() if device.type == "cpu" else HostShelf(cudart)


@dataclass(frozen=True)
class OpenHost(HostTier):
    """A `HostTier` in a run: what was foreseen is in the arena, and anything else beside it."""

    arena: Arena = field(kw_only=True)

    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Host memory."""
        room = self.arena.take(numel, dtype)
        return super().room(numel, dtype, device) if room is None else room

    @property
    def lost(self) -> str:  # type: ignore[override]
        """All of it, after the end."""
        return GONE if self.arena.closed else ""

    def close(self) -> None:
        """Nothing is page-locked any more."""
        self.arena.close()


@dataclass(frozen=True)
class Waiting:
    """All that waits elsewhere in a run: state in a tier, slices of parameters on a shelf."""

    tier: Tier
    shelf: Shelf

    @property
    def can_lose(self) -> bool:
        """Whether `lost` may ever say something."""
        return self.tier.moves or self.shelf.can_lose

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
