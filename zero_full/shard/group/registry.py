"""Map from parameters to their `ZeroOptimizer`, so that no attribute is set on a parameter."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

# Parameter -> weak reference to its optimizer, for calls that get a parameter only. The map keeps neither
# alive. A global is safe where ranks are threads: a parameter belongs to one rank.
_owners = WeakIdKeyDictionary()


def refuse_owned(named: Iterable[tuple[str, Parameter]]) -> None:
    """Raise ValueError if one of these parameters already belongs to an optimizer."""
    for name, param in named:
        if owner_of(param) is not None:
            raise ValueError(
                f"{name} already belongs to an engine. Call its destroy() before initializing another one "
                "on the same model"
            )


def register(optimizer: Any, params: Iterable[Parameter]) -> None:
    """Register these parameters as this optimizer's."""
    for param in params:
        _owners[param] = weakref.ref(optimizer)


def unregister(params: Iterable[Parameter]) -> None:
    """Remove these parameters from the map."""
    for param in params:
        _owners.pop(param, None)


def owner_of(param: Tensor) -> Any:
    """Return the optimizer that the parameter belongs to, or None."""
    reference = _owners.get(param)
    return None if reference is None else reference()
