"""Bytes that a rank holds, by kind, computed cheaply enough for a report at every collective.

Gathered parameters and gradients change during a step, so their buffers are looked up each time. Masters and
optimizer state are counted after each step. Nothing here waits for a device or a disk.
"""

from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from zero_full._compat import identity_of
from zero_full.shard.group.gradients import FlatGradients
from zero_full.shard.group.parameters import FlatParameters, GatherState
from zero_full.shard.step.optimizer import ZeroOptimizer

Sizes = dict[str, int]


def bytes_behind(tensors: Iterable[Tensor]) -> int:
    """Sum the bytes of these tensors' storages; a shared storage is counted once."""
    storages = {identity_of(t.untyped_storage()): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


class HeldBytes:
    """Bytes of the tensors that `ZeroOptimizer.holdings` returns, by kind."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self.optimizer = optimizer
        self.gradients = [group.gradients for group in optimizer.trained]
        self.at_rest: Counter[str] = Counter()  # bytes of slices of released parameters, by kind
        self.gathered: list[tuple[FlatParameters, int]] = []  # buffers that are gathered for use, with bytes
        self.always = 0  # bytes of parameters that are never released
        for flat in optimizer.sharded.flats:
            if flat.released_at_rest:
                self.gathered.append((flat, flat.full.nbytes))
                self.at_rest[flat.slice.kind] += flat.layout.shard_numel * flat.dtype.itemsize
            else:
                self.always += flat.full.untyped_storage().nbytes()
        self.settled: Sizes = {}
        self.settle()

    def settle(self) -> None:
        """Count tensors that only a step changes."""
        found = self.optimizer.holdings(())
        self.settled = {kind: bytes_behind(tensors) for kind, tensors in found.items()}
        for kind, size in self.at_rest.items():
            self.settled[kind] = self.settled.get(kind, 0) + size

    def now(self) -> Sizes:
        """Return the bytes held now, by kind."""
        if self.optimizer.offloaded.copies:  # `offload_states` has emptied storages of any kind
            return {kind: bytes_behind(tensors) for kind, tensors in self.optimizer.holdings().items()}
        parameters = self.at_rest["parameters"] + self.always
        for flat, size in self.gathered:
            if flat.state is not GatherState.SHARDED:
                parameters += size
            if flat.node_copy is not None:
                parameters += flat.node_copy.nbytes
        gradients = sum(map(_gradient_bytes, self.gradients))
        return {**self.settled, "parameters": parameters, "gradients": gradients}


def _gradient_bytes(gradients: FlatGradients) -> int:
    mine = gradients.grad_slice
    if gradients.local_grads is None and not gradients.uses_param_grad:  # the usual case from stage 2 on
        return 0 if mine is None or gradients.is_on_host else mine.nbytes
    return bytes_behind(gradients.device_memory())
