"""Offload tiers: where masters and moments are stored between steps, and where they are stepped.

[Note: tiers] A tier's `allocate` makes masters and moments, and the optimizer steps them there. Before a step
`fetch` copies an averaged gradient to the state. Afterwards the new values go to the slice of the parameters,
wherever it is stored (`param_store.py`). With state on the host (ZeRO-Offload) the device holds
neither masters nor moments; gradients are copied down and parameters up. For an accelerator these copies run
beside other work: `copy_threads`. Most of the state on a disk is in memory only during its own part of a
step, see `load_parts`.

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

from zero_full.offload.arena import LOCKABLE, Arena, page_locker
from zero_full.offload.host_device_copies import Copier, CopyThreads, StreamCopier
from zero_full.offload.param_store import HostParamStore, ParamStore
from zero_full.offload.storage import Storage

Owned = TypeVar("Owned")  # a slice of parameters that is stepped
CPU = torch.device("cpu")
FREED = "the offloaded optimizer state was freed by destroy. Save it before destroy."


class Tier(Storage, ABC):
    """Base of the tiers. See [Note: tiers]."""

    is_offloaded: bool  # whether masters always have their own memory, and never the parameters'
    kind = "optimizer"  # the name of its bytes in reports
    ratio: float = 1.0  # see [Note: part of the state]
    part_numel: int | None = None  # elements that are stepped at a time; None: all
    delay_after: int | None = None  # updates before the first delayed one; None: never delay
    alternates = False  # whether every other step takes the parts in reverse order
    moves = False  # whether state is read and written in every step, and may be `lost`
    copied_numel = 2**24  # elements of offloaded parameters that a step has copies of at a time

    def open(self, sizes: Sequence[int], device: torch.device) -> "Tier":
        """Return the tier of a run, with its memory, files, buffers and threads.

        `sizes`: bytes of each later call of `allocate`, for parameters on `device`.
        """
        return self

    def held(self) -> Sequence[Tensor]:
        """Return the tier's own host buffers, without the memory that `allocate` returned."""
        return []

    def param_store(self, device: torch.device) -> ParamStore:
        """Return the store of parameter slices in this tier, for a model on `device`."""
        return ParamStore()

    @abstractmethod
    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate uninitialized memory for state of parameters on `device`."""

    @abstractmethod
    def fetch(self, tensor: Tensor) -> Tensor:
        """Return a device tensor on the device where state is stepped: itself, or a copy."""

    def load_parts(
        self, parts: Sequence[Sequence[Owned]], tensors_of: Callable[[Owned], list[Tensor]]
    ) -> Generator[Sequence[Owned]]:
        """Yield each part when its state is in memory. `tensors_of` lists the tensors of a slice to store."""
        yield from parts

    def copy_threads(self, device: torch.device, sums: bool) -> CopyThreads | None:
        """Return the copies of gradients from `device` and parameters to it; None: nothing to copy."""
        return None


@dataclass(frozen=True)
class DeviceTier(Tier):
    """No offload: state is on the device. A master of the parameters' dtype shares their memory."""

    is_offloaded = False

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory on the parameters' device."""
        return torch.empty(numel, dtype=dtype, device=device)

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor


@dataclass(frozen=True)
class HostTier(Tier):
    """ZeRO-Offload: optimizer state is in host memory, and the CPU updates it there."""

    pin_memory: bool = False  # page-locked memory, which CUDA copies faster
    ratio: float = 1.0
    delay_after: int | None = None
    is_offloaded = True
    kind = "host"

    def __post_init__(self) -> None:
        """Raise ValueError for options that are out of range or exclude each other."""
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio must be from 0 to 1, not {self.ratio!r}")
        if self.delay_after is None:
            return
        if self.delay_after < 0:
            raise ValueError(f"delay_after must be a number of updates, or None, not {self.delay_after!r}")
        if self.ratio != 1:
            raise ValueError(
                "delay_after delays whole updates, but ratio leaves state on the device. Use one of the two."
            )

    def locks(self, device: torch.device) -> bool:
        """Return whether memory is page-locked for parameters on this device."""
        return self.pin_memory and device.type == LOCKABLE

    def open(self, sizes: Sequence[int], device: torch.device) -> Tier:
        """Return the tier with an arena, which is page-locked for CUDA if `pin_memory`."""
        arena = Arena(sizes, page_locker() if self.locks(device) else None)
        return OpenHostTier(**vars(self), arena=arena)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate host memory."""
        return torch.empty(numel, dtype=dtype, device=CPU, pin_memory=self.locks(device))

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return a copy on the host, or a CPU tensor itself."""
        return tensor.to(CPU)

    def copiers(self, device: torch.device) -> tuple[Copier, Copier] | None:
        """Return the copiers to the host and to the device; None if the model is in host memory."""
        if device.type in ("cpu", "meta"):
            return None
        return StreamCopier(device), StreamCopier(device)

    def copy_threads(self, device: torch.device, sums: bool) -> CopyThreads | None:
        """Return copies on three threads, which start with their first job."""
        copiers = self.copiers(device)
        return None if copiers is None else CopyThreads(self.allocate, device, copiers, sums)

    def param_store(self, device: torch.device) -> ParamStore:
        """Return the store in host memory; for a model on the CPU, the model's own memory."""
        locker = page_locker() if self.locks(device) else None
        return ParamStore() if device.type == "cpu" else HostParamStore(locker)


@dataclass(frozen=True)
class OpenHostTier(HostTier):
    """A `HostTier` in a run. Its arena has the regions that were announced to `open`."""

    arena: Arena = field(kw_only=True)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Take a region of the arena, or allocate host memory."""
        region = self.arena.take(numel, dtype)
        return super().allocate(numel, dtype, device) if region is None else region

    @property
    def lost(self) -> str:  # type: ignore[override]
        """The error message after `close`, which freed the state; "" before."""
        return FREED if self.arena.closed else ""

    def close(self) -> None:
        """Free the arena."""
        self.arena.close()


@dataclass(frozen=True)
class Offload:
    """The offload of a run: the tier of optimizer state and the store of parameter slices."""

    tier: Tier
    param_store: ParamStore

    @cached_property
    def can_fail(self) -> bool:
        """Whether reads may fail, because state or parameters are in files. `lost` is their error message."""
        return self.tier.moves or self.param_store.can_fail

    @property
    def lost(self) -> str:
        """The message about state or parameters that could not be read, or ""."""
        return self.tier.lost or self.param_store.lost

    @property
    def error(self) -> str:
        """The reason why no further step can be taken, or ""."""
        tier, param_store = self.tier, self.param_store
        return tier.lost or param_store.lost or tier.write_error or param_store.write_error

    def close(self) -> None:
        """Close files, buffers and threads."""
        self.tier.close()
        self.param_store.close()
