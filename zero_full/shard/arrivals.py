"""New parameters on their way to every rank, after a step: sent at once, waited for when they are needed."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from zero_full.comm.lane import Lane, Pending
from zero_full.shard.bucket import Bucket
from zero_full.shard.flat import GatherState
from zero_full.shard.hooks import Hook


class Arrivals:
    """New parameters that are being gathered on a lane, and the hooks that wait for them."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.pending: dict[Bucket, Pending] = {}
        self.hooks: list[RemovableHandle] = []  # on modules that wait for their parameters

    def send(self, buckets: Sequence[Bucket]) -> None:
        """Send this rank's slices to all ranks, beginning with what forward needs first."""
        for bucket in reversed(buckets):
            flat = bucket.flat
            if flat.state is GatherState.WHOLE:
                self.pending[bucket] = self.lane.submit(flat.collect, [flat.full], [self.lane.producer()])

    def wait(self) -> None:
        """Wait until all parameters have arrived."""
        while self.pending:
            _, pending = self.pending.popitem()
            pending.wait()

    def hold_back(self, model: nn.Module, buckets: Sequence[Bucket]) -> None:
        """Make each module wait for its own parameters before its forward."""
        bucket_of = {m.param: bucket for bucket in buckets for m in bucket.members}
        for module in model.modules():
            needed = {bucket_of[p] for p in module.parameters(recurse=False) if p in bucket_of}
            if needed:
                self.hooks.append(module.register_forward_pre_hook(Hook(module, self._wait_for, needed)))

    def _wait_for(self, needed: set[Bucket], args: Any) -> None:
        for bucket in needed:
            if bucket in self.pending:
                self.pending.pop(bucket).wait()

    def close(self) -> None:
        """Take the hooks off the modules."""
        for hook in self.hooks:
            hook.remove()
