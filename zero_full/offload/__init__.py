"""Where owned state waits between steps: beside the parameters, or somewhere with more room."""

from zero_full.offload.blocks import Block, BlockTier
from zero_full.offload.flow import CopyError, Flow
from zero_full.offload.limits import Need, limits_here, refusal
from zero_full.offload.tiers import DeviceTier, HostTier, Tier

__all__ = ["Block", "BlockTier", "CopyError", "DeviceTier", "Flow", "HostTier", "Need", "Tier"]
__all__ += ["limits_here", "refusal"]
