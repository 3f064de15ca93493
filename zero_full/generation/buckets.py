"""Buckets: how whole tensors are assembled from the ranks' shards, with a limit on memory.

The plan of the buckets follows from layouts and sizes, which are equal on all ranks. A bucket is one buffer.
Its tensors are views of it, so they stay valid as long as the caller keeps one of them.

    kept whole   a tensor that every rank has already: no bucket, no collective
    gathered     a flat buffer that fits into a bucket: one all-gather of the ranks' shards
    merged       single tensors of a flat buffer that does not fit: each rank writes its elements, and the
                 words are summed (`Communicator.merge`)
    split        a DTensor that is cut: its local tensor is assembled in one of the ways above, goes to its
                 block of the whole tensor, and the tensor-parallel ranks' blocks are merged. Changed elements
                 of its local tensor get their indices in the whole one instead, and are merged likewise
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from zero_full.comm.communicator import Communicator
from zero_full.layout import LocalBlock
from zero_full.layout.flat import rounded_up
from zero_full.shard.group.changed_elements import ChangedElements
from zero_full.shard.group.dtensors import block_of, largest_numel
from zero_full.shard.group.parameters import FlatParameters, Member, as_bytes

ALIGNMENT = 16  # bytes
Item = tuple[str, Tensor | None, Tensor]  # name, indices (None: all elements), values


@dataclass(frozen=True, eq=False)
class FlatSource:
    """The values of a flat buffer to hand over: this rank's shard, or the whole buffer."""

    flat: FlatParameters
    dtype: torch.dtype  # of the tensors that are handed over
    shard: Callable[[], Tensor]  # this rank's values, perhaps in another dtype
    is_whole: bool  # every rank has the whole buffer in `flat.full`
    names: dict[Member, str]  # the parameters to hand over
    tensor_ranks: Communicator | None  # the tensor-parallel ranks, which have other blocks of DTensors

    @property
    def is_live(self) -> bool:
        """Whether the values are the model's parameters themselves, not a copy."""
        return self.is_whole and self.dtype == self.flat.dtype

    def fill(self, place: Tensor, low: int) -> None:
        """Write this rank's elements of the range that begins at `low` of the flat buffer to `place`."""
        high = low + place.numel()
        if self.is_whole:
            place.copy_(self.flat.full[low:high])
            return
        mine = self.flat.layout.slice_of(self.flat.shard_comm.rank)
        first, last = max(low, mine.start), min(high, mine.stop)
        if first < last:
            place[first - low : last - low].copy_(self.shard()[first - mine.start : last - mine.start])


@dataclass(eq=False)
class BucketPart:
    """A part of a bucket: the memory for one tensor, or for neighbouring ones."""

    size: int  # bytes, equal on all ranks
    comm: Communicator
    merges: bool = False  # its elements are zero on all ranks but their owner

    @property
    def local(self) -> "BucketPart":
        """The bucket part of a DTensor's local tensor; for any other tensor, this part itself."""
        return self

    def write(self, memory: Tensor) -> None:
        """Write this rank's elements into the part's bytes, and gather it, unless it `merges`."""
        raise NotImplementedError

    def read(self, memory: Tensor) -> Iterator[Item]:
        """Yield the name, the indices (None: all elements) and the values of each tensor."""
        raise NotImplementedError


@dataclass(eq=False)
class BucketRun(BucketPart):
    """Neighbouring parameters of one flat buffer."""

    source: FlatSource = field(kw_only=True)
    members: Sequence[Member] = field(kw_only=True)
    low: int = field(kw_only=True)  # first element in the flat buffer
    numel: int = field(kw_only=True)

    def _values(self, memory: Tensor) -> Tensor:
        return memory[: self.numel * self.source.dtype.itemsize].view(self.source.dtype)

    def write(self, memory: Tensor) -> None:
        """Write this rank's elements, and all-gather the run if it is a whole flat buffer."""
        values = self._values(memory)
        self.source.fill(values, self.low)
        if not (self.merges or self.source.is_whole):
            self.comm.all_gather(as_bytes(values), f"parameters {self.source.flat.name}")

    def read(self, memory: Tensor) -> Iterator[Item]:
        """Yield whole tensors."""
        values, layout = self._values(memory), self.source.flat.layout
        for member in self.members:
            window = layout.windows[member.index]
            flat = values[window.start - self.low : window.stop - self.low]
            yield self.source.names[member], None, flat.view(member.shape)


