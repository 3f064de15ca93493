"""Names and arguments as they come out of a JSON file, checked before a constructor sees them."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` if a known name is close, else nothing."""
    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]}?" if close else ""


def check_arguments(key: str, target: Callable[..., Any], params: Mapping[str, Any]) -> None:
    """Refuse arguments that `target` does not have and ask for those that it cannot do without.

    `key` says where in the configuration `params` stand. The first argument, parameters or an optimizer,
    is ours to give and cannot come from a file.
    """
    known = dict(list(inspect.signature(target).parameters.items())[1:])
    name = getattr(target, "__name__", str(target))
    for argument in params:
        if argument not in known:
            hint = nearest(argument, known) or f"; {name} takes {', '.join(known)}"
            raise ValueError(f"{key}.{argument}: {name} has no such argument{hint}")
    for argument, declared in known.items():
        if declared.default is inspect.Parameter.empty and argument not in params:
            raise ValueError(f"{key}.{argument} is missing: {name} has no default for it")
