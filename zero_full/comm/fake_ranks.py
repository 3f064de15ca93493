"""Fake process groups: one process plays one rank of a group of any size, and its collectives move no data.

A plan runs the engine itself on tensors without values (the meta device). A collective of a fake group gives
the result that it would have if all ranks held the same; its bytes are counted as usual, see
`communicator.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zero_full.comm.transport import BackendTransport


class FakeGroup(dist.ProcessGroup):
    """A fake process group as seen from rank `global_rank`. It has no connections."""

    def __init__(self, ranks: Sequence[int], global_rank: int) -> None:
        super().__init__(list(ranks).index(global_rank), len(ranks))  # type: ignore[call-arg]  # no store is fine
        self.ranks, self.global_rank = list(ranks), global_rank


class FakeTransport(BackendTransport):
    """The transport of a fake group. Only `sum_numbers` and `gather_objects` have a result."""

    name = "fake"

    def do_nothing(self, *given: Any, **named: Any) -> None:
        """Do nothing: tensors of a plan have no values."""

    reduce_scatter = all_gather = all_reduce = all_to_all = broadcast = do_nothing

    def sum_numbers(self, numbers: Tensor) -> None:
        """Multiply the numbers by the number of ranks: they have values, equal on all ranks."""
        numbers.mul_(self.size)

    def gather_objects(self, mine: Any) -> list[Any]:
        """Return this rank's object once for each rank."""
        return [mine] * self.size
