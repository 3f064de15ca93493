"""The optimizer that the user passed in, and the base class of the proxy that replaces it.

Calls of user code to the wrapped optimizer are redirected to the proxy. The proxy exposes the wrapped
optimizer's groups, state and defaults.
"""

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zero_full._compat import step_hooks
from zero_full.shard.group.optimizer_state import StateByParameter

NUMBERS = ("lr", "weight_decay", "betas", "momentum", "eps")  # options that must be finite
BEFORE, AFTER = 0, 1  # index into a pair of hook lists
# Methods of the wrapped optimizer that call the proxy's. Groups, state and defaults are shared objects.
REDIRECTED = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")


class Base:
    """A torch optimizer whose methods call its owner's. The owner can still call its own `step`."""

    def __init__(self, optimizer: Optimizer, owner: Optimizer) -> None:
        self.optimizer = optimizer
        self.own_step = optimizer.step  # possibly wrapped by an LR scheduler
        me = weakref.ref(owner)
        for name in REDIRECTED:
            setattr(optimizer, name, MethodType(_redirect_to(me, name, getattr(optimizer, name)), optimizer))

    def run_step_hooks(self, when: int) -> None:
        """Run the hooks on the optimizer's `step` once per step, also if it is stepped in several parts."""
        for hook in list(step_hooks(self.optimizer)[when].values()):
            with torch.no_grad():
                answer = hook(self.optimizer, (self.optimizer,), {})
            if answer is not None and when == BEFORE:
                raise RuntimeError(
                    "a pre-step hook of the optimizer has returned new arguments for step(), which takes "
                    "none here. Return None from the hook"
                )


def run_hooks(
    owners: Iterable[Optimizer],
    hooks_of: Callable[[Any], tuple[list[Any], list[Any]]],
    when: int,
    *state: Any,
) -> Any:
    """Run the hooks of these optimizers. A hook's result replaces `state`; returns the last `state`."""
    for owner in owners:
        for hook in hooks_of(owner)[when]:
            answer = hook(owner, *state)
            state = (answer,) if state and answer is not None else state
    return state[0] if state else None


def _redirect_to(owner: "weakref.ref[Optimizer]", name: str, method: Any) -> Any:
    """Make a method that calls the owner's method of the same name."""

    @functools.wraps(getattr(method, "__func__", method))  # keeps the attribute that LR schedulers look for
    def call(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        alive = owner()
        if alive is None or getattr(alive, "closed", False):
            raise RuntimeError(
                f"{name}() of an optimizer whose engine was destroyed or deleted. Create a new optimizer"
            )
        return getattr(alive, name)(*args, **kwargs)

    return call


class NoOptimizer(Optimizer):
    """Placeholder for an engine without optimizer. Averaged gradients are returned in `param.grad`."""

    zero_full_elementwise = True

    def __init__(self, params: Iterable[Parameter]) -> None:
        listed = list(params)
        if listed:
            super().__init__(listed, {})
            return
        self.defaults, self.param_groups = {}, []  # torch's constructor raises for an empty list
        self.state = defaultdict(dict)
        self.__setstate__({})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raise RuntimeError: this engine has no optimizer."""
        raise RuntimeError(
            'there is no optimizer: pass one to initialize, or add "optimizer" to the config. At stage 0 you '
            "can also step an optimizer of your own over the model's parameters"
        )


def raise_on_gradients(base: Optimizer, model: nn.Module, stage: int) -> list[RemovableHandle]:
    """Make backward raise on an engine without optimizer from stage 1 on, where nothing averages gradients.

    Returns the hooks.
    """

    def refuse(param: Tensor) -> None:
        raise RuntimeError(
            f"backward at stage {stage} of an engine without an optimizer. Pass one to initialize, or add "
            '"optimizer" to the config, or freeze the model if it is not trained'
        )

    if not isinstance(base, NoOptimizer) or base.param_groups:
        return []
    trained = [p for p in model.parameters() if p.requires_grad]
    return [param.register_post_accumulate_grad_hook(refuse) for param in trained]


def listed_in(param_groups: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    """List the ids of the parameters in each group, to detect a change later."""
    listed = []
    for group in param_groups:
        listed.append(list(map(id, group["params"])))
    return listed


def check_param_groups(param_groups: Sequence[Mapping[str, Any]], listed: list[list[int]]) -> None:
    """Raise RuntimeError if groups changed since `listed`, or if one of their options is no finite number."""
    same = len(param_groups) == len(listed)
    for group, params in zip(param_groups, listed, strict=False):
        same = same and list(map(id, group["params"])) == params
    if not same:
        raise RuntimeError(
            "parameters were added to the optimizer's groups or removed from them after initialize, where "
            "the shards are laid out. Freeze a parameter with requires_grad_(False), or pass it frozen to "
            "initialize"
        )
    if problem := invalid_option(param_groups):
        raise RuntimeError(problem)


def _is_usable(value: Any) -> bool:
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        value = value.item()  # on an accelerator it would wait for the device, so it is not checked
    if value is None:  # torch's Adafactor: the smallest number of the dtype
        return True
    return isinstance(value, Tensor) or (isinstance(value, (int, float)) and isfinite(value))


def invalid_option(param_groups: Sequence[Mapping[str, Any]]) -> str:
    """Return the message about the first option that is no finite number, or ""."""
    for number, group in enumerate(param_groups):
        for key in NUMBERS:
            value = group.get(key, 0.0)
            for each in value if isinstance(value, (tuple, list)) else (value,):
                if isfinite(each) if type(each) is float else _is_usable(each):
                    continue
                return f"{key} of the optimizer's parameter group {number} is {value!r}, not a finite number"
    return ""


def zero_in_place(params: Iterable[Parameter]) -> None:
    """Set gradients to zero in place, including placeholders."""
    for param in params:
        if param.grad is not None:
            param.grad.zero_()


NO_COPY = "this optimizer cannot be copied or pickled: it belongs to its model. Save its state_dict() instead"
NO_JOIN = (
    "torch's Join does not support zero_full: it cannot repeat the collectives of a step on ranks without a "
    "batch. Loop over zero_full.synced(batches), and multiply the loss of a batch that does not count by 0"
)


class OptimizerProxy(Optimizer):
    """Exposes the wrapped optimizer's `param_groups`, `state` and `defaults`."""

    base: Optimizer
    own_state: StateByParameter

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the wrapped optimizer, which list the model's parameters."""
        return self.base.param_groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state on this rank, by parameter."""
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        """Clear the state if `state` is empty, else raise."""
        self.base.state = state
        self._take_back_state()

    def _take_back_state(self) -> None:
        """Restore our state object after user code assigned another one; clear it if that one is empty."""
        if self.base.state is not self.own_state:
            given, self.base.state = self.base.state, self.own_state  # type: ignore[assignment]
            if self.own_state.settled is not None:
                self.own_state.settled()
            if given:
                raise RuntimeError("set optimizer state with zero_full.safe_set_full_optimizer_state")
            self.own_state.clear()

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The default options of the wrapped optimizer."""
        return self.base.defaults

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NO_COPY)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError: the layout of the shards is fixed."""
        raise RuntimeError(
            "parameter groups cannot be added after initialize: the shards are already laid out. Pass all "
            "groups to initialize, and freeze parameters that should train later"
        )

    def join_hook(self, **options: Any) -> None:
        """Raise RuntimeError when torch's `Join` calls this."""
        raise RuntimeError(NO_JOIN)
