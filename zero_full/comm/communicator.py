"""Every collective the package makes goes through a `Communicator`: one process group, seen from one rank.

It picks the transport, counts the bytes, compares the calls if asked to, and puts a name on what fails.
"""

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_full._compat import backend_of, default_store
from zero_full.comm.desync import CallCheck
from zero_full.comm.device_queue import queue_for
from zero_full.comm.exit_reason import leave_reason, reasons_of
from zero_full.comm.fake_ranks import Pretence, PretendedGroup
from zero_full.comm.forked import keep_for_good, only_here
from zero_full.comm.host_staging import HALF as STAGED_HALF
from zero_full.comm.host_staging import Staged
from zero_full.comm.ledger import CollectiveCall, Traffic
from zero_full.comm.shared import HALF, share_memory
from zero_full.comm.topology import ranks_of
from zero_full.comm.transport import Exchange, Native, Splits, Transport, own_slice
from zero_full.errors import CommunicationError, DesyncError


def choose_transport(group: dist.ProcessGroup, device: torch.device, shared_memory: bool = True) -> Transport:
    """The fastest transport that works for this group; see `transport.py` and `host_staging.py`."""
    if isinstance(group, PretendedGroup):
        return Pretence(group)
    if backend_of(group, device) != "gloo":
        return Native(group)
    on_host = device.type == "cpu"
    by = share_memory(group, shared_memory, HALF if on_host else STAGED_HALF) or Exchange(group)
    return by if on_host else Staged(by, queue_for(device))


NOBODY: Any = object()  # the group of a communicator that is closed
_alive: "weakref.WeakSet[Communicator]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: no communicator of the parent's is used, closed or collected."""
    for communicator in _alive:
        communicator.leave_to_parent()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_to_parent)


