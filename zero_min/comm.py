"""Ranks, and how they talk: from one to one, or all at once.

`Comm` is what every stage is written against. It has two backends:

* `ThreadComm` (`thread_comm.py`): the ranks are threads of this process. A world of four starts in
  milliseconds, closures and notebook classes included, and a mistake names who waits where.
* `DistComm` (`dist_comm.py`): `torch.distributed`, so the same training code runs under torchrun
  with gloo or NCCL.

A `Comm` is always passed in, never global. Each collective writes the bytes this rank sends into
`comm.ledger`; N is the world size and n the bytes of the whole tensor.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zero_min.ledger import Ledger

OUR_FILES = [str(Path(__file__).with_name(f"{kind}comm.py")) for kind in ("", "thread_", "dist_")]


class WorldError(RuntimeError):
    """A world of ranks cannot go on; the message names the rank and the place."""


@dataclass(frozen=True)
class Handle:
    """A collective that has been started. Its result may be read after `wait()`, which counts once."""

    wait: Callable[[], object]


class Comm(ABC):
    """This rank's telephone. Every rank must make the same calls in the same order."""

    device = torch.device("cpu")  # where the tensors that travel must live

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.ledger = Ledger()

    def send(self, tensor: Tensor, to: int) -> None:
        """Put a copy on its way to one other rank, and go on. Sends n."""
        _check("send", tensor)
        self._must_be_another("send to", to)
        self.ledger.charge("send", tensor.nbytes)
        self._send(tensor, to)

    def receive(self, like: Tensor, source: int) -> Tensor:
        """Wait for the next tensor that `source` sends to me. It has `like`'s shape and type."""
        self._must_be_another("receive from", source)
        return self._receive(like, source)

    def _must_be_another(self, what: str, rank: int) -> None:
        if rank == self.rank or not 0 <= rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size} cannot {what} rank {rank}")

    # The collectives charge what they send if they are made of `send` and `receive`, as in `ring.py`. The
    # backends have faster ways to the same sums.

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place. Sends 2(N-1)/N n: a reduce-scatter and an all-gather."""
        _check("all_reduce", tensor, in_place=True)
        not_mine = tensor.numel() - self._piece(tensor, self.rank)
        not_my_neighbours = tensor.numel() - self._piece(tensor, (self.rank + 1) % self.world_size)
        self.ledger.charge("all_reduce", (not_mine + not_my_neighbours) * tensor.element_size())
        return self._all_reduce(tensor)

    def _piece(self, tensor: Tensor, rank: int) -> int:
        """How many elements a rank adds up. The pieces of the first ranks may be longer by one."""
        return len(range(rank, tensor.numel(), self.world_size))

    def reduce_scatter(self, parts: Sequence[Tensor], label: str = "") -> Tensor:
        """Sum part j over all ranks and give it to rank j alone. Sends (N-1)/N n.

        Ranks that meet with different labels are told so, even if the sizes happen to agree.
        """
        _check("reduce_scatter", *parts)
        others = self._others(parts)
        self.ledger.charge("reduce_scatter", sum(part.nbytes for part in others))
        return self._reduce_scatter(describe("reduce_scatter", *parts, label=label), parts)

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Send part j to rank j; receive one part from each rank. Sends (N-1)/N n.

        Without `sizes` all ranks cut n alike. With them anybody may send anything, in one dimension: they
        say how many elements come to this rank from each.
        """
        _check("all_to_all", *parts)
        others = self._others(parts)
        self.ledger.charge("all_to_all", sum(part.nbytes for part in others))
        call = describe("all_to_all", *(parts if sizes is None else ()))
        received = self._all_to_all(call, parts, sizes)
        got = [part.numel() for part in received]
        if sizes is not None and got != list(sizes):
            raise ValueError(
                f"rank {self.rank} expects {list(sizes)} elements from the ranks, and gets {got}"
            )
        return received

    def all_gather(self, whole: Tensor, mine: Tensor, label: str = "") -> Tensor:
        """Fill `whole` with every rank's `mine`, in rank order. Sends (N-1)/N n."""
        self._check_parts(whole, mine)
        self.ledger.charge("all_gather", mine.nbytes * (self.world_size - 1))
        return self._all_gather(describe("all_gather", mine, label=label), whole, mine)

    def start_all_gather(self, whole: Tensor, mine: Tensor, label: str = "") -> Handle:
        """Start an all_gather, and go on while it travels. Neither tensor may change before `wait()`."""
        self._check_parts(whole, mine)
        self.ledger.charge("all_gather", mine.nbytes * (self.world_size - 1))
        return self._start_all_gather(describe("all_gather", mine, label=label), whole, mine)

    def _check_parts(self, whole: Tensor, mine: Tensor) -> None:
        _check("all_gather", mine)
        _check("all_gather", whole, in_place=True)
        if whole.numel() < mine.numel():
            raise ValueError(
                f"all_gather fills its first argument, which has {whole.numel()} elements, with everybody's "
                f"second, which has {mine.numel()}: are they exchanged?"
            )
        if whole.numel() != mine.numel() * self.world_size:
            raise ValueError(
                f"all_gather needs equal parts: {self.world_size} ranks x {mine.numel()} elements do not "
                f"fill {whole.numel()}; pad the tensor to a multiple of the world size first"
            )

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Copy `source`'s tensor to every rank, in place. The source sends (N-1) n."""
        _check("broadcast", tensor, in_place=True)
        sent = tensor.nbytes * (self.world_size - 1) if self.rank == source else 0
        self.ledger.charge("broadcast", sent)
        return self._broadcast(tensor, source)

    def barrier(self) -> None:
        """Wait until every rank is here. Sends nothing worth counting."""
        self._barrier()

    def settle(self) -> None:
        """Wait until no rank and no transport holds a buffer of ours. Call it before reading live bytes."""
        self.barrier()

    def _others(self, parts: Sequence[Tensor]) -> list[Tensor]:
        if len(parts) != self.world_size:
            raise ValueError(
                f"{len(parts)} parts for {self.world_size} ranks: give every rank one, empty or not"
            )
        return [part for rank, part in enumerate(parts) if rank != self.rank]

    def _reduce_scatter(self, call: str, parts: Sequence[Tensor]) -> Tensor:
        return add_up(self._all_to_all(call, parts, None))

    @abstractmethod
    def _send(self, tensor: Tensor, to: int) -> None: ...
    @abstractmethod
    def _receive(self, like: Tensor, source: int) -> Tensor: ...
    @abstractmethod
    def _all_reduce(self, tensor: Tensor) -> Tensor: ...
    @abstractmethod
    def _all_to_all(
        self, call: str, parts: Sequence[Tensor], sizes: Sequence[int] | None
    ) -> list[Tensor]: ...
    @abstractmethod
    def _all_gather(self, call: str, whole: Tensor, mine: Tensor) -> Tensor: ...
    @abstractmethod
    def _start_all_gather(self, call: str, whole: Tensor, mine: Tensor) -> Handle: ...
    @abstractmethod
    def _broadcast(self, tensor: Tensor, source: int) -> Tensor: ...
    @abstractmethod
    def _barrier(self) -> None: ...


