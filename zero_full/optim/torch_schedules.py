"""Torch's learning-rate schedules by their names, tried out before they are believed.

Their constructors look at few of their arguments, so a mistake shows when the schedule is stepped: after the
first optimizer step, after a thousand, or never. So they are checked, and stepped once on a stand-in.
"""

import inspect
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from zero_full.optim.arguments import BELOW_1, LARGEST, as_call, finite_number, flag

NUMBERS = ("gamma", "step_size", "T_max", "T_0")  # without a default, which would say it
PER_GROUP = ("base_lr", "max_lr", "base_momentum", "max_momentum")  # numbers, or lists of them
HAVE_SCHEDULES_INSIDE = ("ChainedScheduler", "SequentialLR")  # which know the optimizer they were made for


def schedules_of_torch() -> dict[str, Any]:
    """torch's schedules by name."""
    found = {name: getattr(lr_scheduler, name) for name in dir(lr_scheduler)}
    return {
        name: each
        for name, each in found.items()
        if inspect.isclass(each)
        and issubclass(each, lr_scheduler.LRScheduler)
        and not name.endswith("LRScheduler")
    }


def checked_schedule(kind: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments if each is of the kind that it must be; else ValueError."""
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


def try_out(kind: Any, params: Mapping[str, Any], optimizer: Optimizer) -> None:
    """ValueError if such a schedule cannot be stepped."""
    if kind.__name__ in HAVE_SCHEDULES_INSIDE:
        return
    stand_in = _StandIn(optimizer)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = kind(stand_in, **params)
            stand_in.step()
            made.step()  # not often: some schedules refuse more steps than they were made for
        rates = [float(group["lr"]) for group in stand_in.param_groups]
        if not all(map(math.isfinite, rates)):
            raise ValueError(f"the learning rate becomes {rates[0]}")
    except Exception as error:  # whatever comes, it comes from these arguments
        raise ValueError(
            f"scheduler.params: {as_call(kind.__name__, params)} cannot be stepped: "
            f"{type(error).__name__}: {error}"
        ) from error


class _StandIn(Optimizer):
    """An optimizer with the options of another one's groups, and nothing to move."""

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
