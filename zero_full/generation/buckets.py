"""Buckets: how whole tensors are assembled from the ranks' shards, with a limit on memory.

The plan of the buckets follows from layouts and sizes, which are equal on all ranks. A bucket is one buffer.
Its tensors are views of it, so they stay valid as long as the caller keeps one of them.

    kept whole   a tensor that every rank has already: no bucket, no collective
    gathered     a flat buffer that fits into a bucket: one all-gather of the ranks' shards
    merged       single tensors of a flat buffer that does not fit: each rank writes its elements, and the
                 words are summed (`Communicator.merge`)
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero_full.comm.communicator import Communicator
from zero_full.layout.flat import rounded_up
from zero_full.shard.group.changed_elements import ChangedElements
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

    @property
    def is_live(self) -> bool:
        """Whether the parameters themselves are handed over."""
        return self.is_whole and self.dtype == self.flat.dtype

    def fill(self, place: Tensor, low: int) -> None:
        """Write this rank's elements of the range that begins at `low` of the flat buffer to `place`."""
        high = low + place.numel()
        if self.is_whole:
            place.copy_(self.flat.full[low:high])
            return
        mine = self.flat.layout.slice_of(self.flat.ranks.rank)
        first, last = max(low, mine.start), min(high, mine.stop)
        if first < last:
            place[first - low : last - low].copy_(self.shard()[first - mine.start : last - mine.start])


@dataclass(eq=False)
class BucketPart:
    """A part of a bucket."""

    size: int  # bytes
    ranks: Communicator
    merges: bool = False  # its elements are zero on all ranks but their owner

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
            self.ranks.all_gather(as_bytes(values), f"parameters {self.source.flat.name}")

    def read(self, memory: Tensor) -> Iterator[Item]:
        """Yield whole tensors."""
        values, layout = self._values(memory), self.source.flat.layout
        for member in self.members:
            window = layout.windows[member.index]
            flat = values[window.start - self.low : window.stop - self.low]
            yield self.source.names[member], None, flat.view(member.param.shape)


@dataclass(eq=False)
class WholeTensor(BucketPart):
    """A tensor that this rank has whole: it takes nothing of the bucket."""

    name: str = field(kw_only=True)
    tensor: Tensor = field(kw_only=True)
    dtype: torch.dtype = field(kw_only=True)

    def write(self, memory: Tensor) -> None:
        """Do nothing."""

    def read(self, memory: Tensor) -> Iterator[Item]:
        """Yield the tensor itself, or a copy if its dtype is another one."""
        yield self.name, None, self.tensor.detach().to(self.dtype)


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
        """Return the part, with its size."""
        total, ranks = sum(counts), source.flat.ranks
        size = rounded_up(4 * total, ALIGNMENT) + rounded_up(source.dtype.itemsize * total, ALIGNMENT)
        merges = ranks.size > 1
        return SparseTensor(size, ranks, merges, source=source, member=member, changes=changes, counts=counts)

    def _views(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        total, size = sum(self.counts), self.source.dtype.itemsize
        start = rounded_up(4 * total, ALIGNMENT)
        indices, values = memory[: 4 * total], memory[start : start + size * total]
        return indices.view(torch.int32), values.view(self.source.dtype)

    def write(self, memory: Tensor) -> None:
        """Write this rank's elements behind those of the ranks before it."""
        flat, rank = self.source.flat, self.source.flat.ranks.rank
        fragment, numel = flat.fragments.get(self.member.index), self.counts[rank]
        if fragment is None or not numel:
            return
        start, first = fragment.flat_range[0] - flat.layout.slice_of(rank).start, sum(self.counts[:rank])
        mine = self.changes.indices(start, start + fragment.numel)
        values = flat.cut(self.source.shard(), fragment)
        for place, written in zip(
            self._views(memory), (mine + fragment.param_range[0], values[mine.to(values.device)]), strict=True
        ):
            place[first : first + numel].copy_(written)

    def read(self, memory: Tensor) -> Iterator[Item]:
        """Yield the name, the indices in the flattened tensor and the values."""
        yield (self.source.names[self.member], *self._views(memory))


def runs_of(source: FlatSource, bucket_bytes: int) -> Iterator[BucketPart]:
    """Cut a flat buffer into runs of at most `bucket_bytes`, but at least one parameter each."""
    flat, size, layout = source.flat, source.dtype.itemsize, source.flat.layout
    members = [member for member in flat.members if member in source.names]
    if source.is_live:
        yield from (whole(source, member) for member in members)
        return
    if not source.is_whole and (layout.total * size <= bucket_bytes or len(members) == 1):
        yield BucketRun(
            rounded_up(layout.total * size, ALIGNMENT),
            flat.ranks,
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
    """Return the part of one whole parameter."""
    if not source.is_live:
        return run_of(source, [member])
    tensor, name = source.flat.windows[member.index], source.names[member]
    return WholeTensor(0, source.flat.ranks, name=name, tensor=tensor, dtype=source.dtype)


def run_of(source: FlatSource, members: Sequence[Member]) -> BucketRun:
    """Return the run of these neighbours. The ranks' elements of it are merged."""
    numel, low = _span(source, members), source.flat.layout.windows[members[0].index].start
    size = rounded_up(numel * source.dtype.itemsize, ALIGNMENT)
    merges = not source.is_whole and source.flat.ranks.size > 1
    return BucketRun(
        size, source.flat.ranks, merges, source=source, members=list(members), low=low, numel=numel
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
    """Assemble a bucket. Every rank must call this, if `communicates`."""
    merged = [part for part in bucket if part.merges]
    gathered = [part for part in bucket if not part.merges]
    to_merge = sum(part.size for part in merged)
    memory = torch.empty(sum(part.size for part in bucket), dtype=torch.uint8, device=device)
    memory[:to_merge].zero_()
    start, places = 0, dict[BucketPart, Tensor]()
    for part in (*merged, *gathered):
        places[part] = memory[start : start + part.size]
        part.write(places[part])
        start += part.size
    if merged:
        merged[0].ranks.merge(memory[:to_merge], "whole tensors")
    return [item for part in bucket for item in part.read(places[part])]


def communicates(bucket: Sequence[BucketPart]) -> bool:
    """Whether assembling this bucket needs the other ranks."""
    local = (
        isinstance(part, WholeTensor) or (isinstance(part, BucketRun) and part.source.is_whole)
        for part in bucket
    )
    return any(part.ranks.size > 1 and not is_local for part, is_local in zip(bucket, local, strict=True))
