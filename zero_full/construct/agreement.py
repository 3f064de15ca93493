"""Whose values count, where ranks that share a model have different ones."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_full.comm.topology import this_rank
from zero_full.construct.deferred import Elsewhere
from zero_full.shard.group.process_groups import Pair


@dataclass(frozen=True)
class Told:
    """What a rank tells the others about its values."""

    digests: dict[str, bytes]
    elsewhere: dict[str, Elsewhere]


class Everyone:
    """The ranks of a pair, by their places in it. All of them must make the same calls."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.here = pair.across.rank * pair.shard.size + pair.shard.rank
        self.ranks: list[int] = pair.everyones(this_rank(), "ranks")

    def who_speaks(self, mine: Told) -> dict[int, list[str]]:
        """The names of the values that each speaker sends, by its place; the same on all ranks."""
        short = hashlib.blake2b(repr(sorted(mine.digests.items())).encode()).digest(), bool(mine.elsewhere)
        if set(self.pair.everyones(short, "values")) == {(short[0], False)}:
            return {}
        told: list[Told] = self.pair.everyones(mine, "values")
        speaking: dict[int, list[str]] = {}
        for name in sorted(told[0].digests):
            speaker = _speaker(name, self.ranks, told)
            if any(each.digests[name] != told[speaker].digests[name] for each in told):
                speaking.setdefault(speaker, []).append(name)
        return dict(sorted(speaking.items()))

    def hear(self, speaker: int, tensor: Tensor, what: str) -> Tensor:
        """The speaker's values of this tensor. On other ranks the tensor may be written over."""
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        if not raw.numel():
            return tensor
        if speaker != self.here:
            raw.zero_()
        for group in (self.pair.shard, self.pair.across):
            if speaker == 0:
                group.broadcast(raw, what)
            else:
                group.sum_numbers(raw, what)
        return raw.view(tensor.dtype).view(tensor.shape)


def _speaker(name: str, ranks: list[int], told: list[Told]) -> int:
    newest = told[0].elsewhere.get(name)
    if newest is None:
        return 0
    if newest.rank not in ranks:
        raise ValueError(
            f"{name} was last changed in GatheredParameters(modifier_rank={newest.rank}), but that rank is "
            f"none of {ranks}, which share it"
        )
    speaker = ranks.index(newest.rank)
    if speaker and told[speaker].elsewhere.get(name) != newest:
        raise ValueError(
            f"{name} was changed in GatheredParameters(modifier_rank={newest.rank}), and then differently on "
            f"rank {ranks[0]} and rank {newest.rank}: make later changes in such a context, too"
        )
    return speaker
