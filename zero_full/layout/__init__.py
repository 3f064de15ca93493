"""Layouts of flat buffers as integers: no tensors, no devices, no process groups."""

from zero_full.layout.balance import Share, assign_work
from zero_full.layout.block import LocalBlock
from zero_full.layout.flat import FlatLayout, Fragment
from zero_full.layout.order import backward_order, deal, round_robin

__all__ = [
    "FlatLayout",
    "Fragment",
    "LocalBlock",
    "Share",
    "assign_work",
    "backward_order",
    "deal",
    "round_robin",
]
