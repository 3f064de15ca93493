"""The optimizer that was passed in: whoever still calls it means the one that has taken its place."""

import functools
import weakref
from collections import defaultdict
from collections.abc import Iterable
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

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


class NoOptimizer(Optimizer):
    """Stands where no optimizer was given. Gradients of its parameters are averaged and handed back."""

    zero_full_elementwise = True

    def __init__(self, params: Iterable[Parameter]) -> None:
        listed = list(params)
        if listed:
            super().__init__(listed, {})
            return
        self.defaults, self.param_groups = {}, []  # torch wants something to optimize
        self.state = defaultdict(dict)
        self.__setstate__({})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Refused."""
        raise RuntimeError(
            'there is no optimizer: pass one to initialize, or add "optimizer" to the config; one of your '
            "own over the model's parameters (at stage 0) you step yourself"
        )


def refuse_gradients(base: Optimizer, model: nn.Module, stage: int) -> list[RemovableHandle]:
    """From stage 1 on nothing averages the gradients of an engine without optimizer: they are an error."""

    def refuse(param: Tensor) -> None:
        raise RuntimeError(
            f"a backward pass at stage {stage} of an engine that has no optimizer: pass one to initialize, "
            'or add "optimizer" to the config; or freeze the model if it only serves others'
        )

    if not isinstance(base, NoOptimizer) or base.param_groups:
        return []
    trained = [p for p in model.parameters() if p.requires_grad]
    return [param.register_post_accumulate_grad_hook(refuse) for param in trained]
