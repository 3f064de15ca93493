"""Marks in the graph of autograd by which a gatherer knows where backward is.

They hold the gatherer weakly: Python finds no circle that goes through a tensor.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from zero_full.shard.passes.module_sites import Call


class Gatherer(Protocol):
    """Who wants to know."""

    def before_backward(self, call: Call) -> None:
        """Backward has reached the outputs of a call."""

    def after_backward(self, call: Call) -> None:
        """The backward of a call is done."""


Weakly = Callable[[], Gatherer | None]


def before_backward(gatherer: Weakly, call: Call, grad: Tensor) -> None:
    """A hook on outputs of a call: backward has reached them."""
    alive = gatherer()
    if alive is None:
        return
    if torch.is_grad_enabled() and any(flat.users == 0 for flat in call.site.flats):
        raise RuntimeError(
            f"backward with create_graph=True needs the parameters of {call.site.name or 'the model'} again "
            "when they are released: run forward and both backwards inside "
            "zero_full.GatheredParameters(list(model.parameters()))"
        )
    alive.before_backward(call)


def after_backward(gatherer: Weakly, call: Call, *grads: Any) -> None:
    """A hook on what inputs of a call have passed through: its backward is done."""
    alive = gatherer()
    if alive is not None:
        alive.after_backward(call)


class BackwardDone(torch.autograd.Function):
    """The identity on the way forward; on the way back it tells that a call's backward is complete."""

    @staticmethod
    def forward(ctx: Any, gatherer: Weakly, call: Call, *inputs: Tensor) -> Any:
        """The inputs as they are."""
        ctx.gatherer, ctx.call = gatherer, call
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradients as they are."""
        after_backward(ctx.gatherer, ctx.call)
        return None, None, *grads
