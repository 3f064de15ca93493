"""Optimizers and learning-rate schedules, by the names that a configuration gives them."""

from zero_full.optim.build import build_optimizer, parameter_groups
from zero_full.optim.elementwise import check_elementwise
from zero_full.optim.lamb import Lamb
from zero_full.optim.lion import Lion
from zero_full.optim.schedules import (
    LRRangeTest,
    OneCycle,
    Schedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
)
from zero_full.optim.step import Piece, Stepper

__all__ = [
    "LRRangeTest",
    "Lamb",
    "Lion",
    "OneCycle",
    "Piece",
    "Schedule",
    "Stepper",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_optimizer",
    "build_scheduler",
    "check_elementwise",
    "parameter_groups",
]
