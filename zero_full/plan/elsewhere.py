"""What stands in, in a plan, for the host's memory and for files of the optimizer's state."""

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
    """Where state waits that is on no device: for a plan, on the meta device, too, and unwatched."""

    watch: Watch = field(kw_only=True)
    planned: torch.device = field(kw_only=True)

    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """No memory."""
        with self.watch.of(None):
            return torch.empty(numel, dtype=dtype, device=META)

    def fetch(self, tensor: Tensor) -> Tensor:
        """A copy, as if it were elsewhere."""
        with self.watch.of(None):
            return tensor.clone()

    def flow(self, device: torch.device, sums: bool) -> Flow | None:
        """Copies as from the device that is planned for, each done at once."""
        if self.planned.type == "cpu":
            return None
        copier = PretendedCopier()
        return Flow(self.room, device, (copier, copier), sums, lambda name: Inline())


@dataclass(frozen=True)
class PretendedFile(PretendedHost):
    """The same for state that waits in a file, which is not there either."""

    part_numel: int | None = None
    # Bytes of each block of each part, in the last step.
    blocks: list[list[int]] = field(default_factory=list)
    kind = BlockTier.kind
    moves = True

    def in_turn(
        self, parts: Sequence[Sequence[Any]], tensors_of: Callable[[Any], list[Tensor]]
    ) -> Generator[Sequence[Any]]:
        """Each part, and what it has in a buffer and in the file behind the step."""
        self.blocks.clear()
        for part in parts:
            yield part
            self.blocks.append([bytes_of_block(_sizes(tensors_of(owned))) for owned in part])

    @property
    def buffers(self) -> int:
        """Two of them, each as large as the largest part that comes into it, beginning with a page."""
        parts = [sum(part) for part in self.blocks]
        return sum(max(turn) + PAGE for turn in (parts[::2], parts[1::2]) if turn)


def _sizes(tensors: Sequence[Tensor]) -> list[int]:
    """Of those that are no windows of the first one."""
    first, *others = tensors
    mine = first.untyped_storage()
    return [
        first.nbytes,
        *(t.nbytes for t in others if identity_of(t.untyped_storage()) != identity_of(mine)),
    ]


class PretendedCopier:
    """Copies nothing."""

    def mark(self) -> None:
        """Nothing is queued."""

    def copy(self, target: Tensor, source: Tensor, after: None) -> None:
        """There are no values."""
