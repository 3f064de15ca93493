"""Models that are constructed without memory and get their values later, one parameter at a time."""

from zero_full.construct.init import Deferred, Init

__all__ = ["Deferred", "Init"]
