"""Estimate the host memory and disk space that a rank will need, before any is allocated."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from zero_full.kernels.files import PAGE
from zero_full.offload import BlockTier
from zero_full.offload.block_memory import memory_for
from zero_full.offload.spill_file import whole_pages
from zero_full.optim.state_size import can_step_in_parts, state_bytes
from zero_full.shard.deal.dealer import Dealer, Draft, Drafts


@dataclass(frozen=True)
class HostMemory:
    """One rank's bytes in host memory and in files, by kind."""

    rooms: tuple[int, ...]  # bytes of each room in the tier: masters
    state: int  # bytes of optimizer state, as far as its size is known
    passing: tuple[int, ...]  # bytes of each room for gradients and parameters copied from and to a device
    parameters: int  # bytes of parameter slices
    buffers: int  # bytes of buffers for reading and writing files
    knows_state: bool  # the size of the optimizer's state is known
    state_in_file: int  # bytes
    parameters_in_file: int  # bytes

    @property
    def arena(self) -> list[int]:
        """The bytes of each region of the tier's arena."""
        return [*self.rooms, *self.passing]

    @property
    def total(self) -> int:
        """The sum of the bytes in memory."""
        return sum(self.arena) + self.state + self.parameters + self.buffers


def host_memory(base: Optimizer, dealer: Dealer, drafts: Drafts, device: torch.device) -> HostMemory:
    """Estimate this rank's host memory, for parameters on `device`."""
    sizes, tier = Sizes(base, dealer, device), dealer.settings.tier
    away = [draft for draft in drafts.reduce_order if draft in drafts.offloaded and not draft.kind.asleep]
    passing = [size for draft in away for size in sizes.passing(draft) if device.type != "cpu"]
    passing += [sizes.gradient_copies(draft) for draft in away if tier.delay_after is not None]
    parameters, parameters_in_file, parameter_buffers = sizes.released(drafts)
    rooms, states = list(map(sizes.master, away)), list(map(sizes.state, away))
    in_file = isinstance(tier, BlockTier)
    blocks = [whole_pages(room + state) for room, state in zip(rooms, states, strict=True)]
    return HostMemory(
        () if in_file else tuple(rooms),
        0 if in_file else sum(states),
        tuple(passing),
        parameters,
        parameter_buffers + (sizes.buffers(away, blocks) if in_file else 0),
        sizes.knows_state,
        # A part is written to a new place in the file, before the place of its master becomes free.
        sum(blocks) + max(map(whole_pages, rooms), default=0) if in_file else 0,
        parameters_in_file,
    )


class Sizes:
    """Sizes in bytes of the tensors that will be made from drafts."""

    def __init__(self, base: Optimizer, dealer: Dealer, device: torch.device) -> None:
        self.base, self.dealer, self.settings, self.device = base, dealer, dealer.settings, device
        self.dtypes = dealer.settings.dtypes
        # Bytes of state per element, by parameter group and master dtype; None: unknown.
        self.known: dict[tuple[int, torch.dtype], int | None] = {}

    @property
    def knows_state(self) -> bool:
        """Whether all sizes of state that were computed so far are known."""
        return None not in self.known.values()

    def master(self, draft: Draft) -> int:
        """Return the bytes of the region for this rank's master."""
        return draft.layout.shard_numel * self.dtypes.master_of(self._own(draft)).itemsize

    def state(self, draft: Draft) -> int:
        """Return the bytes of optimizer state for this rank's slice, as far as known."""
        master, total = self.dtypes.master_of(self._own(draft)), 0
        for fragment in draft.layout.fragments(self.dealer.rank_of(draft)):
            kind = self.dealer.group_of[draft.named[fragment.index][1]], master
            if kind not in self.known:
                self.known[kind] = state_bytes(self.base, *kind, self.dtypes)
            total += (self.known[kind] or 0) * fragment.numel
        return total

    def _own(self, draft: Draft) -> torch.dtype:
        return draft.kind.run_dtype

    def _copy(self, draft: Draft) -> int:
        """Return the bytes of this rank's copy of parameters that is sent to the device, or 0.

        There is one if it is rounded, or if the master is in a file. An offloaded slice of parameters needs
        none: the step writes to the slice itself.
        """
        own = self._own(draft)
        is_sent = own != self.dtypes.master_of(own) or isinstance(self.settings.tier, BlockTier)
        if not is_sent or (draft.kind.released_at_rest and self.dealer.param_store.is_offloaded):
            return 0
        return draft.layout.shard_numel * own.itemsize

    def passing(self, draft: Draft) -> list[int]:
        """Return the bytes of the arena's regions for gradients and copies of parameters."""
        copy = self._copy(draft)
        gradients = draft.layout.shard_numel * self.dtypes.accumulate_of(self._own(draft)).itemsize
        return [gradients, copy] if copy else [gradients]

    def gradient_copies(self, draft: Draft) -> int:
        """Return the bytes of the gradients that a delayed update copies, see `delayed_update.py`."""
        own = self._own(draft)
        on_cpu = self.device.type == "cpu"
        kept = self.dtypes.master_of(own) if on_cpu else self.dtypes.accumulate_of(own)
        return draft.layout.shard_numel * kept.itemsize

    def released(self, drafts: Drafts) -> tuple[int, int, int]:
        """Return the bytes of parameter slices in host memory, in a file, and of buffers for the file."""
        released = [draft for draft in drafts.everything if draft.kind.released_at_rest]
        kinds = self.dealer.param_store.kinds([draft.layout.shard_numel for draft in released])
        sizes = [draft.layout.shard_numel * self._own(draft).itemsize for draft in released]
        on_host = sum(size for size, kind in zip(sizes, kinds, strict=True) if kind == "host")
        slices = zip(released, sizes, kinds, strict=True)
        files = [(draft, max(whole_pages(size), PAGE)) for draft, size, kind in slices if kind == "disk"]
        tier, in_file = self.settings.param_tier, sum(size for _, size in files)
        if not files or not isinstance(tier, BlockTier):
            return on_host, in_file, 0
        most = tier.buffer_numel * max(self._own(draft).itemsize for draft, _ in files)
        return on_host, in_file, min(in_file, max(most, *(size for _, size in files)))

    def buffers(self, away: Sequence[Draft], blocks: Sequence[int]) -> int:
        """Return the bytes of state in memory: see [Note: state in memory] in `block_memory.py`."""
        limit = self.settings.part_numel
        if limit is None or not can_step_in_parts(self.base):
            return sum(blocks)
        largest = max((draft.layout.shard_numel for draft in away), default=1)
        part = max(blocks, default=0) * max(1, limit // largest)
        numel = sum(draft.layout.shard_numel for draft in away)
        tier = self.settings.tier
        assert isinstance(tier, BlockTier)
        return memory_for(sum(blocks), numel, min(part, sum(blocks)), tier.state_numel)
