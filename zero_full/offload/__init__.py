"""Where owned state waits between steps: beside the parameters, or somewhere with more room."""

from zero_full.offload.blocks import Block, BlockTier
from zero_full.offload.flow import CopyError, Flow
from zero_full.offload.tiers import DeviceTier, HostTier, Tier

__all__ = ["Block", "BlockTier", "CopyError", "DeviceTier", "Flow", "HostTier", "Tier"]
