"""Released parameters of stage 3: computing with one raises an error that names it and the module.

[Note: released] A released parameter keeps its identity and its shape. Its class is changed to one with a
`__torch_function__`, which sees every use in Python: `module.forward(x)`, which runs no hooks, a weight that
another module reads, a write. Code that bypasses Python reads NaN.
"""

import sys
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zero_full.nested import tensors_in
from zero_full.shard.group.optimizer_state import OFFLOADED
from zero_full.shard.group.placeholder_ops import CONVERSIONS, HARMLESS, plainly
from zero_full.shard.group.registry import owner_of

ALLOWED = {
    *HARMLESS,
    *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")),
    # Parameters are arguments of these as names of gradients; their values are not read.
    *(Tensor.backward, torch.autograd.backward, torch.autograd.grad),
    *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad),
}
VIEWS = {Tensor.data.__get__, *CONVERSIONS}  # type: ignore[attr-defined]  # no values, either


class Absent(Tensor):
    """Tensor without values: the base of released parameters, and the class of their `.data`.

    See [Note: released].
    """

    released_name = "a parameter"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run functions that do not read values, and raise for all others."""
        if func in ALLOWED or func in VIEWS:
            answer = plainly(func, args, kwargs)
            if func in VIEWS and answer is not args[0]:
                answer = plainly(Tensor.as_subclass, (answer, Absent), None)
                answer.released_name = args[0].released_name
            return answer
        if func is Tensor.__repr__:
            return f"<{args[0].released_name}: sharded, shape {tuple(args[0].shape)}>"
        found = [each for each in tensors_in((args, kwargs)) if isinstance(each, Absent)]
        names = ", ".join(dict.fromkeys(each.released_name for each in found)) or "a parameter"
        held = [each for each in found if isinstance(each, Parameter)]
        if held and all(owner_of(each) is None for each in held):
            raise RuntimeError(
                f"{names} is sharded, and what initialize or assemble.shard has returned is gone, which "
                "would gather it: keep it as long as the model is used. (To end with whole parameters, call "
                "destroy(gather=True) first)"
            )
        if any(owner.states_offloaded for owner in map(owner_of, held) if owner is not None):
            raise RuntimeError(f"{names} has no values: {OFFLOADED}")
        raise RuntimeError(
            f"{names} is sharded, so it has no values here, and "
            f"{_reader(args)} uses it by {getattr(func, '__name__', func)}. Call the module that holds it as "
            "module(x), not module.forward(x); let another module that reads it ask for it by "
            "zero_full.register_external_parameter; elsewhere read or write it inside "
            "zero_full.GatheredParameters(parameters, modifier_rank=0), on every rank"
        )


@cache
def _released(kind: type[Parameter]) -> type[Parameter]:
    """Make the class of released parameters of the class `kind`. It is cached, so one class each."""
    return type(f"Released{kind.__name__}", (Absent, kind), {"present": kind})


def mark_released(param: Parameter, name: str) -> None:
    """Change the parameter's class, so that every use of its values raises."""
    if not isinstance(param, Absent):
        param.released_name = name  # type: ignore[attr-defined]
        param.__class__ = _released(type(param))


def unmark_released(param: Parameter) -> None:
    """Restore the parameter's own class."""
    if isinstance(param, Absent):
        param.__class__ = param.present  # type: ignore[attr-defined]


def _reader(used: Any) -> str:
    """Return the innermost module on the call stack, by its name in the model or the outermost module."""
    frame: FrameType | None = sys._getframe(2)
    around = []
    while frame is not None:
        me = frame.f_locals.get("self")
        if isinstance(me, nn.Module):
            around.append(me)
        frame = frame.f_back
    if not around:
        return "code outside of modules"
    inside = around[0]
    owners = [owner_of(each) for each in tensors_in(used) if isinstance(each, Absent)]
    roots = [*(owner.watch.model for owner in owners if owner is not None), around[-1]]
    names = [name for root in roots for name, module in root.named_modules() if module is inside]
    return f"{names[0] or 'the model' if names else 'a module'} ({type(inside).__name__})"
