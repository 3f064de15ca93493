"""The optimizer that the user passed in, and the base class of the proxy that replaces it.

Calls of user code to the wrapped optimizer are redirected to the proxy. The proxy exposes the wrapped
optimizer's groups, state and defaults.
"""

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zero_full.shard.group.master import StateByParameter

NO_OPTIMIZER = (
    'there is no optimizer: pass one to initialize, or add "optimizer" to the config. At stage 0 you can '
    "also step an optimizer of your own over the model's parameters"
)
BEFORE, AFTER = 0, 1  # index into a pair of hook lists
# Methods of the wrapped optimizer that call the proxy's. Groups, state and defaults are shared objects.
REDIRECTED = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")


class RedirectedOptimizer:
    """The user's optimizer. Calls of its methods go to its owner, which can still call its own `step`."""

    def __init__(self, optimizer: Optimizer, owner: Optimizer) -> None:
        self.optimizer = optimizer
        self.own_step = optimizer.step  # possibly wrapped by an LR scheduler
        me = weakref.ref(owner)
        for name in REDIRECTED:
            setattr(optimizer, name, MethodType(_redirect_to(me, name, getattr(optimizer, name)), optimizer))


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
        raise RuntimeError(NO_OPTIMIZER)


def raise_on_gradients(base: Optimizer, model: nn.Module, stage: int) -> list[RemovableHandle]:
    """Make backward raise on an engine without optimizer from stage 1 on, where nothing averages gradients.

    Returns the hooks.
    """

    def raise_error(param: Tensor) -> None:
        raise RuntimeError(
            f"backward at stage {stage} of an engine without an optimizer. Pass one to initialize, or add "
            '"optimizer" to the config, or freeze the model if it is not trained'
        )

    if not isinstance(base, NoOptimizer) or base.param_groups:
        return []
    trained = [p for p in model.parameters() if p.requires_grad]
    return [param.register_post_accumulate_grad_hook(raise_error) for param in trained]


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
        """Restore our state object after user code assigned another one; clear it if that was empty."""
        if self.base.state is not self.own_state:
            given, self.base.state = self.base.state, self.own_state  # type: ignore[assignment]
            if self.own_state.wait_for_update is not None:
                self.own_state.wait_for_update()
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
