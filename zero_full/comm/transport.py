"""Transports: one implementation of the collectives per backend, chosen once per process group.

`tests/bench/collectives.py` has the measurements behind the choice. On NCCL and other backends the native
collectives are the fastest. gloo's are not: its reduce-scatter puts the bytes of an all-reduce on the wire,
and its all-gather takes up to twice as long as the same bytes sent directly. So on gloo ranks send each other
exactly the slices they need, and sum them in rank order, which gives the same bits on every run. Ranks on one
host use shared memory instead of messages, see `shared_memory.py`.

`whole` is a flat buffer; rank r's slice is the r-th of `size` equal parts. All calls block (on a GPU: the
current stream). Every transport has the collectives of `Communicator`. In `reduce_scatter`, `out` may lie in
`whole`. After `all_reduce` and `sum_numbers` all ranks have the same bits. `call` is set before each
collective: ranks in shared memory compare it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_full._compat import all_gather_single, reduce_scatter_single
from zero_full.kernels import reference
from zero_full.kernels.load import compiled_for, operators
from zero_full.kernels.ops import DTYPES

Call = tuple[str, str, int, torch.dtype]  # a collective: kind, what it is for, elements and their type
NO_CALL: Call = ("a barrier", "all ranks", 0, torch.float32)  # where no collective was named
MESSAGE = 2**19  # elements per message of a reduce-scatter: large enough for speed
ROOM = 2**20  # elements received at a time from all other ranks: small enough that memory is reused
TAG = 2**20 + 1  # of messages: on a group that user code uses, too, its messages have others (0 by default)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Splits:
    """The numbers of elements that this rank sends to each rank and receives from each."""

    sent: Sequence[int]
    received: Sequence[int]
    most: int  # elements that any rank sends to another; equal on all ranks, so they pass as many pieces

    @classmethod
    def even(cls, numel: int, ranks: int) -> "Splits":
        """Split `numel` elements into equal parts, one for each rank."""
        part = numel // ranks
        return cls([part] * ranks, [part] * ranks, part)


def describe_call(call: Call) -> str:
    """Return the text for a collective in errors. It is equal on every rank that makes the call."""
    kind, what, numel, dtype = call
    return f"{kind} of {what}: {numel} x {str(dtype).removeprefix('torch.')}"


def own_slice(whole: Tensor, rank: int, size: int) -> Tensor:
    """Return the part of a flat buffer that belongs to `rank`."""
    shard = whole.numel() // size
    return whole[rank * shard : (rank + 1) * shard]


def add_up(pieces: Sequence[Tensor], out: Tensor, divisor: float) -> None:
    """Sum `pieces`, first to last, into `out`, and divide: in fp32 or the widest of the types given.

    `out` may be one of the pieces. The compiled operator and the reference give the same bits.
    """
    is_compiled = out.dtype in DTYPES and pieces[0].dtype in DTYPES and compiled_for(CPU)
    by = operators(CPU) if is_compiled else reference
    by.sum_and_divide(pieces, out, divisor)


class BackendTransport:
    """Collectives that every transport leaves to the backend."""

    call = NO_CALL

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.others = [rank for rank in range(self.size) if rank != self.rank]

    def sum_numbers(self, numbers: Tensor) -> None:
        """Run the backend's all-reduce, which takes the fewest messages for a few numbers."""
        dist.all_reduce(numbers, group=self.group)

    def all_to_all(self, sent: Tensor, received: Tensor, splits: Splits) -> None:
        """Run the backend's all-to-all."""
        dist.all_to_all_single(received, sent, list(splits.received), list(splits.sent), group=self.group)

    def broadcast(self, tensor: Tensor) -> None:
        """Run the backend's broadcast."""
        dist.broadcast(tensor, dist.get_global_rank(self.group, 0), self.group)

    def gather_objects(self, mine: Any) -> list[Any]:
        """Gather pickled objects in two collectives: their sizes, then their bytes."""
        answers = [mine] * self.size
        dist.all_gather_object(answers, mine, group=self.group)
        return answers

    def awaited_by(self) -> list[int]:
        """Return no ranks: a backend does not show who waits."""
        return []


