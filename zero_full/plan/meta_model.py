"""Copy of a model on the meta device: the same modules, names and shapes, with a fake forward.

[Note: a fake pass] Modules are called once each, nested as in the model, in the order of registration or, if
it is known, of a real backward. Each uses its own parameters and calls its children; in the order of
registration, parameters come first. The activation is a scalar on the meta device. So autograd produces every
parameter's gradient, in reverse order, and all hooks of the runtime run as in a real pass. Two modules that
hold the same parameter both use it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zero_full._compat import parameters_and_children
from zero_full.shard.group.dtensors import block_of, is_dtensor, largest_shape, mark_stand_in

Counting = Callable[[], AbstractContextManager[None]]


def meta_copy_of(
    model: nn.Module, arrivals: Sequence[str] = (), making_gradient: Counting = nullcontext
) -> nn.Module:
    """Copy a model's modules, with the same classes and attributes, without hooks and on the meta device.

    arrivals         names of parameters in the order in which a backward produces their gradients, if known
    making_gradient  a context in which fake gradients are made
    """
    params = dict(model.named_parameters())
    at = {params[name]: -place for place, name in enumerate(arrivals) if name in params}
    modules: dict[nn.Module, nn.Module] = {}
    tensors: dict[Tensor, Tensor] = {}
    called: set[nn.Module] = set()  # in this pass

    def copied(tensor: Tensor) -> Tensor:
        if tensor not in tensors:
            shape = largest_shape(tensor) if is_dtensor(tensor) else tensor.shape
            empty = torch.empty(shape, dtype=tensor.dtype, device="meta")
            if isinstance(tensor, Parameter):
                empty = Parameter(empty, requires_grad=tensor.requires_grad)
                vars(empty).update(vars(tensor))  # marks, such as `allreduce`
            if is_dtensor(tensor):
                mark_stand_in(empty)
                if block_of(tensor) is not None:
                    empty.tensor_model_parallel = True  # type: ignore[attr-defined]
            tensors[tensor] = empty
        return tensors[tensor]

    def copy(module: nn.Module) -> nn.Module:
        if module in modules:
            return modules[module]
        made: nn.Module = object.__new__(type(module))
        modules[module] = made
        vars(made).update({**vars(module), **vars(nn.Module())})  # new dictionaries, without hooks
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            found = copied(param)
            assert isinstance(found, Parameter)
            nn.Module.register_parameter(made, name, found)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            nn.Module.register_buffer(made, name, copied(buffer))
        _, children = parameters_and_children(module)
        for name, child in children.items():  # includes a second name of the same child
            if child is not None:
                nn.Module.add_module(made, name, copy(child))
        vars(made)["forward"] = FakeForward(made, called, ranks_of(module), making_gradient)
        return made

    def ranks_of(module: nn.Module) -> dict[Any, int]:
        found: dict[Any, int] = {copied(p): at[p] for p in module.parameters(recurse=False) if p in at}
        for child in module.children():
            inside = [at[p] for p in child.parameters() if p in at]
            if inside:
                found[copy(child)] = min(inside)
        return found

    return copy(model)


def begin_pass(copied: nn.Module) -> None:
    """Prepare the copy for another forward: forget which modules were called."""
    vars(copied)["forward"].called.clear()


class FakeForward:
    """A module's fake forward. See [Note: a fake pass]."""

    def __init__(
        self,
        module: nn.Module,
        called: set[nn.Module],
        ranks: Mapping[Any, int] | None = None,
        making_gradient: Counting = nullcontext,
    ) -> None:
        """`ranks`: the places of parameters and children in forward, if known. Others come first."""
        self.module, self.called, self.making_gradient = module, called, making_gradient
        self.ranks = ranks or {}

    def __call__(self, x: Tensor) -> Tensor:
        """Use the module's own parameters, and call its children."""
        parts: list[Any] = [*self.module.parameters(recurse=False), *self.module.children()]
        for part in sorted(parts, key=self._rank):
            if isinstance(part, Tensor):
                if part.requires_grad:
                    x = _UseParameter.apply(x, part, self.making_gradient)  # type: ignore[no-untyped-call]
            elif part not in self.called:
                self.called.add(part)
                is_called = type(part).forward is not nn.Module.forward
                x = nn.Module.__call__(part, x) if is_called else vars(part)["forward"](x)
        return x

    def _rank(self, part: Any) -> float:
        return self.ranks.get(part, -inf)


class _UseParameter(torch.autograd.Function):
    """Autograd function that uses a parameter, so that backward produces its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor, making: Counting) -> Tensor:
        """Return a copy of the activation."""
        ctx.making = making
        ctx.like = param.shape, param.dtype, param.device
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Pass the gradient on, and return a zero gradient for the parameter."""
        shape, dtype, device = ctx.like
        with ctx.making():
            return grad, torch.zeros(shape, dtype=dtype, device=device), None
