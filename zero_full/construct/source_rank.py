"""Choose the rank that broadcasts a tensor's initial values, where ranks have computed different ones."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_full.comm.topology import this_rank
from zero_full.construct.recording import NewestVersion
from zero_full.shard.group.process_groups import Pair


@dataclass(frozen=True)
class ValueReport:
    """One rank's report of its initial values: a digest of each, and newer values on other ranks."""

    digests: dict[str, bytes]
    newest: dict[str, NewestVersion]


class SourceRanks:
    """All ranks of a pair of process groups, by index. All of them must make the same calls."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.here = pair.across.rank * pair.shard.size + pair.shard.rank
        self.ranks: list[int] = pair.gather_objects(this_rank(), "ranks")

    def senders(self, mine: ValueReport) -> dict[int, list[str]]:
        """Return the names of the tensors that each rank must send, by its index. Equal on all ranks."""
        short = (hashlib.blake2b(repr(sorted(mine.digests.items())).encode()).digest(), bool(mine.newest))
        if set(self.pair.gather_objects(short, "values")) == {(short[0], False)}:
            return {}
        reports: list[ValueReport] = self.pair.gather_objects(mine, "values")
        senders: dict[int, list[str]] = {}
        for name in sorted(reports[0].digests):
            sender = _sender_of(name, self.ranks, reports)
            if any(each.digests[name] != reports[sender].digests[name] for each in reports):
                senders.setdefault(sender, []).append(name)
        return dict(sorted(senders.items()))

    def broadcast_from(self, sender: int, tensor: Tensor, what: str) -> Tensor:
        """Broadcast a tensor from the rank `sender`. Other ranks' tensors may be overwritten."""
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        if not raw.numel():
            return tensor
        if sender != self.here:
            raw.zero_()
        for group in (self.pair.shard, self.pair.across):
            if sender == 0:
                group.broadcast(raw, what)
            else:
                group.sum_numbers(raw, what)
        return raw.view(tensor.dtype).view(tensor.shape)


def _sender_of(name: str, ranks: list[int], reports: list[ValueReport]) -> int:
    newest = reports[0].newest.get(name)
    if newest is None:
        return 0
    if newest.rank not in ranks:
        raise ValueError(
            f"{name} was last changed in GatheredParameters(modifier_rank={newest.rank}), but only ranks "
            f"{ranks} hold it. Pass one of these as modifier_rank."
        )
    sender = ranks.index(newest.rank)
    if sender and reports[sender].newest.get(name) != newest:
        raise ValueError(
            f"{name} was changed in GatheredParameters(modifier_rank={newest.rank}), and then differently on "
            f"rank {ranks[0]} and rank {newest.rank}. Make later changes in such a context as well."
        )
    return sender
