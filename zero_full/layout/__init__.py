"""Layouts of flat buffers as integers: no tensors, no devices, no process groups."""

from zero_full.layout.balance import Share, deal_work
from zero_full.layout.flat import FlatLayout, Fragment
from zero_full.layout.order import backward_order, deal, in_order, round_robin

__all__ = [
    "FlatLayout",
    "Fragment",
    "Share",
    "backward_order",
    "deal",
    "deal_work",
    "in_order",
    "round_robin",
]
