"""Ranks that are not there: groups of any size on one process, whose collectives move nothing.

A plan runs the runtime itself on tensors without values, as one rank of many. Whoever asks such a group for
a collective gets what he would have if every rank had what he has; the bytes are counted as ever, see
`communicator.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zero_full.comm.transport import Splits


class PretendedGroup(dist.ProcessGroup):
    """A group of ranks, seen from one of them. No process stands behind it."""

    def __init__(self, ranks: Sequence[int], me: int) -> None:
        super().__init__(list(ranks).index(me), len(ranks))  # type: ignore[call-arg]  # no store is fine
        self.ranks, self.me = list(ranks), me


class Pretence:
    """The transport of such a group."""

    name = "pretence"
    call: tuple[str, ...] = ()

    def __init__(self, group: PretendedGroup) -> None:
        self.size = group.size()

    def reduce_scatter(self, whole: Tensor, out: Tensor, divisor: float) -> None:
        """`out` has no values, before and after."""

    def all_gather(self, whole: Tensor) -> None:
        """As above."""

    def all_reduce(self, whole: Tensor, divisor: float) -> None:
        """As above."""

    def all_to_all(self, sent: Tensor, received: Tensor, splits: Splits) -> None:
        """As above."""

    def broadcast(self, tensor: Tensor) -> None:
        """As above."""

    def sum_numbers(self, numbers: Tensor) -> None:
        """These have values: everyone has the same."""
        numbers.mul_(self.size)

    def gather_objects(self, mine: Any) -> list[Any]:
        """As above."""
        return [mine] * self.size

    def awaited_by(self) -> list[int]:
        """None."""
        return []

    def check(self) -> None:
        """Nothing fails."""

    def close(self) -> None:
        """Nothing runs."""
