"""The ZeRO runtime: buckets of parameters, when their gradients are averaged, and the sharded step."""

from zero_full.shard.build import Connection, Groups, connect, make_buckets, settle_the_rest
from zero_full.shard.optimizer import StepReport, ZeroOptimizer
from zero_full.shard.settings import Settings

__all__ = [
    "Connection",
    "Groups",
    "Settings",
    "StepReport",
    "ZeroOptimizer",
    "connect",
    "make_buckets",
    "settle_the_rest",
]
