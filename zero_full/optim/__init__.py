"""Optimizers and learning-rate schedules, and how they step sharded parameters."""

from zero_full.optim.build import build_optimizer, parameter_groups, served_stages
from zero_full.optim.elementwise import check_elementwise
from zero_full.optim.fused_adam import FusedAdam
from zero_full.optim.lamb import Lamb
from zero_full.optim.lion import Lion
from zero_full.optim.muon import Muon, muon_groups
from zero_full.optim.one_bit import OneBitAdam
from zero_full.optim.one_bit_lamb import OneBitLamb
from zero_full.optim.schedules import (
    LRRangeTest,
    OneCycle,
    Schedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
)
from zero_full.optim.step import Average, OwnerRule, Peers, Piece, Stepper, Whole, WholeRule
from zero_full.optim.zero_one_adam import ZeroOneAdam

__all__ = [
    "Average",
    "FusedAdam",
    "LRRangeTest",
    "Lamb",
    "Lion",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "OneCycle",
    "OwnerRule",
    "Peers",
    "Piece",
    "Schedule",
    "Stepper",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "Whole",
    "WholeRule",
    "ZeroOneAdam",
    "build_optimizer",
    "build_scheduler",
    "check_elementwise",
    "muon_groups",
    "parameter_groups",
    "served_stages",
]
