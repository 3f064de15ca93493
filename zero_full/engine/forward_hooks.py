"""What happens around every call of the model, through the engine or not.

fp16      the outputs pass a gate: on the way back it multiplies gradients by the loss scale, if nobody has
autocast  forward runs inside `torch.autocast`
casts     floating-point inputs get the parameters' type
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_full._compat import calling_ddp
from zero_full.nested import leaves, mapped
from zero_full.shard.passes.backward import BackwardPass
from zero_full.shard.passes.module_hooks import Hook
from zero_full.shard.step.optimizer import ZeroOptimizer


class ModelCalls:
    """The hooks around every call of the model; none, if none of the three things is wanted."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: ZeroOptimizer,
        gates: bool,
        casts_to: torch.dtype | None = None,
        autocast: Callable[[], torch.autocast] | None = None,
    ) -> None:
        self.optimizer, self.gates, self.casts_to, self.autocast = optimizer, gates, casts_to, autocast
        self.autocasts: list[torch.autocast] = []  # of the calls that are under way: a model may call itself
        self.hooks = []
        if gates or casts_to is not None or autocast is not None:
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
        """Leave autocast; put the gate behind the outputs."""
        if self.autocasts:  # this is called, too, if another hook has failed before ours
            self.autocasts.pop().__exit__(None, None, None)
        return mapped(self._gated, output) if self.gates and torch.is_grad_enabled() else None

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()

    def _cast(self, value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.casts_to) if floating else value

    def _gated(self, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.requires_grad:
            return output
        # Not a hook: gradients that reach an output on their way from another one are scaled already.
        gated: Tensor = _Gate.apply(output, self.optimizer)  # type: ignore[no-untyped-call]
        return gated


class FirstCall:
    """Looks, at the first call of a model, whether another wrapper calls it that averages gradients, too."""

    def __init__(self, model: nn.Module) -> None:
        self.handle = model.register_forward_pre_hook(Hook(model, self.look))

    def look(self, args: Any) -> None:
        """RuntimeError if there is one; else do not look again."""
        if calling_ddp() is not None:
            raise RuntimeError(
                "DistributedDataParallel calls a model whose gradients zero_full averages: they would be "
                "averaged twice. Call the engine, or the module itself, and leave DistributedDataParallel out"
            )
        self.remove()

    def remove(self) -> None:
        """Remove the hook."""
        self.handle.remove()


def watch_losses(backward: BackwardPass, outputs: Any) -> Any:
    """The outputs; `backward` is told when autograd reaches one of them that is a loss.

    Of several each becomes a view: gradients on their way from one to another, of which it is made, pass the
    other's view by.
    """
    several = sum(map(_is_loss, leaves(outputs))) > 1
    return mapped(partial(_watched, backward, several), outputs)


def _watched(backward: BackwardPass, several: bool, output: Any) -> Any:
    if not _is_loss(output):
        return output
    output, loss = output.view_as(output) if several else output, output.detach()
    output.register_hook(lambda grad: backward.reach(loss))
    return output


def _is_loss(output: Any) -> bool:
    return isinstance(output, Tensor) and output.requires_grad and output.dim() == 0


class _Gate(torch.autograd.Function):
    """The identity on the way forward; on the way back it scales the gradient, if nobody has done so."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, optimizer: ZeroOptimizer) -> Tensor:
        """The output as it is."""
        ctx.optimizer, ctx.output = optimizer, output.detach()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The gradient, scaled."""
        optimizer, output = ctx.optimizer, ctx.output
        backward, scale = optimizer.reducer.backward, optimizer.scaler.scale
        if backward.running and backward.scaled:
            return grads[0], None
        if scale != 1 and output.dim():
            raise RuntimeError(
                "with a loss scale, gradients must be scaled before they reach the model's outputs, or small "
                "ones are lost: use engine.backward(loss) or engine.scale(loss).backward() (with no engine "
                "optimizer.scale(loss).backward()), or let the model return its loss. They take the place of "
                "torch's GradScaler"
            )
        if not backward.running:
            optimizer.reducer.begin()
        if output.dim() == 0:
            backward.reach(output)
        backward.gated = True
        return grads[0] * scale, None
