"""One rank of several, without the others: whoever is not there has what this rank has.

The package runs as on an accelerator: `Native` collectives, side streams, and none of the ways that are for
CPUs. What a backend would do is done here, on the stream that is current, with values: the other ranks'
slices are this rank's. So runs are cheap, each gives the same bits every time, and a stale or lost value
shows.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.order.trace import Recorder
from zero_full.comm.communicator import Communicator
from zero_full.comm.fake_ranks import FakeGroup
from zero_full.comm.lane import InlineStreamLane, Lane, StreamLane
from zero_full.comm.transport import Native
from zero_full.offload import HostTier
from zero_full.shard.step.optimizer import ZeroOptimizer


class Echo:
    """The functions of a backend."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def _call(self, group: FakeGroup, kind: str, numel: int) -> Any:
        return self.recorder.collective(group, kind, numel)

    def reduce_scatter(self, out: Tensor, whole: Tensor, group: FakeGroup) -> None:
        """The sum of all slices."""
        with self._call(group, "reduce_scatter", whole.numel()):
            out.copy_(whole.view(group.size(), -1).sum(0))

    def all_gather(self, whole: Tensor, mine: Tensor, group: FakeGroup) -> None:
        """This rank's slice in all places."""
        with self._call(group, "all_gather", whole.numel()):
            slices = whole.view(group.size(), -1)
            for rank in range(group.size()):
                if rank != group.rank():
                    slices[rank].copy_(mine)

    def all_reduce(self, whole: Tensor, group: FakeGroup) -> None:
        """As many times what it was as there are ranks."""
        with self._call(group, "all_reduce", whole.numel()):
            whole.mul_(group.size())

    def all_to_all(self, received: Tensor, sent: Tensor, *splits: list[int], group: FakeGroup) -> None:
        """Everyone has sent what this rank has, again and again where parts are of other sizes."""
        with self._call(group, "all_to_all", sent.numel()):
            times = -(-received.numel() // sent.numel()) if sent.numel() else 0
            received.copy_(sent.repeat(times)[: received.numel()] if times else torch.zeros_like(received))

    def broadcast(self, tensor: Tensor, root: int, group: FakeGroup) -> None:
        """The first rank has these values, too."""
        with self._call(group, "broadcast", tensor.numel()):
            pass

    def gather_objects(self, answers: list[Any], mine: Any, group: FakeGroup) -> None:
        """On an accelerator the host waits for such a call."""
        with self._call(group, "gather_objects", 0):
            answers[:] = [mine] * len(answers)
        self.recorder.host_reads(torch.zeros(1))


class NoSpares(list[Tensor]):
    """Buckets on an accelerator keep no memory for each other."""

    def append(self, tensor: Tensor) -> None:
        """Forget it."""


@contextmanager
def on_an_accelerator(recorder: Recorder, lane: Callable[[Any], Lane] = lambda made: made) -> Iterator[None]:
    """The package believes to be on one. `lane` may put something around each lane."""
    echo = Echo(recorder)

    def lane_for(device: torch.device, overlap: bool) -> Lane:
        if not overlap:
            return InlineStreamLane(recorder.current)
        name = ["reductions", "gathers"][min(len(recorder.streams) - 1, 1)]
        return lane(StreamLane(recorder.stream(name), recorder.current))

    def fetch(tier: HostTier, tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        recorder.host_reads(copy)
        return copy

    def called(communicator: Communicator, kind: str, what: str, *rest: Any) -> None:
        recorder.doing = what
        call(communicator, kind, what, *rest)

    call, zero_grad = Communicator._call, ZeroOptimizer.zero_grad
    backend = SimpleNamespace(
        all_reduce=echo.all_reduce,
        all_to_all_single=echo.all_to_all,
        broadcast=echo.broadcast,
        all_gather_object=echo.gather_objects,
        get_global_rank=lambda group, rank: rank,
    )
    transport = "zero_full.comm.transport"
    with ExitStack() as stack:
        for patch in (
            mock.patch("zero_full.comm.communicator.FakeTransport", Native),
            mock.patch(f"{transport}.reduce_scatter_single", echo.reduce_scatter),
            mock.patch(f"{transport}.all_gather_single", echo.all_gather),
            mock.patch(f"{transport}.dist", backend),
            mock.patch("zero_full.start.startup_checks.groups_of", lambda topology: []),
            mock.patch("zero_full.shard.step.optimizer.lane_for", lane_for),
            mock.patch("zero_full.shard.step.peers.InlineLane", ()),  # as many rounds there: the same echoes
            mock.patch.object(HostTier, "fetch", fetch),
            mock.patch.object(Communicator, "_call", called),
            mock.patch.object(
                ZeroOptimizer, "zero_grad", lambda self, none=None: zero_grad(self, none is None or none)
            ),
        ):
            stack.enter_context(patch)
        yield
