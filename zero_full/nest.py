"""What models take and return: tensors in tuples, lists, dicts and dataclasses."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import is_dataclass, replace
from typing import Any

from torch import Tensor


def mapped(function: Callable[[Any], Any], nest: Any) -> Any:
    """The nest of tuples, lists, dicts and dataclasses with every leaf mapped.

    What has nothing in it that changes is not copied: whoever writes to it writes to the caller's.
    """
    if isinstance(nest, Mapping):
        changed = _changed(function, nest.items())
        filled = copy(nest) if changed else nest
        for key, value in changed.items():
            filled[key] = value  # type: ignore[index]
        return filled
    if isinstance(nest, (tuple, list)):
        changed = _changed(function, enumerate(nest))
        values = (changed.get(place, value) for place, value in enumerate(nest))
        make = nest._make if hasattr(nest, "_make") else type(nest)
        return make(values) if changed else nest
    if is_dataclass(nest) and not isinstance(nest, type):
        changed = _changed(function, vars(nest).items())
        return replace(nest, **changed) if changed else nest
    return function(nest)


def _changed(function: Callable[[Any], Any], items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """What mapping makes of those values that it does not leave as they are."""
    made = ((key, value, mapped(function, value)) for key, value in items)
    return {key: after for key, before, after in made if after is not before}


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
