"""Offload of optimizer state and parameters: device, host memory, NVMe."""

from zero_full.offload.host_device_copies import CopyThreads
from zero_full.offload.limits import Need, memory_limits, shortage_message
from zero_full.offload.nvme_state import BlockTier
from zero_full.offload.param_store import ParamSlice, ParamStore
from zero_full.offload.tiers import DeviceTier, HostTier, Offload, Tier

__all__ = [
    "BlockTier",
    "CopyThreads",
    "DeviceTier",
    "HostTier",
    "Need",
    "Offload",
    "ParamSlice",
    "ParamStore",
    "Tier",
    "memory_limits",
    "shortage_message",
]
