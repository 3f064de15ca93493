"""Where owned state waits between steps: beside the parameters, or somewhere with more room."""

from zero_full.offload.blocks import BlockTier
from zero_full.offload.tiers import DeviceTier, HostTier, Tier

__all__ = ["BlockTier", "DeviceTier", "HostTier", "Tier"]
