"""What a rank will need in the host's memory, before it has any of it."""

from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from zero_full.optim.kept import bytes_kept
from zero_full.shard.build import Dealer, Draft, Drafts


@dataclass(frozen=True)
class HostMemory:
    """Bytes in the host's memory, by kind."""

    rooms: tuple[int, ...]  # of each room in the tier: masters
    state: int  # what the optimizer makes by itself, as far as that is known
    passing: tuple[int, ...]  # of each room for gradients and parameters on their way to a device and from it

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.rooms) + self.state + sum(self.passing)


def host_memory(base: Optimizer, dealer: Dealer, drafts: Drafts, device: torch.device) -> HostMemory:
    """Of this rank, whose parameters are on `device`."""
    dtypes = dealer.settings.dtypes
    known: dict[tuple[int, torch.dtype], int] = {}

    def state_of(draft: Draft) -> int:
        master, total = dtypes.master_of(dtypes.of(draft.kind.dtype)), 0
        for fragment in draft.layout.fragments(dealer.rank_of(draft)):
            kind = dealer.group_of[draft.named[fragment.index][1]], master
            if kind not in known:
                known[kind] = bytes_kept(base, *kind, dtypes) or 0
            total += known[kind] * fragment.numel
        return total

    def passing_of(draft: Draft) -> list[int]:
        own = dtypes.of(draft.kind.dtype)
        copies = [own] if own != dtypes.master_of(own) else []
        return [draft.layout.shard * dtype.itemsize for dtype in (dtypes.accumulate_of(own), *copies)]

    def aside_of(draft: Draft) -> int:
        own = dtypes.of(draft.kind.dtype)
        kept = dtypes.master_of(own) if device.type == "cpu" else dtypes.accumulate_of(own)
        return draft.layout.shard * kept.itemsize

    away = [draft for draft in drafts.leaving if draft in drafts.away and not draft.kind.asleep]
    passing = [size for draft in away for size in passing_of(draft) if device.type != "cpu"]
    delays = dealer.settings.tier.delay_after is not None
    passing += [aside_of(draft) for draft in away if delays]  # gradients, see `delayed.py`
    return HostMemory(
        tuple(dealer.rooms(drafts)),
        sum(map(state_of, away)),
        tuple(passing),
    )
