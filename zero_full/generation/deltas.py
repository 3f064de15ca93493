"""Hand over only the elements that steps have changed since the last call of `engine.weights(delta=True)`.

The rank that steps a slice notes in the step which of its rounded values change (`ChangedElements`), as one
bit each. So nothing is compared at the call, and no copy of the last weights is kept. The ranks exchange how
many elements of each parameter they have changed, and with that know who sends what:

    nothing      no element has changed
    sparse       indices (int32, in the flattened tensor) and values, in ascending order of the indices
    whole        if that is less: with 16 bits, from a third of the elements on

With merged adapters a step changes no base weight, and every rank merges all of it. So the merge with the
adapters of the last call is computed beside the present one, and compared.

Tensors that no step changes (frozen parameters, buffers) are compared by their column sums, and handed over
whole. So is a parameter that user code or a load has written between steps.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from secrets import randbits

import torch
from torch import Tensor, nn

from zero_full.comm.topology import this_rank
from zero_full.formatting import listed
from zero_full.generation.adapters import Bases, active_adapters
from zero_full.generation.buckets import (
    BucketPart,
    FlatSource,
    SparseTensor,
    SplitSparseTensor,
    in_buckets,
    runs_of,
    whole,
)
from zero_full.generation.weights import (
    Iteration,
    WeightIterator,
    base_weights,
    described,
    merged_weights,
    present,
    sources_of,
    wanted,
)
from zero_full.shard.group.changed_elements import ChangedElements, differing
from zero_full.shard.group.checksum import column_sums
from zero_full.shard.group.dtensors import local_of
from zero_full.shard.group.parameters import FlatParameters
from zero_full.shard.step.optimizer import ZeroOptimizer

log = logging.getLogger("zero_full")
ANOTHER = (
    "another iterator of engine.weights(delta=True) {}. Make one, and iterate it to its end, before the "
    "next. If there are two receivers, send both what one iterator yields, or pass `since`"
)
LONGEST = 2**31 - 1  # elements that an int32 index reaches
VERSION_BITS = 48  # of an engine's first version: JSON's numbers hold the versions exactly


# Changed elements of each data rank, for each tensor-parallel rank; by flat buffer and index of the parameter
Counts = Mapping[tuple[FlatParameters, int], list[list[int]]]


class Deltas:
    """The changes of an engine's parameters since they were handed over. Steps note them from now on.

    Hand-overs are numbered, equally on all ranks. An iterator's `base` is the version that its receiver must
    have, and `version` the one that it has afterwards. Each engine begins with a random number. So a receiver
    that has the version of another engine, or of the run before a restart, gets everything.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: ZeroOptimizer,
        dtype: torch.dtype | None,
        merge_adapters: bool,
        previous: "Deltas | None" = None,
    ) -> None:
        self.module, self.optimizer, self.dtype = module, optimizer, dtype
        self.merge_adapters = merge_adapters
        # of this engine's last hand-over
        self.number: int = _first_version(module, optimizer) if previous is None else previous.number
        self.base = 0  # the hand-over from which changes count; 0: nothing has been handed over
        self.running: object = None  # the hand-over that has begun last
        if previous is not None:  # its iterators raise
            previous.base, previous.running = -1, None
        sources = self._sources()[0]
        self.params = params_of(sources)
        wanted_flats = {source.flat for source in sources}
        self.masters = {
            group.parameters: group.master for group in optimizer.trained if group.parameters in wanted_flats
        }
        for group in optimizer.trained:  # without those of an earlier object
            group.master.changes = None
        for master in self.masters.values():
            master.note_changes(wanted(master.parameters.dtype, dtype))
        self.sums: dict[str, Tensor] = {}  # column sums of tensors that no step changes, when handed over
        self.adapters: dict[str, list[Tensor]] = {}  # adapters of layers when handed over, by name
        self.changes = -1  # the optimizer's `changes` at the last hand-over

    def fits(self, dtype: torch.dtype | None, merge_adapters: bool, since: int | None) -> bool:
        """Return whether these deltas belong to a call with these options."""
        if (self.dtype, self.merge_adapters) != (dtype, merge_adapters):
            return False
        if since is not None and since != self.base:
            if this_rank() == 0 and since:
                log.info(
                    "engine.weights(delta=True, since=%d): changes are noted since version %d, so everything "
                    "is handed over",
                    since,
                    self.base,
                )
            return False
        return params_of(self._sources()[0]) == self.params  # PEFT's `set_adapter` gives names to others

    def _sources(self) -> tuple[list[FlatSource], Mapping[str, Tensor], Bases]:
        rename, bases = base_weights(self.module, self.optimizer, self.merge_adapters)
        return *sources_of(self.module, self.optimizer, self.dtype, rename), bases

    def weights(self, bucket_bytes: int) -> WeightIterator:
        """Return the iterator of `engine.weights(delta=True)`."""
        sources, others, bases = self._sources()
        options = f"delta=True, dtype={self.dtype}, merge_adapters={self.merge_adapters}"
        if bases:
            options += f", with adapters {active_adapters(bases)}"
        call = f"engine.weights(bucket_bytes={bucket_bytes}, {options}) since version {self.base}"
        iteration = Iteration(self.module, self.optimizer, call, self.merge_adapters)
        items = self._hand_over(iteration, sources, others, bases, bucket_bytes, self.base)
        tensors = described(sources, others, self.dtype, bases)
        return WeightIterator(tensors, items, self.base, self.number + 1)

    def _hand_over(
        self,
        iteration: Iteration,
        sources: list[FlatSource],
        others: Mapping[str, Tensor],
        bases: Bases,
        bucket_bytes: int,
        base: int,
    ) -> Iterator[tuple[str, Tensor | None, Tensor]]:
        """Yield the changes: (name, indices or None, values). They count once the caller reaches the end.

        Iterators take turns: of two at once, the second one's receiver would lack what the first one's gets.
        """
        call = iteration.call
        if base != self.base:
            problem = ANOTHER.format("was iterated after this one was made")
            self.optimizer.announce_call(f"{call}, which raised: {problem}")
            raise RuntimeError(f"{call}: {problem}")
        sums, adapters = dict[str, Tensor](), dict[str, list[Tensor]]()
        items = chain(
            self._changed(iteration, sources, others, bucket_bytes, sums),
            self._merged(iteration, bases, sums, adapters),
        )
        self.running = mine = object()
        is_empty = True
        while one := [*islice(items, 1)]:  # in no variable, which would hold the bucket of its tensors
            is_empty = False
            yield one.pop()
            if self.running is not mine:
                problem = ANOTHER.format("was begun before this one was at its end")
                raise RuntimeError(f"{call}: {problem}")
        for master in self.masters.values():
            assert master.changes is not None
            master.changes.taken = None
        if is_empty and self.changes == iteration.changes and this_rank() == 0:
            log.warning(
                "engine.weights(delta=True) hands over nothing: there was no step since version %d was "
                "handed over. If this is a second receiver, pass `since`, the version that it has",
                self.base,
            )
        self.sums |= sums
        self.adapters = adapters
        self.number += 1
        self.base, self.changes, self.running = self.number, iteration.changes, None

    def _changed(
        self,
        iteration: Iteration,
        sources: list[FlatSource],
        others: Mapping[str, Tensor],
        bucket_bytes: int,
        sums: dict[str, Tensor],
    ) -> Iterator[tuple[str, Tensor | None, Tensor]]:
        """Yield the changes of all tensors except base weights with adapters. Adds to `sums`."""
        iteration.begin()
        with torch.no_grad():
            self._take()
            counts = self._counts(sources)
            parts = [part for source in sources for part in self._parts(source, counts, bucket_bytes)]
            sums |= {name: _sums(tensor) for name, tensor in others.items()}
            sums |= {
                source.flat.name: column_sums(source.flat.shard)
                for source in sources
                if source.flat not in self.masters
            }
        parts += self._others(others, sums)
        yield from iteration.assemble(in_buckets(parts, bucket_bytes))

    def _take(self) -> None:
        """Detach the changes noted so far, for one delta. Later writes belong to the next delta."""
        for master in self.masters.values():
            master.take_changes()

    def _taken(self, flat: FlatParameters) -> ChangedElements | None:
        """Return the changes of a flat buffer to hand over; None: no step changes it."""
        master = self.masters.get(flat)
        return None if master is None or master.changes is None else master.changes.taken

    def _others(self, others: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> Iterator[BucketPart]:
        """Yield the parts of tensors outside of flat buffers that changed since they were handed over."""
        new, tensor_ranks = {name: not self._is_known(name, sums[name]) for name in others}, None
        if others and (tensor_ranks := self.optimizer.communicators.tensor) is not None:
            flags = torch.tensor([*new.values()], dtype=torch.int64, device=tensor_ranks.device)
            tensor_ranks.sum_numbers(flags, "changed tensors")
            new = dict(zip(new, flags.bool().tolist(), strict=True))
        for name, tensor in others.items():
            if new[name]:
                yield present(self.optimizer, name, tensor, self.dtype)

    def _merged(
        self,
        iteration: Iteration,
        bases: Bases,
        sums: dict[str, Tensor],
        adapters: dict[str, list[Tensor]],
    ) -> Iterator[tuple[str, Tensor | None, Tensor]]:
        """Yield the changed elements of base weights with their adapters merged, layer by layer.

        The merged weights of the last call are computed once more, from the adapters as they were. Sums tell
        whether they are those that were handed over: not if the base was written, an adapter was scaled, or
        other adapters were active. Adds to `sums` and `adapters`.
        """
        for number, (layer, names) in enumerate(bases):
            key = next(iter(names.values()))
            base = set(layer.get_base_layer().parameters())
            params = [param for param in layer.parameters() if param not in base]
            # In two contexts, so that `merged_adapters` restores the base from a copy: it is merged twice.
            with iteration.whole_layer(layer, number), iteration.whole_layer(layer, number):
                new = merged_weights(self.optimizer, layer, names, self.dtype)
                old = dict[str, Tensor]()
                if key in self.adapters and len(self.adapters[key]) == len(params):
                    with _with_values(params, self.adapters[key]):
                        old = merged_weights(self.optimizer, layer, names, self.dtype)
                adapters[key] = [param.detach().clone() for param in params]
                items = [
                    item
                    for name, values in new.items()
                    for item in self._differences(name, old.get(name), values)
                ]
                sums |= {name: _sums(values) for name, values in new.items()}
            del new, old
            while items:
                yield items.pop(0)

    def _differences(
        self, name: str, old: Tensor | None, new: Tensor
    ) -> Iterator[tuple[str, Tensor | None, Tensor]]:
        """Yield the changed elements of a whole tensor on this rank, or nothing if none has changed."""
        if old is None or not self._is_known(name, _sums(old)):
            yield name, None, new
            return
        differs = differing(old, new).view(-1)
        if count := int(differs.sum()):
            if is_smaller(count, new.numel(), new.element_size()):
                indices = differs.nonzero().view(-1)
                yield name, indices.to(torch.int32), new.view(-1)[indices]
            else:
                yield name, None, new

    def _is_known(self, name: str, sums: Tensor) -> bool:
        return name in self.sums and torch.equal(self.sums[name], sums)

    def _counts(self, sources: list[FlatSource]) -> Counts:
        """Return how many elements each rank has to hand over, by flat buffer and index of the parameter.

        A list for each tensor-parallel rank, with a number for each data rank.
        """
        if not sources:
            return {}
        keys, mine = list[tuple[FlatParameters, int]](), list[Tensor]()
        written, ranks, tensor = (
            list[Tensor](),
            self.optimizer.communicators.dense.shard_comm,
            self.optimizer.communicators.tensor,
        )
        zero = torch.zeros((), dtype=torch.int64, device=ranks.device)
        for flat in (source.flat for source in sources):
            changes = self._taken(flat)
            own = flat.layout.slice_of(flat.shard_comm.rank)
            if changes is None:
                is_new = not self._is_known(flat.name, column_sums(flat.shard))
            else:
                written.append(changes.written.to(zero))
            for member in flat.members:
                fragment, count = flat.fragments.get(member.index), zero
                if fragment is not None and changes is None:
                    count = zero + fragment.numel * is_new
                elif fragment is not None and changes is not None:
                    start = fragment.flat_range[0] - own.start
                    count = changes.count(start, start + fragment.numel).to(zero)
                keys.append((flat, member.index))
                mine.append(count)
        parts, part = (1, 0) if tensor is None else (tensor.size, tensor.rank)
        matrix = torch.zeros(
            parts, ranks.size, len(mine) + len(written), dtype=torch.int64, device=ranks.device
        )
        matrix[part, ranks.rank] = torch.stack([*mine, *written])
        ranks.sum_numbers(matrix, "changed elements")
        if tensor is not None:
            tensor.sum_numbers(matrix, "changed elements")
        columns: list[list[list[int]]] = matrix.permute(2, 0, 1).tolist()
        flats = [source.flat for source in sources if source.flat in self.masters]
        self._tell(flats, [any(map(any, column)) for column in columns[len(mine) :]])
        return dict(zip(keys, columns, strict=False))

    def _tell(self, flats: list[FlatParameters], written: list[bool]) -> None:
        """Log which parameters are handed over whole, because they were written between steps."""
        names = [flat.name for flat, is_written in zip(flats, written, strict=True) if is_written]
        if this_rank() == 0 and names and self.base:
            log.info(
                "engine.weights(delta=True): %s were written between steps (a load, or user code), so they "
                "are handed over whole",
                listed(names),
            )

    def _parts(self, source: FlatSource, counts: Counts, bucket_bytes: int) -> Iterator[BucketPart]:
        """Yield the parts of a flat buffer that have changed."""
        size, flat, kinds = source.dtype.itemsize, source.flat, dict[int, bool]()
        members = [member for member in flat.members if member in source.names]
        for member in members:
            numel, each = member.param.numel(), counts[flat, member.index]
            # Tensor-parallel ranks all have a parameter that is not cut. Its low bits may differ.
            is_same = member.block is not None or all(row == each[0] for row in each)
            if any(map(any, each)):
                changed = sum(map(sum, each if member.block is not None else each[:1]))
                kinds[member.index] = is_same and is_smaller(changed, numel, size)
        if len(kinds) == len(members) and not any(kinds.values()):
            yield from runs_of(source, bucket_bytes)
            return
        for member in members:
            is_sparse = kinds.get(member.index)
            if is_sparse is None:
                continue
            changes, each = self._taken(flat), counts[flat, member.index]
            if not is_sparse or changes is None:
                yield whole(source, member)
            elif member.block is None:
                yield SparseTensor.of(source, member, changes, each[0])
            else:
                yield SplitSparseTensor.of_changes(source, member, changes, each)


def _first_version(module: nn.Module, optimizer: ZeroOptimizer) -> int:
    """Draw the version before an engine's first one, equal on all ranks. Every rank must call this."""
    Iteration(module, optimizer, "engine.weights(delta=True), the first call", False).begin()
    number = torch.tensor([randbits(VERSION_BITS)], device=optimizer.communicators.device)
    for communicator in optimizer.communicators.everyone:
        communicator.broadcast(number, "the first version of the weights")
    return int(number)


def params_of(sources: Sequence[FlatSource]) -> dict[str, int]:
    """Return the identity of the parameter that each name stands for."""
    return {name: id(member.param) for source in sources for member, name in source.names.items()}


def _sums(tensor: Tensor) -> Tensor:
    return column_sums(local_of(tensor).reshape(-1))  # in one row, which may be read as larger words


def is_smaller(changed: int, numel: int, size: int) -> bool:
    """Return whether indices and values of the changed elements take fewer bytes than the whole tensor."""
    return changed * (4 + size) < numel * size and numel <= LONGEST


@contextmanager
def _with_values(params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> Iterator[None]:
    """Give parameters other values within the context, without a write to their memory."""
    memory = [param.data for param in params]
    try:
        for param, value in zip(params, values, strict=True):
            param.data = value
        yield
    finally:
        for param, before in zip(params, memory, strict=True):
            param.data = before
