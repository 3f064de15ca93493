"""`Communicator`: one process group as seen from one rank. Every collective of the package goes through one.

It picks the transport, counts bytes, compares calls between ranks (`debug.check_collectives`), and names the
collective in the error when one fails.
"""

import ctypes
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_full._compat import backend_of, default_store
from zero_full.comm.desync import CallCheck
from zero_full.comm.fake_ranks import FakeGroup, FakeTransport
from zero_full.comm.fork_safety import in_this_process_only, leak
from zero_full.comm.host_staging import HALF as STAGED_HALF
from zero_full.comm.host_staging import HostStaging
from zero_full.comm.shared_memory import HALF, SharedMemory, share_memory
from zero_full.comm.stores import exit_reasons, write_exit_reason
from zero_full.comm.topology import ranks_of
from zero_full.comm.traffic import CollectiveCall, Traffic
from zero_full.comm.transport import Exchange, Native, Splits, describe_call, own_slice
from zero_full.errors import CommunicationError, DesyncError

Transport = Native | Exchange | SharedMemory | HostStaging | FakeTransport


def choose_transport(group: dist.ProcessGroup, device: torch.device, shared_memory: bool = True) -> Transport:
    """Return the fastest transport that works for this group; see `transport.py` and `host_staging.py`."""
    if isinstance(group, FakeGroup):
        return FakeTransport(group)
    if backend_of(group, device) != "gloo":
        return Native(group)
    on_host = device.type == "cpu"
    by = share_memory(group, shared_memory, HALF if on_host else STAGED_HALF) or Exchange(group)
    return by if on_host else HostStaging(by)


class _ClosedTransport:
    """Replaces the transport of a closed communicator, so that its connections are freed."""

    def __getattr__(self, name: str) -> None:
        """Return None instead of a collective: `_call` raises before it would call one."""


NO_GROUP: Any = object()  # the group of a closed communicator
_alive: "weakref.WeakSet[Communicator]" = weakref.WeakSet()


def _close_all_in_child() -> None:
    """In a forked child: close the parent's communicators, but free none of their resources."""
    for communicator in _alive:
        communicator.close_in_child()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_close_all_in_child)


