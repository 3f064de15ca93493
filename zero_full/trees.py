"""What models take and return: tensors in tuples, lists, dicts and dataclasses."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import is_dataclass, replace
from typing import Any

from torch import Tensor


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree of tuples, lists, dicts and dataclasses with every leaf mapped.

    What has nothing in it that changes is not copied: whoever writes to it writes to the caller's.
    """
    if isinstance(tree, Mapping):
        changed = _changed(function, tree.items())
        filled = copy(tree) if changed else tree
        for key, value in changed.items():
            filled[key] = value  # type: ignore[index]
        return filled
    if isinstance(tree, (tuple, list)):
        changed = _changed(function, enumerate(tree))
        values = (changed.get(place, value) for place, value in enumerate(tree))
        make = tree._make if hasattr(tree, "_make") else type(tree)
        return make(values) if changed else tree
    if is_dataclass(tree) and not isinstance(tree, type):
        changed = _changed(function, vars(tree).items())
        return replace(tree, **changed) if changed else tree
    return function(tree)


def _changed(function: Callable[[Any], Any], items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """The values that `function` changes, by key, as they are afterwards."""
    made = ((key, value, mapped(function, value)) for key, value in items)
    return {key: after for key, before, after in made if after is not before}


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor in the tree, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from tensors_in(value)
    elif is_dataclass(tree) and not isinstance(tree, type):
        yield from tensors_in(vars(tree))
