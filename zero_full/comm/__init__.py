"""Collectives: communicators, the lanes they run on, process groups, and the bytes they send."""

from zero_full.comm.communicator import Communicator
from zero_full.comm.lane import Lane, Pending, lane_for
from zero_full.comm.topology import Topology
from zero_full.comm.traffic import Traffic
from zero_full.errors import CommunicationError, DesyncError, DisagreementError

__all__ = [
    "CommunicationError",
    "Communicator",
    "DesyncError",
    "DisagreementError",
    "Lane",
    "Pending",
    "Topology",
    "Traffic",
    "lane_for",
]
