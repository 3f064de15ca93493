"""Parameters that `zero_full.Init` has recorded and that have no values yet: how the runtime gets at them.

The room `construct` knows more, but nothing in here may import it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class Record(Protocol):
    """What `construct` knows of a tensor."""

    def gathered(self, tensors: Sequence[Tensor], modifier_rank: int | None) -> AbstractContextManager[None]:
        """Inside, these tensors have values; see `GatheredParameters`."""


# Tensors that are inside such a context now -> what is known of them.
opened = WeakIdKeyDictionary()


def record_of(tensor: Tensor) -> Any:
    """What is known of a recorded tensor; None for others."""
    return opened.get(tensor) or getattr(tensor, "_record", None)
