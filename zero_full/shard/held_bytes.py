"""How many bytes a rank holds, by kind, cheaply enough to be asked before every collective.

Whole parameters and gradients come and go all the time, so their buffers are looked at. What a step alone
changes (masters, the optimizer's state) is counted after each step. Nobody waits for a device or a disk.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import Tensor

from zero_full._compat import identity_of
from zero_full.shard.optimizer import ZeroOptimizer

Sizes = dict[str, int]


def bytes_behind(tensors: Iterable[Tensor]) -> int:
    """The memory of these tensors; what several of them share is counted once."""
    storages = {identity_of(t.untyped_storage()): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


class HeldBytes:
    """The bytes of what `ZeroOptimizer.holdings` returns."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self.flats, self.owned, self.optimizer = optimizer.flats(), optimizer.owned, optimizer
        self.at_rest: Counter[str] = Counter()  # slices, which are always there
        for flat in self.flats:
            if flat.released_at_rest:
                self.at_rest[flat.slice.kind] += flat.layout.shard * flat.dtype.itemsize
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
        whole = sum(flat.full.untyped_storage().nbytes() for flat in self.flats)
        copies = sum(flat.node_copy.nbytes for flat in self.flats if flat.node_copy is not None)
        parameters = self.at_rest["parameters"] + whole + copies
        return {**self.settled, "parameters": parameters, "gradients": bytes_behind(self._gradients())}

    def _gradients(self) -> Iterator[Tensor]:
        for owned in self.owned:
            yield from owned.bucket.gradient_memory()
