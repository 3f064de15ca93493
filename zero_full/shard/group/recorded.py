"""Lookup of parameters that `zero_full.Init` has recorded (deferred initialization) and not made yet.

Their records are defined in `construct`, which `shard` must not import.
"""

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# Tensors inside `GatheredParameters` -> their records. They are ordinary tensors there, without `_record`.
# A global is safe where ranks are threads: a tensor belongs to one rank.
opened = WeakIdKeyDictionary()


def record_of(tensor: Tensor) -> Any:
    """Return the `Record` of a recorded tensor; None for other tensors."""
    return opened.get(tensor) or getattr(tensor, "_record", None)
