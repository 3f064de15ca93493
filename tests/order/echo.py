"""One rank of several, without the others: whoever is not there has what this rank has.

The package runs as on an accelerator (`device.py`), with `Native` collectives. What a backend would do is
done here, on the stream that is current, with values: the other ranks' slices are this rank's. So runs are
cheap, each gives the same bits every time, and a stale or lost value shows.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.order.device import DEVICE, simulated_device
from tests.order.trace import Recorder
from zero_full.comm.communicator import Communicator
from zero_full.comm.fake_ranks import FakeGroup
from zero_full.comm.lane import Lane, lane_for
from zero_full.comm.transport import Native


class Echo:
    """The functions of a backend."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def _call(self, group: FakeGroup, kind: str, *tensors: Tensor) -> Any:
        return self.recorder.collective(group, kind, *tensors)

    def reduce_scatter(self, out: Tensor, whole: Tensor, group: FakeGroup) -> None:
        """The sum of all slices."""
        with self._call(group, "reduce_scatter", whole, out):
            out.copy_(whole.view(group.size(), -1).sum(0))

    def all_gather(self, whole: Tensor, mine: Tensor, group: FakeGroup) -> None:
        """This rank's slice in all places."""
        with self._call(group, "all_gather", whole, mine):
            slices = whole.view(group.size(), -1)
            for rank in range(group.size()):
                if rank != group.rank():
                    slices[rank].copy_(mine)

    def all_reduce(self, whole: Tensor, group: FakeGroup) -> None:
        """As many times what it was as there are ranks."""
        with self._call(group, "all_reduce", whole):
            whole.mul_(group.size())

    def all_to_all(self, received: Tensor, sent: Tensor, *splits: list[int], group: FakeGroup) -> None:
        """Everyone has sent what this rank has, again and again where parts are of other sizes."""
        with self._call(group, "all_to_all", sent, received):
            times = -(-received.numel() // sent.numel()) if sent.numel() else 0
            received.copy_(sent.repeat(times)[: received.numel()] if times else torch.zeros_like(received))

    def broadcast(self, tensor: Tensor, root: int, group: FakeGroup) -> None:
        """The first rank has these values, too."""
        with self._call(group, "broadcast", tensor):
            pass

    def gather_objects(self, answers: list[Any], mine: Any, group: FakeGroup) -> None:
        """On an accelerator the host waits for such a call."""
        with self._call(group, "gather_objects"):
            answers[:] = [mine] * len(answers)
        self.recorder.host_reads(torch.zeros(1, device=DEVICE))


@contextmanager
def on_an_accelerator(recorder: Recorder, lane: Callable[[Any], Lane] = lambda made: made) -> Iterator[Path]:
    """The package is one rank of several on an accelerator. `lane` may put something around each lane.

    Gives a folder for files.
    """
    echo = Echo(recorder)

    def lane_around(device: torch.device, overlap: bool) -> Lane:
        made = lane_for(device, overlap)
        return lane(made) if overlap else made

    def called(communicator: Communicator, kind: str, what: str, *rest: Any) -> None:
        recorder.doing = what
        call(communicator, kind, what, *rest)

    call = Communicator._call
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
            mock.patch("zero_full.shard.step.optimizer.lane_for", lane_around),
            mock.patch("zero_full.shard.step.peers.InlineLane", ()),  # as many rounds there: the same echoes
            mock.patch.object(Communicator, "_call", called),
            mock.patch("zero_full.checkpoint.save.longest_timeout", lambda groups: 60.0),  # of no backend
        ):
            stack.enter_context(patch)
        yield stack.enter_context(simulated_device(recorder))