@dataclass(eq=False)
class WholeTensor(BucketPart):
    """A tensor that this rank has whole. It takes no memory of the bucket."""

    name: str = field(kw_only=True)
    tensor: Tensor = field(kw_only=True)
    dtype: torch.dtype = field(kw_only=True)

    def write(self, memory: Tensor) -> None:
        """Do nothing."""

    def read(self, memory: Tensor) -> Iterator[Item]:
        """Yield the tensor itself, or a copy if its dtype is another one."""
        yield self.name, None, self.tensor.detach().to(self.dtype)


@dataclass(eq=False)
class SplitTensor(BucketPart):
    """A DTensor that is cut over the tensor-parallel ranks of `comm`."""

    name: str = field(kw_only=True)
    block: LocalBlock = field(kw_only=True)
    dtype: torch.dtype = field(kw_only=True)
    inner: BucketPart = field(kw_only=True)  # assembles the local tensor

    @staticmethod
    def of(
        tensor: Any, name: str, dtype: torch.dtype, inner: BucketPart, tensor_ranks: Communicator
    ) -> BucketPart:
        """Return the bucket part of a DTensor, or `inner` if it is not cut.

        The size counts the largest local tensor: ranks cut a tensor into unequal parts, and plan alike.
        """
        block = block_of(tensor)
        if block is None:
            return inner
        local = 0 if isinstance(inner, WholeTensor) else largest_numel(tensor) * dtype.itemsize
        size = rounded_up(local, ALIGNMENT) + _whole_size(block, dtype)
        return SplitTensor(size, tensor_ranks, name=name, block=block, dtype=dtype, inner=inner)

    @property
    def local(self) -> BucketPart:
        """The bucket part of the local tensor."""
        return self.inner

    @property
    def whole_size(self) -> int:
        """Bytes of the whole tensor, rounded up."""
        return _whole_size(self.block, self.dtype)

    def _whole(self, memory: Tensor) -> Tensor:
        return memory[: prod(self.block.shape) * self.dtype.itemsize].view(self.dtype).view(self.block.shape)

    def put(self, place: Tensor, memory: Tensor) -> None:
        """Copy the local tensor, which is assembled at `place`, to its block of the whole tensor."""
        ((_, _, local),) = self.inner.read(place)
        block = self.block
        self._whole(memory).narrow(block.dim, block.offset, block.size).copy_(local)

    def read(self, memory: Tensor) -> Iterator[Item]:
        """Yield the whole tensor."""
        yield self.name, None, self._whole(memory)


def _whole_size(block: LocalBlock, dtype: torch.dtype) -> int:
    return rounded_up(prod(block.shape) * dtype.itemsize, ALIGNMENT)


