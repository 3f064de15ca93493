"""In which numbers we compute: dtypes, the loss scale, and what is too large."""

from zero_full.errors import ScaleExhaustedError
from zero_full.precision.dtypes import Dtypes
from zero_full.precision.scaler import DynamicScale, StaticScale

__all__ = [
    "Dtypes",
    "DynamicScale",
    "ScaleExhaustedError",
    "StaticScale",
]
