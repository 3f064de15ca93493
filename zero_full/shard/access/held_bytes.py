"""How many bytes a rank holds, by kind, cheaply enough to be asked before every collective.

Whole parameters and gradients come and go all the time, so their buffers are looked at. What a step alone
changes (masters, the optimizer's state) is counted after each step. Nobody waits for a device or a disk.
"""

from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from zero_full._compat import identity_of
from zero_full.shard.group.gradients import Bucket
from zero_full.shard.group.parameters import FlatParameter, GatherState
from zero_full.shard.step.optimizer import ZeroOptimizer

Sizes = dict[str, int]


def bytes_behind(tensors: Iterable[Tensor]) -> int:
    """The memory of these tensors; what several of them share is counted once."""
    storages = {identity_of(t.untyped_storage()): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


class HeldBytes:
    """The bytes of what `ZeroOptimizer.holdings` returns."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self.optimizer = optimizer
        self.buckets = [owned.bucket for owned in optimizer.owned]
        self.at_rest: Counter[str] = Counter()  # slices, which are always there
        self.gathered: list[tuple[FlatParameter, int]] = []
        self.always = 0  # bytes of parameters that are never released
        for flat in optimizer.flats():
            if flat.released_at_rest:
                self.gathered.append((flat, flat.full.nbytes))
                self.at_rest[flat.slice.kind] += flat.layout.shard * flat.dtype.itemsize
            else:
                self.always += flat.full.untyped_storage().nbytes()
        self.settled: Sizes = {}
        self.settle()

    def settle(self) -> None:
        """Count what only a step changes."""
        found = self.optimizer.holdings(())
        self.settled = {kind: bytes_behind(tensors) for kind, tensors in found.items()}
        for kind, size in self.at_rest.items():
            self.settled[kind] = self.settled.get(kind, 0) + size

    def now(self) -> Sizes:
        """By kind."""
        parameters = self.at_rest["parameters"] + self.always
        for flat, size in self.gathered:
            if flat.state is not GatherState.SHARDED:
                parameters += size
            if flat.node_copy is not None:
                parameters += flat.node_copy.nbytes
        gradients = sum(map(_gradient_bytes, self.buckets))
        return {**self.settled, "parameters": parameters, "gradients": gradients}


def _gradient_bytes(bucket: Bucket) -> int:
    mine = bucket.grad_slice
    if bucket.local_grads is None and not bucket.uses_param_grad:  # as a rule, from stage 2 on
        return 0 if mine is None or bucket.is_down else mine.nbytes
    return bytes_behind(bucket.gradient_memory())
