"""Choose the rank that broadcasts a tensor's initial values, where ranks have computed different ones."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_full.comm.topology import this_rank
from zero_full.construct.deferred import Elsewhere
from zero_full.shard.group.process_groups import Pair


@dataclass(frozen=True)
class Told:
    """One rank's report of its initial values: a digest of each, and newer values on other ranks."""

    digests: dict[str, bytes]
    elsewhere: dict[str, Elsewhere]


class Everyone:
    """All ranks of a pair of process groups, by index. All of them must make the same calls."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.here = pair.across.rank * pair.shard.size + pair.shard.rank
        self.ranks: list[int] = pair.gather_objects(this_rank(), "ranks")

    def who_speaks(self, mine: Told) -> dict[int, list[str]]:
        """Return the names of the tensors that each rank must send, by its index. Equal on all ranks."""
        short = hashlib.blake2b(repr(sorted(mine.digests.items())).encode()).digest(), bool(mine.elsewhere)
        if set(self.pair.gather_objects(short, "values")) == {(short[0], False)}:
            return {}
        told: list[Told] = self.pair.gather_objects(mine, "values")
        speaking: dict[int, list[str]] = {}
        for name in sorted(told[0].digests):
            speaker = _speaker(name, self.ranks, told)
            if any(each.digests[name] != told[speaker].digests[name] for each in told):
                speaking.setdefault(speaker, []).append(name)
        return dict(sorted(speaking.items()))

    def hear(self, speaker: int, tensor: Tensor, what: str) -> Tensor:
        """Broadcast a tensor from the rank `speaker`. Other ranks' tensors may be overwritten."""
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
