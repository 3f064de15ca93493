"""Nested values that models and operations take and return: list their leaves, or replace them.

A nest is a tuple, a list, a mapping or a dataclass; every other value is a leaf. torch's own `pytree` knows
dataclasses and mappings only if their classes are registered. A nest that contains itself is visited once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from types import ModuleType
from typing import Any

from torch import Tensor, nn


class Leaf:
    """Base of dataclasses that count as leaves, as their fields are not searched."""


def mapped(function: Callable[[Any], Any], tree: Any, _around: tuple[int, ...] = ()) -> Any:
    """Return the nested value with every leaf replaced by `function(leaf)`.

    A nest in which no leaf changes is returned itself, not a copy: writing to it writes to the caller's.
    """
    items = _items(tree)
    if items is None:
        return function(tree)
    if id(tree) in _around:
        return tree
    around = (*_around, id(tree))
    made = ((key, value, mapped(function, value, around)) for key, value in items)
    changed = {key: after for key, before, after in made if after is not before}
    return _with(tree, changed) if changed else tree


def leaves(tree: Any, depth: int = 0, _around: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield every leaf in order. `depth`: how many levels of objects' attributes to look into."""
    items = _items(tree)
    opaque = (Tensor, type, nn.Module, ModuleType)
    if items is None and depth and hasattr(tree, "__dict__") and not isinstance(tree, opaque):
        items, depth = vars(tree).items(), depth - 1
    if items is None:
        yield tree
    elif id(tree) not in _around:
        for _, value in items:
            if isinstance(value, Tensor):  # the usual leaf: no generator of its own
                yield value
            else:
                yield from leaves(value, depth, (*_around, id(tree)))


def tensors_in(tree: Any, depth: int = 0) -> list[Tensor]:
    """Return the leaves that are tensors. `depth` as in `leaves`."""
    if isinstance(tree, Tensor):  # what most modules return
        return [tree]
    return [leaf for leaf in leaves(tree, depth) if isinstance(leaf, Tensor)]


def _items(tree: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return a nested value's (key, value) pairs; None for a leaf."""
    if isinstance(tree, Tensor):
        return None
    if isinstance(tree, (tuple, list)):
        return enumerate(tree)
    if isinstance(tree, Mapping):
        return tree.items()
    if not is_dataclass(tree) or isinstance(tree, (type, Leaf)):
        return None
    if hasattr(tree, "__dict__"):
        return vars(tree).items()
    return [(field.name, getattr(tree, field.name)) for field in fields(tree)]  # a dataclass with slots


def _with(tree: Any, changed: Mapping[Any, Any]) -> Any:
    """Return a copy of a nested value with the values of `changed` at its keys."""
    if isinstance(tree, (tuple, list)):
        values = [changed.get(place, value) for place, value in enumerate(tree)]
        return tree._make(values) if hasattr(tree, "_make") else type(tree)(values)
    if isinstance(tree, Mapping):
        filled: Any = copy(tree)
        for key, value in changed.items():
            filled[key] = value
        return filled
    return replace(tree, **changed)
