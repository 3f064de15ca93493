"""Which optimizer a parameter belongs to. Nothing is written on the parameter itself."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

# Parameter -> weak reference to its optimizer, for calls that have nothing but a parameter. Each belongs to
# one rank, also where ranks are threads, and nobody is kept alive by being known here.
_owners = WeakIdKeyDictionary()


def refuse_owned(named: Iterable[tuple[str, Parameter]]) -> None:
    """ValueError if one of these parameters belongs to an optimizer already."""
    for name, param in named:
        if owner_of(param) is not None:
            raise ValueError(
                f"{name} already belongs to an engine. Call its destroy() before initializing another one "
                "on the same model"
            )


def register(optimizer: Any, params: Iterable[Parameter]) -> None:
    """Note that these parameters belong to this optimizer."""
    for param in params:
        _owners[param] = weakref.ref(optimizer)


def unregister(params: Iterable[Parameter]) -> None:
    """Note that these parameters belong to no optimizer any more."""
    for param in params:
        _owners.pop(param, None)


def owner_of(param: Tensor) -> Any:
    """The optimizer that the parameter belongs to, or None."""
    reference = _owners.get(param)
    return None if reference is None else reference()