class Communicator:
    """The collectives of a process group. Without a group there is one rank, and collectives do nothing."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        traffic: Traffic | None = None,
        check_timeout_s: float | None = None,
        label: str = "",  # appended to the kind of a collective in `traffic`
        shared_memory: bool = True,  # use it where ranks can: see `share_memory`
    ) -> None:
        self.device, self.traffic, self.suffix = device, traffic or Traffic(), f" {label}" if label else ""
        self.group = group if group is not None and group.size() > 1 else None
        self.rank = 0 if self.group is None else self.group.rank()
        self.size = 1 if self.group is None else self.group.size()
        self.ranks = [0] if self.group is None else ranks_of(self.group)
        self.closed = self.is_forked = False
        self.calls = 0  # collectives completed
        self.call_check: CallCheck | None = None
        self.transport: Transport | None = None
        self.store: Any = None  # where a rank writes why it ended
        if self.group is not None:
            self._open(self.group, check_timeout_s, shared_memory)

    def _open(self, group: dist.ProcessGroup, check_timeout_s: float | None, shared_memory: bool) -> None:
        def choose() -> None:
            self.transport = choose_transport(group, self.device, shared_memory)

        if check_timeout_s is not None:
            self.call_check = CallCheck(self.ranks, self.ranks[self.rank], check_timeout_s)
        self._call("opening", f"ranks {self.ranks}", torch.empty(0), 0, choose)
        if isinstance(group, FakeGroup):
            return
        _alive.add(self)
        self.store = default_store()  # kept, since the process group may be destroyed before this object
        weakref.finalize(self, in_this_process_only(write_exit_reason), self.store, self.ranks[self.rank])

    def slice_of(self, whole: Tensor) -> Tensor:
        """Return this rank's slice of a flat buffer."""
        return own_slice(whole, self.rank, self.size)

    def reduce_scatter(self, whole: Tensor, out: Tensor, divisor: float, what: str) -> None:
        """Sum this rank's slice of `whole` over all ranks into `out`, divided. May overwrite `whole`."""
        if (transport := self.transport) is None:
            _copy_over(whole, out, divisor)
            return
        sent = (self.size - 1) * (whole.nbytes // self.size)
        self._call("reduce_scatter", what, whole, sent, transport.reduce_scatter, whole, out, divisor)

    def all_gather(self, whole: Tensor, what: str) -> None:
        """Fill in the slices of the other ranks."""
        if (transport := self.transport) is not None:
            sent = (self.size - 1) * (whole.nbytes // self.size)
            self._call("all_gather", what, whole, sent, transport.all_gather, whole)

    @property
    def sends_messages(self) -> bool:
        """Whether ranks send each other messages from this process. Equal on all ranks."""
        return isinstance(self.transport, Exchange)

    @property
    def can_post(self) -> bool:
        """Whether `post_all_gather` works now. Ranks may differ in it: the messages are the same."""
        return self.sends_messages and self.call_check is None and self.traffic.listener is None

    def post_all_gather(self, whole: Tensor, what: str) -> "Posted":
        """Begin to fill in the slices of the other ranks. `whole` must not change until it is waited for.

        Several may be under way; later collectives of this communicator come behind them. Needs `can_post`.
        """
        transport, posted = self.transport, Posted(self, what)
        assert isinstance(transport, Exchange)
        sent = (self.size - 1) * (whole.nbytes // self.size)
        self._call("all_gather", what, whole, sent, posted.post, transport, whole)
        return posted

    def all_reduce(self, whole: Tensor, divisor: float, what: str) -> None:
        """Sum `whole` over all ranks in place, divided. Its size must be a multiple of the group's."""
        if (transport := self.transport) is None:
            _copy_over(whole, whole, divisor)
            return
        sent = 2 * (self.size - 1) * (whole.nbytes // self.size)
        self._call("all_reduce", what, whole, sent, transport.all_reduce, whole, divisor)

    def all_to_all(self, sent: Tensor, received: Tensor, what: str) -> None:
        """Send the r-th part of `sent` to rank r, and receive rank r's into the r-th part of `received`."""
        if (transport := self.transport) is None:
            received.copy_(sent)
            return
        flat, splits = (sent.view(-1), received.view(-1)), Splits.even(sent.numel(), self.size)
        sent_bytes = (self.size - 1) * (sent.nbytes // self.size)
        self._call("all_to_all", what, sent, sent_bytes, transport.all_to_all, *flat, splits)

    def all_to_all_uneven(self, sent: Tensor, received: Tensor, splits: Splits, what: str) -> None:
        """Run an all-to-all with parts of the sizes in `splits`, unless no rank sends anything to another."""
        if (transport := self.transport) is not None and splits.most:
            # Sizes differ between ranks, so `sent[:0]` is what they compare: its number of elements is equal.
            what = f"{what}, {splits.most} at most between two ranks"
            self._call(
                "all_to_all", what, sent[:0], sent.nbytes, transport.all_to_all, sent, received, splits
            )

    def sum_numbers(self, numbers: Tensor, what: str) -> Tensor:
        """Sum a few numbers over all ranks in place, and return them. They are not counted as traffic."""
        if (transport := self.transport) is not None:
            self._call("sum", what, numbers, 0, transport.sum_numbers, numbers)
        return numbers

    def merge(self, whole: Tensor, what: str) -> None:
        """Fill in the bytes of the other ranks: each byte is zero on all ranks but one.

        The size must be a multiple of 4 bytes. The bytes are summed as integers, which keeps all bits, also
        those of -0.0 and NaN. On return no thread of the backend holds the memory.
        """
        if (transport := self.transport) is not None:
            sent, words = 2 * (self.size - 1) * (whole.nbytes // self.size), _borrowed(whole)
            self._call("all_reduce", what, words, sent, transport.sum_numbers, words)

    def broadcast(self, tensor: Tensor, what: str) -> None:
        """Give all ranks the first rank's values."""
        if (transport := self.transport) is not None:
            self._call("broadcast", what, tensor, 0, transport.broadcast, tensor)

    def gather_objects(self, mine: Any, what: str) -> list[Any]:
        """Gather small Python objects, one of each rank, by rank. Slow: for error reports and set-up."""
        answers = [mine]
        if (transport := self.transport) is not None:

            def gather() -> None:
                answers[:] = transport.gather_objects(mine)

            self._call("gather_objects", what, torch.empty(0), 0, gather)
        return answers

    def awaited_by(self) -> list[int]:
        """Return the ranks seen waiting in a collective that this rank has not entered."""
        if self.transport is None or self.closed:
            return []
        return [self.ranks[place] for place in self.transport.awaited_by()]

    def close(self) -> None:
        """Free the process group and its connections. A later collective raises CommunicationError."""
        if self.transport is not None:
            self._drop_group()

    def close_in_child(self) -> None:
        """Close in a forked child: the parent still uses the group, so its destructor must not run here."""
        for thing in (self.group, self.transport):
            leak(thing)
        self.is_forked = True
        self._drop_group()

    def _drop_group(self) -> None:
        """Drop this object's references to the group and its connections."""
        no_transport: Any = _ClosedTransport()
        self.closed, self.group, self.transport = True, NO_GROUP, no_transport

    def check_open(self, call: str) -> None:
        """Raise CommunicationError after `close`, and in a forked child."""
        if self.is_forked:
            raise CommunicationError(
                f"{call} in a forked process, whose process group belongs to the parent. Use the engine in "
                "the parent, or start processes by spawn and initialize there."
            )
        if self.closed:
            raise CommunicationError(
                f"{call} after destroy, which closed the process groups of this engine. Call it before "
                "destroy, or initialize the model again."
            )

    def _call(
        self, kind: str, what: str, tensor: Tensor, sent: int, collective: Callable[..., Any], *given: Any
    ) -> None:
        """Run `collective(*given)`, count its bytes, and name it in the error if it fails."""
        if self.closed:
            self.check_open(f"{kind} of {what}")
        call = kind, what, tensor.numel(), tensor.dtype
        if self.transport is not None:  # else it is being opened
            self.transport.call = call
        try:
            if self.call_check is None and self.traffic.listener is None:
                collective(*given)
            else:
                watched = CollectiveCall(self, self.calls, kind, what, sent)
                self._watch(watched, describe_call(call), partial(collective, *given))
        except DesyncError:  # names the calls of all ranks already
            raise
        except RuntimeError as error:
            raise self.failure(kind, what, error) from error
        self.calls += 1
        if sent:
            self.traffic.sent[kind + self.suffix] += sent

    def _watch(self, call: CollectiveCall, words: str, collective: Callable[[], Any]) -> None:
        """Run a collective that a flight recorder records or `debug.check_collectives` compares."""

        def make() -> None:
            if self.call_check is not None:
                self.call_check(words)
            collective()

        listener = self.traffic.listener  # read once: another thread may end the recording
        if listener is None:
            make()
        else:
            listener.collective(call, make)

    def failure(self, kind: str, what: str, error: RuntimeError) -> CommunicationError:
        """Return the error of a failed collective: its name, and why other ranks have ended."""
        reason = str(error).partition("\n")[0] or type(error).__name__
        others = [rank for place, rank in enumerate(self.ranks) if place != self.rank]
        found = exit_reasons(self.store, others) if self.store is not None else {}
        because = "\n".join(f"rank {rank} ended with {text}" for rank, text in found.items()) or (
            "Usually another rank has failed first (look for the earliest error) or makes other calls "
            '(set "debug": {"check_collectives": true} in the config to see which).'
        )
        # If no rank has ended, ranks that wait in another collective explain a timeout.
        waiting = {rank for each in list(_alive) for rank in each.awaited_by()} if not found else set()
        if waiting and reason.startswith("timed out"):
            because = (
                f"Ranks {sorted(waiting)} wait for this rank in another collective: ranks are at different "
                "places of the loop. Every rank must make the same forward and backward passes and steps.\n"
                + because
            )
        return CommunicationError(
            f"rank {self.ranks[self.rank]}: {kind} of {what} on {self.size} ranks failed: {reason}\n{because}"
        )


class Posted:
    """A pending all-gather: its messages are posted, and `wait` completes it."""

    def __init__(self, by: Communicator, what: str) -> None:
        self.by, self.what, self.works = by, what, list[dist.Work]()

    def post(self, transport: Exchange, whole: Tensor) -> None:
        """Begin to send and to receive."""
        self.works = transport.begin_all_gather(whole)

    def wait(self) -> None:
        """Wait until all slices have arrived, and this rank's has left; again, after an interrupt."""
        try:
            for work in self.works:
                if not work.is_completed():  # a second wait would never end
                    work.wait()
        except RuntimeError as error:
            self.works.clear()  # ends the other messages: the caller may free their memory
            raise self.by.failure("all_gather", self.what, error) from error


def _borrowed(whole: Tensor) -> Tensor:
    """View the bytes as int32. In host memory the view does not keep the memory alive.

    A thread of gloo drops its reference to a tensor a little after the collective has returned.
    """
    if whole.device.type != "cpu" or not whole.numel():
        return whole.view(torch.int32)
    memory = (ctypes.c_char * whole.nbytes).from_address(whole.data_ptr())
    return torch.frombuffer(memory, dtype=torch.int32)


def _copy_over(source: Tensor, out: Tensor, divisor: float) -> None:
    if out.data_ptr() != source.data_ptr() or out.dtype != source.dtype:
        out.copy_(source)
    if divisor != 1:
        out.div_(divisor)
