"""Where owned state waits between steps: beside the parameters, or somewhere with more room."""

from zero_full.offload.blocks import BlockTier
from zero_full.offload.limits import Need, limits_here, refusal
from zero_full.offload.tiers import DeviceTier, HostTier, Tier

__all__ = ["BlockTier", "DeviceTier", "HostTier", "Need", "Tier", "limits_here", "refusal"]
