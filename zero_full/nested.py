"""Nests of values, which models and operations take and return: what is in them, and how it is exchanged.

A nest is a tuple, a list, a mapping or a dataclass; all else is a leaf. Nests have no end if one is inside
itself: where it comes again, it is passed over, and stays what it is.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from types import ModuleType
from typing import Any

from torch import Tensor, nn


class Leaf:
    """A dataclass that is derived from this is a leaf."""


def mapped(function: Callable[[Any], Any], tree: Any, _around: tuple[int, ...] = ()) -> Any:
    """The nest with `function(leaf)` in the place of every leaf.

    A nest in which nothing changes is not copied: whoever writes to it writes to the caller's.
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
    """Every leaf in order; down to a `depth` of objects in objects, what is in their attributes, too."""
    items = _items(tree)
    if items is None and depth and _has_attributes(tree):
        items, depth = vars(tree).items(), depth - 1
    if items is None:
        yield tree
    elif id(tree) not in _around:
        for _, value in items:
            yield from leaves(value, depth, (*_around, id(tree)))


def tensors_in(tree: Any, depth: int = 0) -> Iterator[Tensor]:
    """Those leaves that are tensors."""
    return (leaf for leaf in leaves(tree, depth) if isinstance(leaf, Tensor))


def _items(tree: Any) -> Iterable[tuple[Any, Any]] | None:
    """What is directly in a nest, with keys; None of a leaf."""
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
    return [(field.name, getattr(tree, field.name)) for field in fields(tree)]  # it has slots


def _has_attributes(tree: Any) -> bool:
    return hasattr(tree, "__dict__") and not isinstance(tree, (Tensor, type, nn.Module, ModuleType))


def _with(tree: Any, changed: Mapping[Any, Any]) -> Any:
    """A copy of the nest that has these values at these keys."""
    if isinstance(tree, (tuple, list)):
        values = [changed.get(place, value) for place, value in enumerate(tree)]
        return tree._make(values) if hasattr(tree, "_make") else type(tree)(values)
    if isinstance(tree, Mapping):
        filled: Any = copy(tree)
        for key, value in changed.items():
            filled[key] = value
        return filled
    return replace(tree, **changed)
