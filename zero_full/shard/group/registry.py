"""Maps from tensors to their `ZeroOptimizer`, or to their record before there is one.

So no attribute is set on a parameter. Globals are safe where ranks are threads: a tensor belongs to one rank.
Neither map keeps a tensor or an optimizer alive.
"""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

_owners = WeakIdKeyDictionary()  # parameter -> weak reference to its optimizer, for calls that get no engine
# Tensors that `zero_full.Init` has recorded (deferred initialization) -> their records, while they are inside
# `GatheredParameters`. They are ordinary tensors there, without `_record`.
opened = WeakIdKeyDictionary()


def check_unowned(named: Iterable[tuple[str, Parameter]]) -> None:
    """Raise ValueError if one of these parameters already belongs to an optimizer."""
    for name, param in named:
        if owner_of(param) is not None:
            raise ValueError(
                f"{name} already belongs to an engine. Call that engine's destroy() before you initialize "
                "another one with the same model"
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


def record_of(tensor: Tensor) -> Any:
    """Return the `Record` (in `construct`, which `shard` must not import) of a recorded tensor, or None."""
    return opened.get(tensor) or getattr(tensor, "_record", None)