class Native(BackendTransport):
    """The backend's own collectives."""

    name = "native"

    def reduce_scatter(self, whole: Tensor, out: Tensor, divisor: float) -> None:
        """Run the backend's reduce-scatter. fp16 is divided first, so that sums do not overflow."""
        whole, divisor = _divide_fp16_first(whole, divisor)
        result = out if out.dtype == whole.dtype else whole.new_empty(out.numel())
        reduce_scatter_single(result, whole, group=self.group)
        if result is not out:
            out.copy_(result)
        if divisor != 1:
            out.div_(divisor)

    def all_gather(self, whole: Tensor) -> None:
        """Run the backend's all-gather, in place."""
        all_gather_single(whole, own_slice(whole, self.rank, self.size), group=self.group)

    def all_reduce(self, whole: Tensor, divisor: float) -> None:
        """Run the backend's all-reduce. fp16 is divided first, so that sums do not overflow."""
        whole, divisor = _divide_fp16_first(whole, divisor)
        dist.all_reduce(whole, group=self.group)
        if divisor != 1:
            whole.div_(divisor)


def _divide_fp16_first(whole: Tensor, divisor: float) -> tuple[Tensor, float]:
    """Divide fp16 before the sum, which may exceed 65,504. Returns the tensor and the divisor left."""
    if divisor != 1 and whole.dtype == torch.float16:
        return whole.div_(divisor), 1
    return whole, divisor


class Exchange(BackendTransport):
    """Point-to-point messages, for gloo: each rank sends every other rank exactly the slice it needs."""

    name = "exchange"

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        # Memory for two received pieces of a reduce-scatter, at most 2 * ROOM elements. It is kept: new pages
        # in each call would cost as much as the sums.
        self.room = torch.empty(0, dtype=torch.uint8)

    def _post(self, send: dict[int, Tensor], receive: dict[int, Tensor]) -> list[dist.Work]:
        """Begin to receive from and to send to all other ranks.

        By the group's methods: the checks of `dist.isend` take longer than these.
        """
        works = [self.group.recv([receive[rank]], rank, TAG) for rank in self.others]
        works += [self.group.send([send[rank]], rank, TAG) for rank in self.others]
        return works

    def reduce_scatter(self, whole: Tensor, out: Tensor, divisor: float) -> None:
        """Exchange slices, and sum them in rank order. The next piece is on the wire while one is summed."""
        slices = [own_slice(whole, rank, self.size) for rank in range(self.size)]
        piece = min(MESSAGE, max(1, ROOM // len(self.others)), max(1, out.numel()))
        begun: list[tuple[list[Tensor], Tensor, list[dist.Work]]] = []  # the one or two pieces on the wire
        room = self._room(piece, whole)
        for low in range(0, out.numel(), piece):
            parts = [each[low : low + piece] for each in slices]
            numel, sent = parts[self.rank].numel(), {rank: parts[rank] for rank in self.others}
            memory = room[low // piece % 2]  # two pieces use it in turns
            received = {rank: memory[place, :numel] for place, rank in enumerate(self.others)}
            works = self._post(sent, received)
            received[self.rank] = parts[self.rank]
            begun.append(([received[rank] for rank in range(self.size)], out[low : low + piece], works))
            if len(begun) == 2:
                _add_up_received(*begun.pop(0), divisor)
        for last in begun:
            _add_up_received(*last, divisor)

    def _room(self, piece: int, like: Tensor) -> Tensor:
        """Return memory for two pieces of this many elements from each other rank."""
        shape = 2, len(self.others), piece
        needed = prod(shape) * like.element_size()
        if self.room.numel() < needed:
            self.room = torch.empty(needed, dtype=torch.uint8)
        return self.room[:needed].view(like.dtype).view(shape)

    def begin_all_gather(self, whole: Tensor) -> list[dist.Work]:
        """Begin to send this rank's slice to all others and to receive theirs in place."""
        mine = own_slice(whole, self.rank, self.size)
        if not mine.numel():
            return []
        theirs = {rank: own_slice(whole, rank, self.size) for rank in self.others}
        return self._post(dict.fromkeys(self.others, mine), theirs)

    def all_gather(self, whole: Tensor) -> None:
        """Send this rank's slice to all others, and receive theirs in place."""
        for work in self.begin_all_gather(whole):
            work.wait()

    def all_reduce(self, whole: Tensor, divisor: float) -> None:
        """Run a reduce-scatter, then an all-gather."""
        self.reduce_scatter(whole, own_slice(whole, self.rank, self.size), divisor)
        self.all_gather(whole)


def _add_up_received(pieces: list[Tensor], out: Tensor, works: list[dist.Work], divisor: float) -> None:
    """Wait for the messages of a piece, then sum."""
    for work in works:
        work.wait()
    add_up(pieces, out, divisor)
