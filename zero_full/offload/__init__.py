"""Where owned state waits between steps: beside the parameters, or where there is room. Parameters, too."""

from zero_full.offload.blocks import Block, BlockTier
from zero_full.offload.flow import CopyError, Flow
from zero_full.offload.limits import Need, limits_here, refusal
from zero_full.offload.shelf import Shelf, Slice
from zero_full.offload.tiers import DeviceTier, HostTier, Tier, Waiting

__all__ = ["Block", "BlockTier", "CopyError", "DeviceTier", "Flow", "HostTier", "Need", "Shelf", "Slice"]
__all__ += ["Tier", "Waiting", "limits_here", "refusal"]
