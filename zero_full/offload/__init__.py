"""Offload of optimizer state and parameters: device, host memory, NVMe."""

from zero_full.errors import CopyError
from zero_full.offload.host_device_copies import Flow
from zero_full.offload.limits import Need, limits_here, refusal
from zero_full.offload.nvme_state import Block, BlockTier
from zero_full.offload.param_store import Shelf, Slice
from zero_full.offload.tiers import DeviceTier, HostTier, Tier, Waiting

__all__ = ["Block", "BlockTier", "CopyError", "DeviceTier", "Flow", "HostTier", "Need", "Shelf", "Slice"]
__all__ += ["Tier", "Waiting", "limits_here", "refusal"]
