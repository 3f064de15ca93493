"""Every collective the package makes."""

from zero_full.comm.communicator import CommunicationError, Communicator
from zero_full.comm.desync import DesyncError, DisagreementError
from zero_full.comm.lane import Lane, Pending, lane_for
from zero_full.comm.ledger import Traffic
from zero_full.comm.topology import Topology

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
