"""Parameters that `zero_full.Init` has recorded and that have no values yet: how the runtime gets at them.

The room `construct` knows more, but nothing in here may import it.
"""

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# Tensors that are inside `GatheredParameters` now -> what `construct` knows of them, as they are ordinary
# ones meanwhile. Each belongs to one rank, also where ranks are threads.
opened = WeakIdKeyDictionary()


def record_of(tensor: Tensor) -> Any:
    """What `construct` knows of a recorded tensor, a `Record`; None for others."""
    return opened.get(tensor) or getattr(tensor, "_record", None)
