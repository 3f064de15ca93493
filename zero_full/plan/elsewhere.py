"""Simulated offload tiers for a plan: host memory, and the spill file of the optimizer state."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_full._compat import identity_of
from zero_full.comm.lane import Inline
from zero_full.kernels.files import PAGE
from zero_full.offload import BlockTier, Flow, HostTier
from zero_full.offload.nvme_state import bytes_of_block
from zero_full.plan.watch import Watch

META = torch.device("meta")


@dataclass(frozen=True)
class PretendedHost(HostTier):
    """Simulated host tier: its tensors are on the meta device and not counted as device memory."""

    watch: Watch = field(kw_only=True)
    planned: torch.device = field(kw_only=True)

    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make a tensor without memory."""
        with self.watch.of(None):
            return torch.empty(numel, dtype=dtype, device=META)

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return a copy, as a host-to-device copy would."""
        with self.watch.of(None):
            return tensor.clone()

    def flow(self, device: torch.device, sums: bool) -> Flow | None:
        """Return the host-device copies of the planned device, which complete immediately."""
        if self.planned.type == "cpu":
            return None
        copier = PretendedCopier()
        return Flow(self.room, device, (copier, copier), sums, lambda name: Inline())


@dataclass(frozen=True)
class PretendedFile(PretendedHost):
    """Simulated NVMe tier: optimizer state in a spill file."""

    part_numel: int | None = None
    # Bytes of each block of each part in the last step.
    blocks: list[list[int]] = field(default_factory=list)
    kind = BlockTier.kind
    moves = True

    def in_turn(
        self, parts: Sequence[Sequence[Any]], tensors_of: Callable[[Any], list[Tensor]]
    ) -> Generator[Sequence[Any]]:
        """Yield each part, and record the sizes of its blocks in the file after the step."""
        self.blocks.clear()
        for part in parts:
            yield part
            self.blocks.append([bytes_of_block(_sizes(tensors_of(group))) for group in part])

    @property
    def buffers(self) -> int:
        """Bytes of the two staging buffers: each has the size of its largest part, plus a page."""
        parts = [sum(part) for part in self.blocks]
        return sum(max(turn) + PAGE for turn in (parts[::2], parts[1::2]) if turn)


def _sizes(tensors: Sequence[Tensor]) -> list[int]:
    """Return the bytes of the first tensor, and of the others unless they are views of it."""
    first, *others = tensors
    mine = first.untyped_storage()
    return [
        first.nbytes,
        *(t.nbytes for t in others if identity_of(t.untyped_storage()) != identity_of(mine)),
    ]


class PretendedCopier:
    """Simulated copier, which copies nothing."""

    def mark(self) -> None:
        """Do nothing: no copy is queued."""

    def copy(self, target: Tensor, source: Tensor, after: None) -> None:
        """Do nothing: the tensors have no values."""
