"""Named ranges in the trace of `torch.profiler`: the phases of a step, and every collective by its data.

A forward of the engine looks whether a profiler runs, and makes the ranges while one does. So they begin with
the first forward after the profiler, and otherwise cost no more than that look.

    zero_full forward, backward, step    calls of the engine
    zero_full update, publish            inside a step: this rank's slices, and the all-gather of parameters
    zero_full all_gather of NAME, ...    a collective. Those that a thread of zero_full's own makes are in a
                                         trace only if the profiler records all threads
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from torch.profiler import record_function

from zero_full.comm.traffic import CollectiveCall, Listener
from zero_full.shard.step.optimizer import ZeroOptimizer

PREFIX = "zero_full "
Timed = Callable[[], AbstractContextManager[None]]


def named_range(name: str) -> record_function:
    """Return a context manager that names its block in traces of torch's profiler."""
    return record_function(PREFIX + name)


class ProfilerRanges:
    """Makes the ranges of an optimizer's steps and collectives, until `close`."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self.optimizer, self.traffic = optimizer, optimizer.communicators.traffic
        self.inner: Listener | None = self.traffic.listener  # a flight recorder
        self.traffic.listener = self
        optimizer.named_range = named_range

    def collective(self, call: CollectiveCall, make: Callable[[], None]) -> None:
        """Make the collective inside a range."""
        with named_range(f"{call.kind} of {call.name}"):
            if self.inner is None:
                make()
            else:
                self.inner.collective(call, make)

    def close(self) -> None:
        """Stop making ranges."""
        self.optimizer.named_range = nullcontext
        if self.traffic.listener is self:  # else a flight recorder has begun or ended since
            self.traffic.listener = self.inner


def ranged(phase: str, timed: Timed) -> Timed:
    """Wrap `timed` so that its contexts are also ranges of the trace, named after the phase."""
    return partial(_ranged, phase, timed)


@contextmanager
def _ranged(phase: str, timed: Timed) -> Iterator[None]:
    with named_range(phase), timed():
        yield
