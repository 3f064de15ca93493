"""The optimizer that was passed in: whoever still calls it means the one that has taken its place."""

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zero_full._compat import step_hooks

NUMBERS = ("lr", "weight_decay", "betas", "momentum", "eps")  # options that must be finite
BEFORE, AFTER = 0, 1  # which of a pair of hooks
# What a user may call on the object that he has passed in. The rest of it is shared: groups, state, defaults.
REDIRECTED = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")


class Base:
    """A torch optimizer whose methods lead to its owner, which can still step it by `own_step`."""

    def __init__(self, optimizer: Optimizer, owner: Optimizer) -> None:
        self.optimizer = optimizer
        self.own_step = optimizer.step  # as it is now: a schedule may have wrapped it
        me = weakref.ref(owner)
        for name in REDIRECTED:
            setattr(optimizer, name, MethodType(_leading_to(me, name, getattr(optimizer, name)), optimizer))

    def run_step_hooks(self, when: int) -> None:
        """Run the hooks on the optimizer's `step`, once a step, whatever the step is made of."""
        for hook in step_hooks(self.optimizer)[when]:
            if hook(self.optimizer, (self.optimizer,), {}) is not None and when == BEFORE:
                raise RuntimeError(
                    "a hook that runs before the optimizer's step has returned other arguments for it: this "
                    "step takes none"
                )


def run_hooks(
    owners: Iterable[Optimizer],
    hooks_of: Callable[[Any], tuple[list[Any], list[Any]]],
    when: int,
    *state: Any,
) -> Any:
    """Run the hooks of these optimizers. What one returns takes the place of `state`, which is returned."""
    for owner in owners:
        for hook in hooks_of(owner)[when]:
            answer = hook(owner, *state)
            state = (answer,) if state and answer is not None else state
    return state[0] if state else None


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


def listed_in(param_groups: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    """Which parameters are in which group, to notice a change."""
    return [[id(param) for param in group["params"]] for group in param_groups]


def refuse_unusable(param_groups: Sequence[Mapping[str, Any]], listed: list[list[int]]) -> None:
    """Raise if groups have changed since parameters were dealt, or if no step can be taken with a number."""
    if listed_in(param_groups) != listed:
        raise RuntimeError(
            "parameters were added to the optimizer's groups or removed from them after initialize, which "
            "deals them once: freeze a parameter with requires_grad_(False), or list it frozen at first"
        )
    if problem := unusable_number(param_groups):
        raise RuntimeError(problem)


def _is_usable(value: Any) -> bool:
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        value = value.item()  # elsewhere it would cost a wait for the device
    if value is None:  # torch's Adafactor has this for "as small as the type allows"
        return True
    return isinstance(value, Tensor) or (isinstance(value, (int, float)) and isfinite(value))


def unusable_number(param_groups: Sequence[Mapping[str, Any]]) -> str:
    """In words, the first option of a group with which no step can be taken; "" if there is none."""
    for number, group in enumerate(param_groups):
        for key in NUMBERS:
            value = group.get(key, 0.0)
            if not all(map(_is_usable, value if isinstance(value, (tuple, list)) else (value,))):
                return f"{key} of the optimizer's parameter group {number} is {value!r}, no finite number"
    return ""


def zero_in_place(params: Iterable[Parameter]) -> None:
    """Their gradients, and what stands for them, become zero."""
    for param in params:
        if param.grad is not None:
            param.grad.zero_()
