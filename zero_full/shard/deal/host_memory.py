"""What a rank will need in the host's memory and on its disks, before it has any of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from zero_full.kernels.files import PAGE
from zero_full.offload import BlockTier
from zero_full.offload.spill_file import whole_pages
from zero_full.optim.fused_adam import is_plain_adam
from zero_full.optim.state_size import bytes_kept, takes_parts
from zero_full.shard.deal.dealer import Dealer, Draft, Drafts


@dataclass(frozen=True)
class HostMemory:
    """Bytes in the host's memory, by kind, and in files."""

    rooms: tuple[int, ...]  # of each room in the tier: masters
    state: int  # what the optimizer makes by itself, as far as that is known
    passing: tuple[int, ...]  # of each room for gradients and parameters on their way to a device and from it
    early: int  # that steps on a guess need beside that
    parameters: int  # slices of parameters
    buffers: int  # through which what waits in files passes
    knows_state: bool  # whether the optimizer's state is known at all
    state_in_file: int
    parameters_in_file: int

    @property
    def total(self) -> int:
        """All of it that is in memory."""
        return sum(self.rooms) + self.state + sum(self.passing) + self.early + self.parameters + self.buffers


def host_memory(base: Optimizer, dealer: Dealer, drafts: Drafts, device: torch.device) -> HostMemory:
    """Of this rank, whose parameters are on `device`."""
    sizes, tier = Sizes(base, dealer, device), dealer.settings.tier
    away = [draft for draft in drafts.leaving if draft in drafts.away and not draft.kind.asleep]
    passing = [size for draft in away for size in sizes.passing(draft) if device.type != "cpu"]
    passing += [sizes.aside(draft) for draft in away if tier.delay_after is not None]
    parameters, parameters_in_file, parameter_buffers = sizes.released(drafts)
    rooms, states = dealer.rooms(drafts), [sizes.state(draft) for draft in away]
    in_file = isinstance(tier, BlockTier)
    blocks = [whole_pages(room + state) for room, state in zip(rooms, states, strict=True)]
    return HostMemory(
        () if in_file else tuple(rooms),
        0 if in_file else sum(states),
        tuple(passing),
        sizes.early(away),
        parameters,
        parameter_buffers + (sizes.buffers(away, blocks) if in_file else 0),
        sizes.knows_state,
        # A part is written to another place than its master was in, which is free again after that.
        sum(blocks) + max(map(whole_pages, rooms), default=0) if in_file else 0,
        parameters_in_file,
    )


class Sizes:
    """Bytes of what will be made of drafts."""

    def __init__(self, base: Optimizer, dealer: Dealer, device: torch.device) -> None:
        self.base, self.dealer, self.settings, self.device = base, dealer, dealer.settings, device
        self.dtypes = dealer.settings.dtypes
        self.known: dict[tuple[int, torch.dtype], int | None] = {}

    @property
    def knows_state(self) -> bool:
        """Whether all that was asked for could be told."""
        return None not in self.known.values()

    def state(self, draft: Draft) -> int:
        """What the optimizer will keep of this rank's slice, as far as that is known."""
        master, total = self.dtypes.master_of(self._own(draft)), 0
        for fragment in draft.layout.fragments(self.dealer.rank_of(draft)):
            kind = self.dealer.group_of[draft.named[fragment.index][1]], master
            if kind not in self.known:
                self.known[kind] = bytes_kept(self.base, *kind, self.dtypes)
            total += (self.known[kind] or 0) * fragment.numel
        return total

    def _own(self, draft: Draft) -> torch.dtype:
        return self.dtypes.of(draft.kind.dtype)

    def _copy(self, draft: Draft) -> int:
        """Of parameters of another type than their master's."""
        own = self._own(draft)
        return draft.layout.shard * own.itemsize if own != self.dtypes.master_of(own) else 0

    def passing(self, draft: Draft) -> list[int]:
        """Gradients and copies of parameters."""
        copy = self._copy(draft)
        gradients = draft.layout.shard * self.dtypes.accumulate_of(self._own(draft)).itemsize
        return [gradients, copy] if copy else [gradients]

    def aside(self, draft: Draft) -> int:
        """Gradients of a delayed update, see `delayed_update.py`."""
        own = self._own(draft)
        on_cpu = self.device.type == "cpu"
        kept = self.dtypes.master_of(own) if on_cpu else self.dtypes.accumulate_of(own)
        return draft.layout.shard * kept.itemsize

    def early(self, away: Sequence[Draft]) -> int:
        """See [Note: early steps]. What lies in that memory is not where it was."""
        tier = self.settings.tier
        if not tier.step_early or self.device.type == "cpu" or not is_plain_adam(self.base):
            return 0
        states = [self.state(draft) for draft in away]
        masters = self.dealer.room_of
        blocks = (
            whole_pages(masters(draft) + state + self._copy(draft)) + PAGE  # it begins with one
            for draft, state in zip(away, states, strict=True)
        )
        everything = 2 * sum(blocks)
        if tier.early_bytes is None or everything <= tier.early_bytes:
            return everything - sum(states)
        return tier.early_bytes

    def released(self, drafts: Drafts) -> tuple[int, int, int]:
        """Slices of parameters that wait in the host's memory and in a file, and buffers for the latter."""
        released = [draft for draft in drafts.everything if draft.kind.released_at_rest]
        kinds = self.dealer.shelf.kinds([draft.layout.shard for draft in released])
        sizes = [draft.layout.shard * self._own(draft).itemsize for draft in released]
        on_host = sum(size for size, kind in zip(sizes, kinds, strict=True) if kind == "host")
        slices = zip(released, sizes, kinds, strict=True)
        files = [(draft, max(whole_pages(size), PAGE)) for draft, size, kind in slices if kind == "disk"]
        tier, in_file = self.settings.param_tier, sum(size for _, size in files)
        if not files or not isinstance(tier, BlockTier):
            return on_host, in_file, 0
        most = tier.buffer_numel * max(self._own(draft).itemsize for draft, _ in files)
        return on_host, in_file, min(in_file, max(most, *(size for _, size in files)))

    def buffers(self, away: Sequence[Draft], blocks: Sequence[int]) -> int:
        """Two parts of the state: see [Note: two buffers] in `nvme_state.py`."""
        limit = self.settings.part_numel
        if limit is None or not takes_parts(self.base):
            return sum(blocks)
        largest = max((draft.layout.shard for draft in away), default=1)
        part = max(blocks, default=0) * max(1, limit // largest)
        return min(sum(blocks), 2 * part)
