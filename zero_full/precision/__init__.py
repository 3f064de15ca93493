"""Mixed precision: the dtypes of a run, the loss scale, and the norm of gradients."""

from zero_full.precision.dtypes import Dtypes
from zero_full.precision.scaler import DynamicScale, StaticScale

__all__ = ["Dtypes", "DynamicScale", "StaticScale"]
