"""Where owned state waits between steps: beside the parameters, or somewhere with more room."""

from zero_full.offload.limits import Need, limits_here, refusal
from zero_full.offload.tiers import DeviceTier, HostTier, StateKeeper, Tier

__all__ = ["DeviceTier", "HostTier", "Need", "StateKeeper", "Tier", "limits_here", "refusal"]
