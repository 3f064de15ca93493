"""The ZeRO runtime: buckets of parameters, when their gradients are averaged, and the sharded step."""

from zero_full.shard.build import Dealer, Sharded, place_the_rest
from zero_full.shard.groups import Connection, Groups, connect
from zero_full.shard.optimizer import ZeroOptimizer
from zero_full.shard.report import StepReport
from zero_full.shard.settings import Gathering, Settings

__all__ = [
    "Connection",
    "Dealer",
    "Gathering",
    "Groups",
    "Settings",
    "Sharded",
    "StepReport",
    "ZeroOptimizer",
    "connect",
    "place_the_rest",
]
