"""How bytes get from rank to rank: one strategy per backend, chosen once per process group.

`tests/bench/collectives.py` has the measurements behind the choice. On NCCL and other backends the
native collectives are the best there is. gloo's are not: its reduce-scatter puts the bytes of an
all-reduce on the wire and its all-gather takes up to twice as long as the same bytes sent directly, so on
gloo ranks send each other exactly the slices they need, and sum them in the order of the ranks: the same
bits on every run. Ranks on one host need no wire at all, see `shared.py`.

A flat buffer is `whole`; rank r's slice is the r-th of `size` equal parts. All calls block (on a GPU: the
current stream).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zero_full._compat import all_gather_single, reduce_scatter_single

MESSAGE = 2**20  # elements sent at a time: large enough for speed, small enough that memory is reused
CACHED = 2**17  # elements summed at a time, so that a sum and its division meet in the cache


@dataclass(frozen=True)
class Splits:
    """How many elements this rank sends to each rank and receives from each."""

    sent: Sequence[int]
    received: Sequence[int]
    most: int  # that any rank sends to another one: all ranks know it, so that they take as many turns

    @classmethod
    def even(cls, numel: int, ranks: int) -> "Splits":
        """As many elements for each."""
        part = numel // ranks
        return cls([part] * ranks, [part] * ranks, part)


class Transport(Protocol):
    """What each strategy can do."""

    name: str
    call: tuple[str, ...]  # the collective that comes next, in words that are the same on every rank

    def reduce_scatter(self, whole: Tensor, out: Tensor, divisor: float) -> None:
        """Make `out`, which may lie in `whole`, the sum over all ranks of this rank's slice, divided."""

    def all_gather(self, whole: Tensor) -> None:
        """Fill in the slices of the other ranks; this rank's is in place already."""

    def all_reduce(self, whole: Tensor, divisor: float) -> None:
        """Make `whole` the sum over all ranks, divided; all ranks get the same bits."""

    def sum_numbers(self, numbers: Tensor) -> None:
        """Make `numbers`, of any size, their sum over all ranks."""

    def all_to_all(self, sent: Tensor, received: Tensor, splits: Splits) -> None:
        """Rank r gets the r-th part of `sent`; the r-th part of `received` is what it had for this rank."""

    def broadcast(self, tensor: Tensor) -> None:
        """The first rank's values become everyone's."""

    def gather_objects(self, mine: Any) -> list[Any]:
        """Everyone's small Python object, by rank."""

    def awaited_by(self) -> list[int]:
        """The ranks that wait for this one in a collective to which it has not come, as far as it can see."""

    def check(self) -> None:
        """Raise RuntimeError if a collective has failed since it was queued."""

    def close(self) -> None:
        """End what runs for this transport. Raises as `check` does."""


def own_slice(whole: Tensor, rank: int, size: int) -> Tensor:
    """Rank `rank`'s part of a flat buffer."""
    shard = whole.numel() // size
    return whole[rank * shard : (rank + 1) * shard]


def add_up(pieces: Sequence[Tensor], out: Tensor, divisor: float) -> None:
    """The sum of `pieces`, first to last, over `divisor`, in fp32 or the wider of the types given.

    `out` may be one of the pieces. What it then still has to give must not be written over, so more than
    two are summed beside it.
    """
    wide = torch.promote_types(torch.promote_types(pieces[0].dtype, out.dtype), torch.float32)
    for low in range(0, out.numel(), CACHED):
        first, second, *others = (piece[low : low + CACHED] for piece in pieces)
        target = out[low : low + CACHED]
        if out.dtype != wide:
            total = first.to(wide, copy=True).add_(second)
        elif first.dtype != out.dtype:
            total = target.copy_(first).add_(second)
        else:
            total = torch.add(first, second, out=None if others else target)
        for piece in others:
            total.add_(piece)
        if divisor != 1:
            total.div_(divisor)
        if total.data_ptr() != target.data_ptr():
            target.copy_(total)


