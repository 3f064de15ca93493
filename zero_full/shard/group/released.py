"""Released parameters of stage 3: computing with one raises an error that names it and the module.

[Note: released] A released parameter keeps its identity and its shape. Its class is changed to one with a
`__torch_function__`, which sees every use in Python: `module.forward(x)`, which runs no hooks, a weight that
another module reads, a write. Code that bypasses Python reads NaN.
"""

import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zero_full._compat import METADATA, has_compatible_type, without_overrides
from zero_full.nested import tensors_in
from zero_full.shard.group.registry import owner_of

OFFLOADED = "states are offloaded. Call engine.reload_states() first"
# `__torch_function__` gets a property's getter.
PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf", "is_sparse"),
    *("is_cuda", "is_cpu", "is_meta", "is_quantized", "grad", "nbytes", "itemsize"),
    *METADATA,
)
METHODS = (
    *("size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex"),
    *("untyped_storage", "data_ptr", "storage_offset", "is_contiguous"),  # used by memory reports
)
# New tensors, which take dtype, device and shape from the placeholder.
LIKE = tuple(
    getattr(torch, f"{name}_like") for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
)
NEW = tuple(getattr(Tensor, f"new_{name}") for name in ("empty", "zeros", "ones", "full", "tensor"))
CONVERSIONS = tuple(  # called by module.to(...)
    getattr(Tensor, name) for name in ("to", "type", "cpu", "cuda", "float", "double", "half", "bfloat16")
)
# They do not read values, so they are allowed on placeholders.
WITHOUT_VALUES = {
    *(getattr(Tensor, name).__get__ for name in PROPERTIES),
    *(getattr(Tensor, name) for name in METHODS),
    *(*LIKE, *NEW, torch.is_floating_point, torch.is_complex, torch.numel),
    *(Tensor.data.__set__, has_compatible_type),  # type: ignore[attr-defined]
    *(Tensor.requires_grad_, Tensor.detach_),  # called by `zero_grad(set_to_none=False)`
}
ALLOWED = {
    *WITHOUT_VALUES,
    *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")),
    # Parameters are arguments of these as names of gradients; their values are not read.
    *(Tensor.backward, torch.autograd.backward, torch.autograd.grad),
    *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad),
}
OF_DTENSORS = ("to_local", "full_tensor", "redistribute")  # methods of a DTensor that read values
VIEWS = {Tensor.data.__get__, *CONVERSIONS}  # type: ignore[attr-defined]  # no values, either


def call_plain(func: Any, args: Any, kwargs: Any) -> Any:
    """Call the function with every tensor subclass treated as a plain tensor."""
    with without_overrides():
        return func(*args, **(kwargs or {}))


class ReleasedTensor(Tensor):
    """Tensor without values: the base of released parameters, and the class of their `.data`.

    See [Note: released].
    """

    released_name = "a parameter"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run functions that do not read values, and raise for all others."""
        if func in ALLOWED or func in VIEWS:
            answer = call_plain(func, args, kwargs)
            if func in VIEWS and answer is not args[0]:
                answer = call_plain(Tensor.as_subclass, (answer, ReleasedTensor), None)
                answer.released_name = args[0].released_name
            return answer
        if func is Tensor.__repr__:
            return f"<{args[0].released_name}: sharded, shape {tuple(args[0].shape)}>"
        found = [each for each in tensors_in((args, kwargs)) if isinstance(each, ReleasedTensor)]
        names = ", ".join(dict.fromkeys(each.released_name for each in found)) or "a parameter"
        held = [each for each in found if isinstance(each, Parameter)]
        if held and all(owner_of(each) is None for each in held):
            raise RuntimeError(
                f"{names} is sharded, and the engine or optimizer that would gather it no longer exists. "
                "Keep what initialize or assemble.shard returned as long as the model is used. To end with "
                "whole parameters, call destroy(gather=True) first"
            )
        if any(owner.states_offloaded for owner in map(owner_of, held) if owner is not None):
            raise RuntimeError(f"{names} has no values: {OFFLOADED}")
        raise RuntimeError(
            f"{names} is sharded and has no values here, but {_module_using(args)} uses it in "
            f"{getattr(func, '__name__', func)}. Call the module that holds it as module(x), not "
            "module.forward(x). If another module reads it, call zero_full.register_external_parameter. "
            "Outside of forward, read or write it on every rank inside "
            "zero_full.GatheredParameters(parameters, modifier_rank=0)"
        )


@cache
def released_class(kind: type[Parameter]) -> type[Parameter]:
    """Return the class of released parameters of the class `kind`, which is its attribute `present`."""
    methods = {name: _raising(getattr(kind, name)) for name in OF_DTENSORS if hasattr(kind, name)}
    return type(f"Released{kind.__name__}", (ReleasedTensor, kind), {"present": kind, **methods})


def _raising(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that raises like `__torch_function__`, for methods where torch does not call that."""

    def method(self: ReleasedTensor, *args: Any, **kwargs: Any) -> Any:
        return ReleasedTensor.__torch_function__(own, (type(self),), (self, *args), kwargs)

    return method


def _module_using(used: Any) -> str:
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
    owners = [owner_of(each) for each in tensors_in(used) if isinstance(each, ReleasedTensor)]
    roots = [*(owner.watch.model for owner in owners if owner is not None), around[-1]]
    names = [name for root in roots for name, module in root.named_modules() if module is inside]
    return f"{names[0] or 'the model' if names else 'a module'} ({type(inside).__name__})"