def add_up(tensors: Sequence[Tensor]) -> Tensor:
    """The sum in rank order, so that it has the same bits on every rank; 16-bit sums are rounded once."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    total = tensors[0].to(wide, copy=True)
    for tensor in tensors[1:]:
        total += tensor
    return total.to(tensors[0].dtype)


def _check(name: str, *tensors: Tensor, in_place: bool = False) -> None:
    """Refuse tensors whose memory is not there, which would end the process, or not in one piece."""
    for tensor in tensors:
        if in_place and not tensor.is_contiguous():
            strides = tensor.stride()
            raise ValueError(f"{name} needs contiguous memory, got strides {strides}: use .contiguous()")
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        needed = (tensor.storage_offset() + last + 1) * tensor.element_size() if tensor.numel() else 0
        has = tensor.untyped_storage().nbytes()
        if has < needed:
            remedy = "resize_ counts bytes, not elements" if has else "resize_ it first, or keep a copy of it"
            raise ValueError(f"{name}: a storage has {has} bytes, {needed} are needed: {remedy}")


def describe(name: str, *tensors: Tensor, label: str = "") -> str:
    """A collective call in words; two ranks that meet must say the same words."""
    shapes = ", ".join(str(list(t.shape)) for t in tensors)
    dtype = f" {tensors[0].dtype}".replace("torch.", "") if tensors else ""
    return f"{name}({shapes}{dtype})" + (f" of {label}" if label else "")


def caller() -> str:
    """The line that made the collective call: the first one outside our `*comm.py` files.

    A module with a `__tracebackhide__` only passes calls on, and is not asked.
    """
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename in OUR_FILES or "__tracebackhide__" in frame.f_globals):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
