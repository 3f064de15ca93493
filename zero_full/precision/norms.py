"""The norm of all gradients, which is also the overflow check.

Every rank squares what it owns; one all-reduce later every rank knows the sum. A sum that is inf or NaN
says that somebody has a gradient that is: so one number, one all-reduce and one read by the host answer
both questions, and all ranks get the same answer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zero_full.comm.communicator import Communicator
from zero_full.kernels.load import compiled_for, operators

COMPILED = (torch.float32, torch.bfloat16, torch.float16)


class Slices(NamedTuple):
    """Gradients this rank owns, and whether they count (once, in a group where several ranks hold them)."""

    tensors: list[Tensor]
    counts: bool
    expert: bool


def squared_norm(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of squares in fp64, which no finite number of 32 bits can make overflow."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    for dtype, alike in kinds.items():
        if dtype in COMPILED and compiled_for(device):
            in_order = [tensor.contiguous() for tensor in alike]
            total = total + operators().unscale_norm_check(in_order, 1.0)[0]
        else:
            total = total + _by_torch(alike, device)
    return total


def _by_torch(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The same; on a CPU in fp32 first, which is twenty times faster, and whose squares rarely overflow."""
    if device.type == "cpu":  # elsewhere reading the answer would stall the device
        wide = (t.float() if t.dtype.itemsize < 4 else t for t in tensors)
        quick = torch.stack([torch.linalg.vector_norm(t).double() for t in wide]).square().sum()
        if quick.isfinite():
            return quick
    exact = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors]
    return torch.stack(exact).square().sum()


@dataclass(frozen=True)
class GradientNorm:
    """Slices are spread over `shard`, experts over two groups of their own, layers over `model`."""

    shard: Communicator
    expert_data: Communicator | None = None
    expert: Communicator | None = None
    model: Communicator | None = None

    def __call__(self, slices: Sequence[Slices]) -> float:
        """The global norm, on every rank; inf or NaN if any gradient anywhere is."""
        total = self._over([self.shard], [s for s in slices if not s.expert])
        if self.expert_data is not None and self.expert is not None:
            total += self._over([self.expert_data, self.expert], [s for s in slices if s.expert])
        if self.model is not None:
            self.model.sum_numbers(total, "squared gradient norm")
        squared, poison = total.tolist()
        return float("nan") if poison else float(squared) ** 0.5

    def _over(self, groups: Sequence[Communicator], slices: Sequence[Slices]) -> Tensor:
        """(sum of the squares that count, how many that do not count are not finite)."""
        device = self.shard.device
        counting = squared_norm((t for s in slices if s.counts for t in s.tensors), device)
        others = squared_norm((t for s in slices if not s.counts for t in s.tensors), device)
        numbers = torch.stack([counting, (~others.isfinite()).double()])
        for group in groups:
            group.sum_numbers(numbers, "squared gradient norm")
        return numbers
