"""torch's learning-rate schedules by name, tried out before they are used.

Their constructors check few arguments, so a mistake shows when the schedule is stepped: after the first
optimizer step, after a thousand, or never. So arguments are checked here, and the schedule is stepped once
with a dummy optimizer.
"""

import inspect
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from zero_full.optim.arguments import BELOW_1, LARGEST, as_call, classes_in, finite_number, flag

NUMBERS = ("gamma", "step_size", "T_max", "T_0")  # without a default that would show their type
PER_GROUP = ("base_lr", "max_lr", "base_momentum", "max_momentum")  # numbers, or lists of them
COMPOSITE = ("ChainedScheduler", "SequentialLR")  # their schedules are of another optimizer than the dummy


def schedules_of_torch() -> dict[str, Any]:
    """The classes of torch's schedules, by name."""
    found = classes_in(lr_scheduler, lr_scheduler.LRScheduler)
    return {name: each for name, each in found.items() if not name.endswith("LRScheduler")}


def checked_arguments(kind: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with checked types, or raise ValueError."""
    checked, declared = dict(params), inspect.signature(kind).parameters
    for name, value in params.items():
        key, default = f"scheduler.params.{name}", declared[name].default
        if isinstance(default, bool):
            checked[name] = flag(key, value)
        elif isinstance(default, int | float) or name in NUMBERS:
            listed = name in PER_GROUP and isinstance(value, list | tuple)
            is_beta = name.endswith("_momentum")
            for each in value if listed else [value]:
                finite_number(key, each, 0.0 if is_beta else -LARGEST, BELOW_1 if is_beta else LARGEST)
    return checked


def check_steppable(kind: Any, params: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raise ValueError if a schedule with these arguments cannot be stepped."""
    if kind.__name__ in COMPOSITE:
        return
    dummy = _DummyOptimizer(optimizer)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = kind(dummy, **params)
            dummy.step()
            made.step()  # once: some schedules raise after their last step
        rates = [float(group["lr"]) for group in dummy.param_groups]
        if not all(map(math.isfinite, rates)):
            raise ValueError(f"the learning rate becomes {rates[0]}")
    except Exception as error:  # of any kind: it comes from these arguments
        raise ValueError(
            f"scheduler.params: {as_call(kind.__name__, params)} cannot be stepped: "
            f"{type(error).__name__}: {error}"
        ) from error


class _DummyOptimizer(Optimizer):
    """A dummy optimizer with the options of another one's groups."""

    def __init__(self, other: Optimizer) -> None:
        groups = [
            {
                **{k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()},
                "params": [nn.Parameter(torch.zeros(1))],
            }
            for group in other.param_groups
        ]
        super().__init__(groups, dict(other.defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""
