"""The optimizer that was passed in: whoever still calls it means the one that has taken its place."""

import functools
import weakref
from types import MethodType
from typing import Any

from torch.optim import Optimizer

# What a user may call on the object that he has passed in. The rest of it is shared: groups, state, defaults.
REDIRECTED = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")


class Base:
    """A torch optimizer whose methods lead to its owner, and which the owner can still step."""

    def __init__(self, optimizer: Optimizer, owner: Optimizer) -> None:
        self.optimizer = optimizer
        self.own_step = optimizer.step  # as it is now: a schedule may have wrapped it
        me = weakref.ref(owner)
        for name in REDIRECTED:
            setattr(optimizer, name, MethodType(_leading_to(me, name, getattr(optimizer, name)), optimizer))

    def step(self) -> None:
        """Step what has a gradient, as torch does."""
        self.own_step()


def steps_as_its_class(optimizer: Optimizer, step: Any) -> bool:
    """Whether nobody has put another `step` into this one object, but for schedules, which only watch."""
    return getattr(step, "__func__", None) is type(optimizer).step or hasattr(step, "_wrapped_by_lr_sched")


def _leading_to(owner: "weakref.ref[Optimizer]", name: str, method: Any) -> Any:
    """A method of the same name and kind that calls the owner's."""

    @functools.wraps(getattr(method, "__func__", method))  # with the mark by which schedules know their work
    def call(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        alive = owner()
        if alive is None or getattr(alive, "closed", False):
            raise RuntimeError(
                f"{name}() of an optimizer whose engine is gone: its parameters were given to "
                "zero_full.initialize. Make a new optimizer"
            )
        return getattr(alive, name)(*args, **kwargs)

    return call
