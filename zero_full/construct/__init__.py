"""Deferred initialization: construct models without memory and compute parameter values in `initialize`."""

from zero_full.construct.deferred_model import Deferred
from zero_full.construct.init import Init, OnDevice
from zero_full.construct.recorded_tensor import has_values
from zero_full.construct.session import outside_recording

__all__ = ["Deferred", "Init", "OnDevice", "has_values", "outside_recording"]
