"""Hooks around every call of the model, through the engine or directly.

loss scale  outputs pass an autograd function that multiplies their gradients by the loss scale in backward,
            unless the loss was scaled already
autocast    forward runs inside `torch.autocast`
fp16 casts  floating-point inputs are converted to the parameters' dtype
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zero_full._compat import running_ddp
from zero_full.nested import mapped
from zero_full.precision.scaler import StaticScale
from zero_full.shard.passes.module_hooks import Hook
from zero_full.shard.passes.reduce import GradientReducer
from zero_full.shard.step.optimizer import ZeroOptimizer


class ForwardHooks:
    """Registers the forward hooks that the options need on `model`. Without an option it registers none.

    scales_outputs  scale the gradients of outputs
    casts_to        the dtype for floating-point inputs; None: leave them
    autocast        makes the context of a forward; None: none
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: ZeroOptimizer,
        scales_outputs: bool,
        casts_to: torch.dtype | None = None,
        autocast: Callable[[], torch.autocast] | None = None,
    ) -> None:
        self.reducer, self.scaler = optimizer.reducer, optimizer.scaler
        self.scales_outputs, self.casts_to, self.autocast = scales_outputs, casts_to, autocast
        self.autocasts: list[torch.autocast] = []  # entered and not left: a model may call itself
        self.hooks = []
        if scales_outputs or casts_to is not None or autocast is not None:
            before, after = Hook(model, self.before), Hook(model, self.after)
            self.hooks = [
                model.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                model.register_forward_hook(after, always_call=True),
            ]

    def before(self, args: Any, kwargs: Any) -> Any:
        """Cast the inputs; enter autocast."""
        if self.autocast is not None:
            self.autocasts.append(self.autocast())
            self.autocasts[-1].__enter__()
        return mapped(self._cast, (args, kwargs)) if self.casts_to is not None else None

    def after(self, args: Any, output: Any) -> Any:
        """Leave autocast; scale the gradients of the outputs."""
        if self.autocasts:  # empty if another hook raised before `before` ran
            self.autocasts.pop().__exit__(None, None, None)
        return (
            mapped(self._with_scaled_gradient, output)
            if self.scales_outputs and torch.is_grad_enabled()
            else None
        )

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()

    def _cast(self, value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.casts_to) if floating else value

    def _with_scaled_gradient(self, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.requires_grad:
            return output
        # A function and not a hook: a hook on an output would also scale the gradients that flow through it
        # from another output, which are scaled already.
        scaled: Tensor = _ScaleGradient.apply(output, self.reducer, self.scaler)  # type: ignore[no-untyped-call]
        return scaled


class DdpCheck:
    """Raises if the model's first call comes from DistributedDataParallel, which would average twice."""

    def __init__(self, model: nn.Module) -> None:
        self.handle = model.register_forward_pre_hook(Hook(model, self.check))

    def check(self, args: Any) -> None:
        """Raise RuntimeError inside DistributedDataParallel; else remove the hook."""
        if running_ddp() is not None:
            raise RuntimeError(
                "DistributedDataParallel wraps a model whose gradients zero_full averages: they would be "
                "averaged twice. Remove DistributedDataParallel, and call the engine or the module itself"
            )
        self.remove()

    def remove(self) -> None:
        """Remove the hook."""
        self.handle.remove()


class _ScaleGradient(torch.autograd.Function):
    """The identity in forward; in backward multiplies the gradient by the loss scale, once."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, reducer: GradientReducer, scaler: StaticScale) -> Tensor:
        """Return the output unchanged."""
        ctx.reducer, ctx.scaler, ctx.output = reducer, scaler, output.detach()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the scaled gradient."""
        output, backward, scale = ctx.output, ctx.reducer.backward, ctx.scaler.scale
        if backward.running and backward.scaled:
            return grads[0], None, None
        if scale != 1 and output.dim():
            raise RuntimeError(
                "gradients reached the model's outputs without the loss scale, so small ones were lost. Use "
                "engine.backward(loss) or engine.scale(loss).backward(); without an engine, "
                "optimizer.scale(loss).backward(). Or let the model return its loss. Do not use torch's "
                "GradScaler"
            )
        if not backward.running:
            ctx.reducer.begin()
        if output.dim() == 0:
            backward.note_loss(output)
        backward.scaled_at_outputs = True
        return grads[0] * scale, None, None
