"""Warn when less state or fewer parameters than requested could be offloaded."""

import logging

from zero_full.offload import BlockTier
from zero_full.settings import Settings
from zero_full.shard.deal.dealer import Drafts, Sharded

log = logging.getLogger("zero_full")
NEAR = 0.1  # fraction of the state: no warning for a smaller difference from the requested ratio


def warn_of_share(drafts: Drafts, settings: Settings) -> None:
    """Warn if the offloaded share of the optimizer's state is far from the requested ratio."""
    asked, everything = settings.tier.ratio, sum(draft.numel for draft in drafts.reduce_order)
    if not (settings.tier.is_offloaded and everything):
        return
    away = sum(draft.numel for draft in drafts.offloaded) / everything
    if abs(away - asked) > NEAR:
        cut = "buckets and units" if settings.releases_parameters else "buckets"
        largest = max(draft.numel for draft in drafts.reduce_order) / everything
        log.warning(
            f"offload_optimizer.ratio is {asked:g}, but {away:.2f} of the optimizer's state is offloaded. "
            f"Only whole {cut} can be: there are {len(drafts.reduce_order)}, the largest with "
            f"{largest:.2f} of all elements. A smaller reduce_bucket_size makes smaller buckets, but not "
            "smaller units"
        )


def warn_of_parameters(parts: Sharded, settings: Settings) -> None:
    """Warn if no parameter is offloaded although `param_tier` requests it."""
    tier, flats = settings.param_tier, parts.flats
    if not (tier.is_offloaded and parts.param_store.is_offloaded) or any(
        flat.slice.kind == tier.kind for flat in flats
    ):
        return
    if isinstance(tier, BlockTier) and any(flat.kind.released_at_rest for flat in flats):
        why = (
            f"max_in_cpu is {tier.memory_numel:,}, so all elements of this rank's slices stay in memory. "
            "Set a smaller number, or 0"
        )
    else:
        why = "no module's parameters are released. See stage3_param_persistence_threshold"
    where = "nvme_path" if isinstance(tier, BlockTier) else "the host"
    log.warning(f"offload_param has no effect, because no parameter is offloaded to {where}: {why}")
