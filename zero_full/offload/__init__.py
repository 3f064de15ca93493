"""Where owned state waits between steps: beside the parameters, or where there is room. Parameters, too."""

from zero_full.offload.blocks import BlockTier
from zero_full.offload.shelf import Shelf, Slice
from zero_full.offload.tiers import DeviceTier, HostTier, Tier, Waiting

__all__ = ["BlockTier", "DeviceTier", "HostTier", "Shelf", "Slice", "Tier", "Waiting"]
