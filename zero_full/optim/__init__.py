"""Optimizers and learning-rate schedules, by the names that a configuration gives them."""

from zero_full.optim.build import build_optimizer, parameter_groups
from zero_full.optim.elementwise import check_elementwise
from zero_full.optim.lamb import Lamb
from zero_full.optim.lion import Lion
from zero_full.optim.muon import Muon, muon_groups
from zero_full.optim.schedules import (
    LRRangeTest,
    OneCycle,
    Schedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
)
from zero_full.optim.step import Peers, Piece, Stepper, Whole, WholeRule

__all__ = [
    "LRRangeTest",
    "Lamb",
    "Lion",
    "Muon",
    "OneCycle",
    "Peers",
    "Piece",
    "Schedule",
    "Stepper",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "Whole",
    "WholeRule",
    "build_optimizer",
    "build_scheduler",
    "check_elementwise",
    "muon_groups",
    "parameter_groups",
]
