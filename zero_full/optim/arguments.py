"""Check names and values from a JSON file or a script before a constructor gets them."""

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from zero_full.formatting import shown

LARGEST = torch.finfo(torch.float32).max
MOST_STEPS = 10**12
# Arguments of torch's optimizers that cannot be negative; others, such as Adafactor's beta2_decay, can.
NOT_NEGATIVE = (
    *("lr", "eps", "weight_decay", "momentum", "lr_decay", "initial_accumulator_value"),
    *("muon_lr", "adam_lr", "ns_eps"),
)
BELOW_1 = math.nextafter(1, 0)  # the largest weight that an average can give to its past
WEIGHTS = ("alpha", "rho", "base_momentum", "max_momentum")
# Arguments of torch's schedules: numbers without a default that would show it, and numbers or lists of them.
NUMBERS = ("gamma", "step_size", "T_max", "T_0")
PER_GROUP = ("base_lr", "max_lr", "base_momentum", "max_momentum")
FLAGS_OR_NONE = ("foreach", "fused")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an error message: `; did you mean ...?` if a known name is close, else ""."""
    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]}?" if close else ""


def check_signature(key: str, target: Callable[..., Any], params: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments that `target` does not have, and for missing ones without a default.

    `key` is the place of `params` in the configuration. The first argument, parameters or an optimizer, is
    not in `params`.
    """
    known = dict(list(inspect.signature(target).parameters.items())[1:])
    name = getattr(target, "__name__", str(target))
    for argument in params:
        if argument not in known:
            hint = nearest(argument, known) or f"; {name} takes {', '.join(known)}"
            raise ValueError(f"{key}.{argument}: {name} has no such argument{hint}")
    for argument, declared in known.items():
        if declared.default is inspect.Parameter.empty and argument not in params:
            raise ValueError(f"{key}.{argument} is missing: {name} needs it")


def checked_options(
    target: Callable[..., Any], options: Mapping[str, Any], named: Callable[[str], str]
) -> dict[str, Any]:
    """Return the options of an optimizer or schedule, lists as tuples and 0 and 1 as booleans; or raise.

    A value must be of the kind of the argument's default. `named` gives an option's name in messages. Options
    that are no arguments of `target` are returned unchanged.
    """
    known = inspect.signature(target).parameters
    return {
        name: _checked(named(name), name, known[name].default, value) if name in known else value
        for name, value in options.items()
    }


def _checked(key: str, name: str, default: Any, value: Any) -> Any:
    if name in PER_GROUP and isinstance(value, list | tuple):
        return [_checked(key, name, default, each) for each in value]
    if value is None and (name in FLAGS_OR_NONE or (default is None and name in NOT_NEGATIVE)):
        return None
    if isinstance(default, bool) or name in FLAGS_OR_NONE:
        return flag(key, value)
    if name == "betas":
        pair = finite_numbers(key, value, 2, most=BELOW_1)
        return tuple(beta if isinstance(beta, Tensor) else float(beta) for beta in pair)  # floats for torch
    if name in WEIGHTS:
        return finite_number(key, value, most=BELOW_1)
    least = 0.0 if name in NOT_NEGATIVE else -LARGEST
    if isinstance(default, tuple) and None not in default:
        return finite_numbers(key, value, len(default), least)
    is_number = isinstance(default, int | float) or name in NUMBERS
    is_number = is_number or (default is None and name in NOT_NEGATIVE)
    return finite_number(key, value, least) if is_number else value


def classes_in(module: Any, base: type) -> dict[str, Any]:
    """Return the subclasses of `base` that a module of torch has, by name."""
    found = {name: getattr(module, name) for name in dir(module)}
    return {
        name: each
        for name, each in found.items()
        if inspect.isclass(each) and issubclass(each, base) and each is not base
    }


def arguments_of(scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an optimizer's constructor, from its `locals()`, without the parameters."""
    return {name: value for name, value in scope.items() if name not in ("self", "params", "__class__")}


def check_fixed(options: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raise ValueError for options of DeepSpeed that must be off here: their names, each with the reason."""
    for name in reasons.keys() & options.keys():
        if options[name]:
            raise ValueError(f"{name} cannot be {shown(options[name])}: {reasons[name]}")


def flag(key: str, value: Any) -> bool:
    """Return a boolean, also for 1 and 0, or raise ValueError."""
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise ValueError(f"{key} must be true or false, not {shown(value)}")


def finite_number(key: str, value: Any, least: float = 0.0, most: float = LARGEST) -> Any:
    """Return a number or a tensor of one element; ValueError if it is out of bounds, inf or NaN."""
    is_tensor = isinstance(value, Tensor) and value.numel() == 1
    is_number = is_tensor or (isinstance(value, Real) and not isinstance(value, bool))
    if is_number and least <= value <= most:
        kept = is_tensor or (isinstance(value, int) and abs(value) < 2**53)
        return value if kept else float(value)
    kind = "a number" if least == -LARGEST else f"a number of {least:g} or more"
    kind = kind if most == LARGEST else f"a number from {least:g} up to, but not including, 1"
    raise ValueError(f"{key} must be {kind}, not {shown(value)}")


def finite_numbers(
    key: str, value: Any, count: int, least: float = 0.0, most: float = LARGEST
) -> tuple[Any, ...]:
    """Return a list of `count` finite numbers as a tuple, or raise ValueError."""
    listed = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if len(listed) != count:
        raise ValueError(f"{key} must be a list of {count} numbers, not {shown(value)}")
    return tuple(finite_number(f"{key}[{place}]", each, least, most) for place, each in enumerate(listed))


def at_least(key: str, value: Any, least: int) -> int:
    """Return an integer of at least `least`, also for a float such as 1e3, or raise ValueError."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or value != value // 1 or value < least:
        raise ValueError(f"{key} must be a whole number of at least {least}, not {shown(value)}")
    if value > MOST_STEPS:
        raise ValueError(f"{key} must be a whole number of at most {MOST_STEPS}, not {shown(value)}")
    return int(value)


def as_call(function: str, params: Mapping[str, Any]) -> str:
    """Return the source of a call, as in `Adam(lr=1)`."""
    return f"{function}({', '.join(f'{name}={shown(value)}' for name, value in params.items())})"