class OverGroup:
    """What every strategy leaves to the backend."""

    call: tuple[str, ...] = ()

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.others = [rank for rank in range(self.size) if rank != self.rank]

    def sum_numbers(self, numbers: Tensor) -> None:
        """One all-reduce: for a few numbers it takes fewer turns than anything cleverer."""
        dist.all_reduce(numbers, group=self.group)

    def all_to_all(self, sent: Tensor, received: Tensor, splits: Splits) -> None:
        """One call."""
        dist.all_to_all_single(received, sent, list(splits.received), list(splits.sent), group=self.group)

    def broadcast(self, tensor: Tensor) -> None:
        """One call."""
        dist.broadcast(tensor, dist.get_global_rank(self.group, 0), self.group)

    def gather_objects(self, mine: Any) -> list[Any]:
        """Pickled, twice the way that tensors take."""
        answers = [mine] * self.size
        dist.all_gather_object(answers, mine, group=self.group)
        return answers

    def awaited_by(self) -> list[int]:
        """None that it can see."""
        return []

    def check(self) -> None:
        """Nothing: a call that fails raises, or (NCCL's) ends the process."""

    def close(self) -> None:
        """Nothing runs."""


class Native(OverGroup):
    """The backend's own collectives."""

    name = "native"

    def reduce_scatter(self, whole: Tensor, out: Tensor, divisor: float) -> None:
        """One reduce-scatter, of numbers that are divided first where their sum could overflow."""
        whole, divisor = _in_range(whole, divisor)
        result = out if out.dtype == whole.dtype else whole.new_empty(out.numel())
        reduce_scatter_single(result, whole, group=self.group)
        if result is not out:
            out.copy_(result)
        if divisor != 1:
            out.div_(divisor)

    def all_gather(self, whole: Tensor) -> None:
        """One all-gather, in place."""
        all_gather_single(whole, own_slice(whole, self.rank, self.size), group=self.group)

    def all_reduce(self, whole: Tensor, divisor: float) -> None:
        """One all-reduce, of numbers that are divided first where their sum could overflow."""
        whole, divisor = _in_range(whole, divisor)
        dist.all_reduce(whole, group=self.group)
        if divisor != 1:
            whole.div_(divisor)


def _in_range(whole: Tensor, divisor: float) -> tuple[Tensor, float]:
    """fp16 divided, as its sum over the ranks may be above 65,504; bf16 has the range of fp32."""
    if divisor != 1 and whole.dtype == torch.float16:
        return whole.div_(divisor), 1
    return whole, divisor


class Exchange(OverGroup):
    """For gloo: every rank sends every other rank exactly what that one needs."""

    name = "exchange"

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.address = {rank: dist.get_global_rank(group, rank) for rank in self.others}

    def _swap(self, send: dict[int, Tensor], receive: dict[int, Tensor]) -> None:
        calls = [(dist.irecv, receive), (dist.isend, send)]
        ops = [
            dist.P2POp(call, tensors[rank], self.address[rank], self.group)
            for call, tensors in calls
            for rank in self.others
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def reduce_scatter(self, whole: Tensor, out: Tensor, divisor: float) -> None:
        """Exchange slices, and sum locally."""
        slices = [own_slice(whole, rank, self.size) for rank in range(self.size)]
        for low in range(0, out.numel(), MESSAGE):
            pieces = [s[low : low + MESSAGE] for s in slices]
            received = {rank: torch.empty_like(pieces[self.rank]) for rank in self.others}
            self._swap({rank: pieces[rank] for rank in self.others}, received)
            received[self.rank] = pieces[self.rank]
            add_up([received[rank] for rank in range(self.size)], out[low : low + MESSAGE], divisor)

    def all_gather(self, whole: Tensor) -> None:
        """Send this rank's slice to all others, and receive theirs where they belong."""
        mine = own_slice(whole, self.rank, self.size)
        if mine.numel():
            theirs = {rank: own_slice(whole, rank, self.size) for rank in self.others}
            self._swap(dict.fromkeys(self.others, mine), theirs)

    def all_reduce(self, whole: Tensor, divisor: float) -> None:
        """A reduce-scatter and an all-gather."""
        self.reduce_scatter(whole, own_slice(whole, self.rank, self.size), divisor)
        self.all_gather(whole)