class Communicator:
    """A process group. `None` stands for a rank that is alone, where every collective is a no-op."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        traffic: Traffic | None = None,
        check_timeout_s: float | None = None,
        label: str = "",  # what the ledger says behind the kind of a collective
        shared_memory: bool = True,  # where ranks can: see `share_memory`
    ) -> None:
        self.device, self.traffic, self.label = device, traffic or Traffic(), label
        self.group = group if group is not None and group.size() > 1 else None
        self.rank = 0 if self.group is None else self.group.rank()
        self.size = 1 if self.group is None else self.group.size()
        self.ranks = [0] if self.group is None else ranks_of(self.group)
        self.closed = self.is_parents = False
        self.calls = 0  # so far
        self.call_check: CallCheck | None = None
        self.transport: Transport | None = None
        self.store: Any = None  # where ranks leave why they ended
        if self.group is not None:
            self._open(self.group, check_timeout_s, shared_memory)

    def _open(self, group: dist.ProcessGroup, check_timeout_s: float | None, shared_memory: bool) -> None:
        def choose() -> None:
            self.transport = choose_transport(group, self.device, shared_memory)

        if check_timeout_s is not None:
            self.call_check = CallCheck(self.ranks, self.ranks[self.rank], check_timeout_s)
        self._call("opening", f"ranks {self.ranks}", torch.empty(0), 0, choose)
        if isinstance(group, PretendedGroup):
            return
        _alive.add(self)
        self.store = default_store()  # kept: the process group may be gone by then
        weakref.finalize(self, only_here(leave_reason), self.store, self.ranks[self.rank])

    def slice_of(self, whole: Tensor) -> Tensor:
        """This rank's slice of a flat buffer."""
        return own_slice(whole, self.rank, self.size)

    def reduce_scatter(self, whole: Tensor, out: Tensor, divisor: float, what: str) -> None:
        """`out` becomes the sum of everyone's slice for this rank over `divisor`. May destroy `whole`."""
        if self.transport is None:
            _copy_over(whole, out, divisor)
            return
        transport = self.transport
        sent = (self.size - 1) * (whole.nbytes // self.size)
        self._call("reduce_scatter", what, whole, sent, lambda: transport.reduce_scatter(whole, out, divisor))

    def all_gather(self, whole: Tensor, what: str) -> None:
        """Fill in the slices of the other ranks."""
        if self.transport is None:
            return
        transport = self.transport
        sent = (self.size - 1) * (whole.nbytes // self.size)
        self._call("all_gather", what, whole, sent, lambda: transport.all_gather(whole))

    def all_reduce(self, whole: Tensor, divisor: float, what: str) -> None:
        """Make `whole` the sum over all ranks, divided. Its size must be a multiple of the group's."""
        if self.transport is None:
            _copy_over(whole, whole, divisor)
            return
        transport = self.transport
        sent = 2 * (self.size - 1) * (whole.nbytes // self.size)
        self._call("all_reduce", what, whole, sent, lambda: transport.all_reduce(whole, divisor))

    def all_to_all(self, sent: Tensor, received: Tensor, what: str) -> None:
        """Send the r-th part of `sent` to rank r, and receive rank r's into the r-th part of `received`."""
        if self.transport is None:
            received.copy_(sent)
            return
        transport, splits = self.transport, Splits.even(sent.numel(), self.size)
        flat, wire = (sent.view(-1), received.view(-1)), (self.size - 1) * (sent.nbytes // self.size)
        self._call("all_to_all", what, sent, wire, lambda: transport.all_to_all(*flat, splits))

    def all_to_all_uneven(self, sent: Tensor, received: Tensor, splits: Splits, what: str) -> None:
        """The same with parts of these sizes. Where nobody has any for another rank, nobody is called."""
        if self.transport is None or not splits.most:
            return
        transport, told = self.transport, f"{what}, {splits.most} at most between two ranks"

        def exchange() -> None:
            transport.all_to_all(sent, received, splits)

        self._call("all_to_all", told, sent[:0], sent.nbytes, exchange)

    def sum_numbers(self, numbers: Tensor, what: str) -> Tensor:
        """Sum a few numbers over the ranks, in place, and return them. They do not count as traffic."""
        transport = self.transport
        if transport is not None:
            self._call("sum", what, numbers, 0, lambda: transport.sum_numbers(numbers))
        return numbers

    def broadcast(self, tensor: Tensor, what: str) -> None:
        """Give all ranks the first rank's values."""
        transport = self.transport
        if transport is not None:
            self._call("broadcast", what, tensor, 0, lambda: transport.broadcast(tensor))

    def gather_objects(self, mine: Any, what: str) -> list[Any]:
        """The small Python objects of all ranks, by rank. It is slow: for error reports and set-up."""
        transport, answers = self.transport, [mine]
        if transport is not None:

            def gather() -> None:
                answers[:] = transport.gather_objects(mine)

            self._call("gather_objects", what, torch.empty(0), 0, gather)
        return answers

    def awaited_by(self) -> list[int]:
        """The ranks that wait for this one in a collective to which it has not come, as far as it can see."""
        if self.transport is None or self.closed:
            return []
        return [self.ranks[place] for place in self.transport.awaited_by()]

    def check(self, what: str) -> None:
        """Raise CommunicationError if a collective has failed since it was queued.

        For who has waited for the device, and is about to believe what a collective has left there.
        """
        if self.transport is not None and not self.closed:
            with self._named("reading", what):
                self.transport.check()

    def close(self) -> None:
        """Let go of the process group and its connections. A later collective raises CommunicationError.

        It waits for what is queued, and raises if that has failed and nobody has heard of it.
        """
        if self.transport is not None and not self.closed:
            transport = self.transport
            self.closed, self.group, self.transport = True, NOBODY, NOBODY
            with self._named("closing", "the group"):
                transport.close()

    def leave_to_parent(self) -> None:
        """This process is a fork: the group is its parent's."""
        for thing in (self.group, self.transport):
            keep_for_good(thing)
        self.closed = self.is_parents = True
        self.group = self.transport = NOBODY

    def refuse_closed(self, call: str) -> None:
        """Raise CommunicationError after `close`, and in a forked child."""
        if self.is_parents:
            raise CommunicationError(
                f"{call} in a forked process: the group is its parent's. Use the engine where it was made, "
                "or start processes by spawn and initialize there"
            )
        if self.closed:
            raise CommunicationError(
                f"{call} after destroy: this engine has left its groups. Do it before, or initialize the "
                "model again"
            )

    def _call(self, kind: str, what: str, tensor: Tensor, sent: int, collective: Callable[[], Any]) -> None:
        if self.closed:
            self.refuse_closed(f"{kind} of {what}")
        if self.transport is not None:
            self.transport.call = kind, what, str(tensor.numel()), str(tensor.dtype)
        with self._named(kind, what):
            if self.call_check is not None:
                size = f"{tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}"
                collective = partial(_checked, self.call_check, f"{kind} of {what}: {size}", collective)
            if (listener := self.traffic.listener) is None:
                collective()
            else:
                listener.collective(CollectiveCall(self, self.calls, kind, what, sent), collective)
        self.calls += 1
        self.traffic.add(f"{kind} {self.label}".rstrip(), sent)

    @contextmanager
    def _named(self, kind: str, what: str) -> Iterator[None]:
        """What fails in this block is a CommunicationError that says what was going on."""
        try:
            yield
        except DesyncError:
            raise
        except RuntimeError as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            others = [rank for place, rank in enumerate(self.ranks) if place != self.rank]
            found = reasons_of(self.store, others) if self.store is not None else {}
            because = "\n".join(f"rank {rank} ended with {text}" for rank, text in found.items()) or (
                "Usually another rank has failed first (look for the earliest error) or makes other calls "
                '(set "debug": {"check_collectives": true} in the config to see which).'
            )
            raise CommunicationError(
                f"rank {self.rank} of {self.size}: {kind} of {what} failed: {reason}\n{because}"
            ) from error


def _checked(check: CallCheck, call: str, collective: Callable[[], Any]) -> None:
    check(call)
    collective()


def _copy_over(source: Tensor, out: Tensor, divisor: float) -> None:
    if out.data_ptr() != source.data_ptr() or out.dtype != source.dtype:
        out.copy_(source)
    if divisor != 1:
        out.div_(divisor)