@dataclass(eq=False)
class SparseTensor(BucketPart):
    """The changed elements of one parameter: their indices, then their values."""

    source: FlatSource = field(kw_only=True)
    member: Member = field(kw_only=True)
    changes: ChangedElements = field(kw_only=True)
    counts: Sequence[int] = field(kw_only=True)  # of each rank

    @staticmethod
    def of(
        source: FlatSource, member: Member, changes: ChangedElements, counts: Sequence[int]
    ) -> "SparseTensor":
        """Return the bucket part of a parameter's changed elements, with its size."""
        size, comm = _sparse_size(sum(counts), source.dtype.itemsize), source.flat.shard_comm
        merges = comm.size > 1
        return SparseTensor(size, comm, merges, source=source, member=member, changes=changes, counts=counts)

    def _views(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        return _sparse_views(memory, sum(self.counts), self.source.dtype)

    def write(self, memory: Tensor) -> None:
        """Write this rank's elements behind those of the ranks before it."""
        flat, rank = self.source.flat, self.source.flat.shard_comm.rank
        fragment, numel = flat.fragments.get(self.member.index), self.counts[rank]
        if fragment is None or not numel:
            return
        start, first = fragment.flat_range[0] - flat.layout.slice_of(rank).start, sum(self.counts[:rank])
        indices, values = self._views(memory)
        mine = flat.cut(self.source.shard(), fragment)
        for found in self.changes.indices(start, start + fragment.numel):
            last = first + found.numel()
            values[first:last].copy_(mine[found.to(mine.device)])
            indices[first:last].copy_(found.add_(fragment.param_range[0]))
            first = last

    def read(self, memory: Tensor) -> Iterator[Item]:
        """Yield the name, the indices in the flattened tensor and the values."""
        yield (self.source.names[self.member], *self._views(memory))


@dataclass(eq=False)
class SplitSparseTensor(SplitTensor):
    """The changed elements of a DTensor that is cut. The `inner` part has those of this rank's block."""

    totals: Sequence[int] = field(kw_only=True)  # changed elements of each tensor-parallel rank's block

    @staticmethod
    def of_changes(
        source: FlatSource, member: Member, changes: ChangedElements, counts: Sequence[Sequence[int]]
    ) -> "SplitSparseTensor":
        """Return the bucket part of a cut DTensor's changed elements.

        `counts`: of each data rank, for each tensor-parallel rank.
        """
        tensor_ranks, block, size = source.tensor_ranks, member.block, source.dtype.itemsize
        assert tensor_ranks is not None and block is not None
        inner = SparseTensor.of(source, member, changes, counts[tensor_ranks.rank])
        totals = [sum(each) for each in counts]
        return SplitSparseTensor(
            _sparse_size(max(totals), size) + _sparse_size(sum(totals), size),
            tensor_ranks,
            name=source.names[member],
            block=block,
            dtype=source.dtype,
            inner=inner,
            totals=totals,
        )

    @property
    def whole_size(self) -> int:
        """Bytes of the changed elements of all blocks, rounded up."""
        return _sparse_size(sum(self.totals), self.dtype.itemsize)

    def put(self, place: Tensor, memory: Tensor) -> None:
        """Copy this block's elements, which are assembled at `place`, behind those of earlier blocks."""
        ((_, local, mine),) = self.inner.read(place)
        assert local is not None
        first = sum(self.totals[: self.comm.rank])
        indices, values = _sparse_views(memory, sum(self.totals), self.dtype)
        rows = local.long().div_(self.block.row, rounding_mode="floor") if local.numel() else local.long()
        start = self.block.offset * self.block.stride
        moved = local.long() + rows * (self.block.pitch - self.block.row) + start
        indices[first : first + local.numel()].copy_(moved)
        values[first : first + local.numel()].copy_(mine)

    def read(self, memory: Tensor) -> Iterator[Item]:
        """Yield the name, the indices in the flattened whole tensor, ascending, and the values."""
        indices, values = _sparse_views(memory, sum(self.totals), self.dtype)
        if prod(self.block.shape[: self.block.dim]) > 1:  # rows of the blocks alternate
            indices, order = indices.sort()
            values = values[order]
        yield self.name, indices, values


def _sparse_size(total: int, size: int) -> int:
    return rounded_up(4 * total, ALIGNMENT) + rounded_up(size * total, ALIGNMENT)


def _sparse_views(memory: Tensor, total: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the indices and the values of changed elements in a part's bytes."""
    start = rounded_up(4 * total, ALIGNMENT)
    values = memory[start : start + dtype.itemsize * total]
    return memory[: 4 * total].view(torch.int32), values.view(dtype)


def runs_of(source: FlatSource, bucket_bytes: int) -> Iterator[BucketPart]:
    """Cut a flat buffer into runs of at most `bucket_bytes`, but at least one parameter each."""
    flat, size, layout = source.flat, source.dtype.itemsize, source.flat.layout
    members = [member for member in flat.members if member in source.names]
    if source.is_live or any(member.block is not None for member in members):
        yield from (whole(source, member) for member in members)
        return
    if not source.is_whole and (layout.total * size <= bucket_bytes or len(members) == 1):
        yield BucketRun(
            rounded_up(layout.total * size, ALIGNMENT),
            flat.shard_comm,
            source=source,
            members=members,
            low=0,
            numel=layout.total,
        )
        return
    some = list[Member]()
    for member in members:
        if some and _span(source, [*some, member]) * size > bucket_bytes:
            yield run_of(source, some)
            some = []
        some.append(member)
    if some:
        yield run_of(source, some)


def whole(source: FlatSource, member: Member) -> BucketPart:
    """Return the bucket part of one whole parameter."""
    name = source.names[member]
    if source.is_live:
        tensor = source.flat.windows[member.index]
        part: BucketPart = WholeTensor(
            0, source.flat.shard_comm, name=name, tensor=tensor, dtype=source.dtype
        )
    else:
        part = run_of(source, [member])
    if source.tensor_ranks is None:
        return part
    return SplitTensor.of(member.param, name, source.dtype, part, source.tensor_ranks)


def run_of(source: FlatSource, members: Sequence[Member]) -> BucketRun:
    """Return the bucket part of neighbouring parameters. The ranks' elements of it are merged."""
    numel, low = _span(source, members), source.flat.layout.windows[members[0].index].start
    size = rounded_up(numel * source.dtype.itemsize, ALIGNMENT)
    merges = not source.is_whole and source.flat.shard_comm.size > 1
    return BucketRun(
        size, source.flat.shard_comm, merges, source=source, members=list(members), low=low, numel=numel
    )


def _span(source: FlatSource, members: Sequence[Member]) -> int:
    windows = source.flat.layout.windows
    return int(windows[members[-1].index].stop - windows[members[0].index].start)


def in_buckets(parts: Iterable[BucketPart], bucket_bytes: int) -> Iterator[list[BucketPart]]:
    """Join consecutive parts up to `bucket_bytes`, at least one."""
    some, room = list[BucketPart](), bucket_bytes
    for part in parts:
        if some and part.size > room:
            yield some
            some, room = [], bucket_bytes
        some.append(part)
        room -= part.size
    if some:
        yield some


def assembled(bucket: Sequence[BucketPart], device: torch.device) -> list[Item]:
    """Return the items of a bucket, from all ranks' shards. Every rank must call this, if `communicates`."""
    split = [part for part in bucket if isinstance(part, SplitTensor)]
    local = [part.local for part in bucket]
    merged, gathered = [p for p in local if p.merges], [p for p in local if not p.merges]
    to_merge, to_join = sum(part.size for part in merged), sum(part.whole_size for part in split)
    size = sum(part.size for part in local)
    memory = torch.empty(size + to_join, dtype=torch.uint8, device=device)
    memory[:to_merge].zero_()
    start, places = 0, dict[BucketPart, Tensor]()
    for part in (*merged, *gathered):
        places[part] = memory[start : start + part.size]
        part.write(places[part])
        start += part.size
    if to_merge:
        merged[0].comm.merge(memory[:to_merge], "whole tensors")
    if split:
        memory[size:].zero_()
        for part in split:
            places[part] = memory[start : start + part.whole_size]
            part.put(places[part.inner], places[part])
            start += part.whole_size
        split[0].comm.merge(memory[size:], "whole DTensors")
    return [item for part in bucket for item in part.read(places[part])]


def communicates(bucket: Sequence[BucketPart]) -> bool:
    """Return whether assembling this bucket needs the other ranks."""
    return any(part.comm.size > 1 and not _is_here(part) for one in bucket for part in (one, one.local))


def _is_here(part: BucketPart) -> bool:
    return isinstance(part, WholeTensor) or (isinstance(part, BucketRun) and part.source.is_whole)
