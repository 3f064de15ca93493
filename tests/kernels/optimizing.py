"""The lists of tensors that the optimizers' operators work on, in the middle of an optimization."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.kernels.cases import BF16, FP32, normal

# Where arrays start, in elements behind an aligned address: packs fit, fit after five elements, or never do.
ALIGNED, TOGETHER, APART = (0, 0, 0, 0, 0), (3, 3, 3, 3, 3), (0, 1, 2, 3, 1)


class Lists(NamedTuple):
    """In the order of the operators' arguments."""

    masters: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    copies: list[Tensor]

    def map(self, change: Callable[[Tensor], Tensor]) -> "Lists":
        """All tensors changed, but the steps, which have no elements to walk over."""
        changed = ([change(t) if t.dim() else t.clone() for t in each] for each in self)
        return Lists(*changed)

    def clone(self) -> "Lists":
        """Copies that begin as far behind an aligned address as these."""
        return self.map(lambda t: moved(t, t.storage_offset()))

    def written(self) -> list[Tensor]:
        """What an update changes."""
        return [*self.masters, *self.exp_avgs, *self.exp_avg_sqs, *self.copies]


def moved(tensor: Tensor, offset: int) -> Tensor:
    """A copy that begins so many elements behind an aligned address."""
    return torch.empty(tensor.numel() + offset, dtype=tensor.dtype)[offset:].copy_(tensor)


def lists(
    sizes: Sequence[int],
    offsets: Sequence[int] = ALIGNED,
    grad: torch.dtype = FP32,
    master: torch.dtype = FP32,
    moments: torch.dtype = FP32,
    copy: torch.dtype | None = BF16,
) -> Lists:
    """One tensor of each kind for each size; somebody has written to every third element of the copies."""
    dtypes, scales = (master, grad, moments, moments), (1, 1, 0.1, 0.1)
    masters, grads, exp_avgs, exp_avg_sqs = (
        [normal(n, dtype, 4 * i + k, offset, scale) for i, n in enumerate(sizes)]
        for k, (dtype, offset, scale) in enumerate(zip(dtypes, offsets, scales, strict=False))
    )
    steps = [torch.tensor(float(i % 7 + 1)) for i in range(len(sizes))]
    copies = [moved(each.to(copy), offsets[4]) for each in masters] if copy else []
    for each in copies:
        each[::3] += 1
    return Lists(masters, grads, exp_avgs, [t.abs_() for t in exp_avg_sqs], steps, copies)
