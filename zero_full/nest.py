"""What models take and return: tensors in tuples, lists, dicts and dataclasses."""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import is_dataclass, replace
from typing import Any

from torch import Tensor


def mapped(function: Callable[[Any], Any], nest: Any) -> Any:
    """The nest of tuples, lists, dicts and dataclasses with every leaf mapped."""
    if isinstance(nest, Mapping):
        filled = copy(nest)
        for key, value in nest.items():
            filled[key] = mapped(function, value)  # type: ignore[index]
        return filled
    if isinstance(nest, tuple) and hasattr(nest, "_make"):
        return nest._make(mapped(function, value) for value in nest)
    if isinstance(nest, (tuple, list)):
        return type(nest)(mapped(function, value) for value in nest)
    if is_dataclass(nest) and not isinstance(nest, type):
        return replace(nest, **{key: mapped(function, value) for key, value in vars(nest).items()})
    return function(nest)


def tensors_in(nest: Any) -> Iterator[Tensor]:
    """Every tensor in the nest, in order."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, Mapping):
        for value in nest.values():
            yield from tensors_in(value)
    elif isinstance(nest, (tuple, list)):
        for value in nest:
            yield from tensors_in(value)
    elif is_dataclass(nest) and not isinstance(nest, type):
        yield from tensors_in(vars(nest))
