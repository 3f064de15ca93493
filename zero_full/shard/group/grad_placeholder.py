"""Placeholders in `param.grad` for gradients that are in a flat buffer.

[Note: gradient placeholders] Gradients are averaged in flat buffers, of which this rank keeps a slice, so no
whole tensor exists for `param.grad`. None would be wrong: `clip_grad_norm_` would compute a norm of 0. A
`GradPlaceholder` has the parameter's shape and no memory. User code can clear it, as `module.zero_grad()`
does, or replace it by a tensor. Both take effect at the next backward pass or step. Any function that would
read or change its values raises, with a remedy in the message.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from zero_full._compat import foreach_zero, without_overrides
from zero_full.shard.group.parameters import Member, placeholder_scalar
from zero_full.shard.group.released import CONVERSIONS, WITHOUT_VALUES, call_plain

CLEARING = {Tensor.zero_, foreach_zero}
UNSCALED = (
    "the grad of {} was assigned, and with a loss scale it is unknown whether it is scaled. Use "
    "zero_full.safe_set_full_grad(param, value), which takes an unscaled gradient"
)


class GradPlaceholder(Tensor):
    """Placeholder for a gradient: right shape and dtype, no values. See [Note: gradient placeholders]."""

    parameter = "a parameter"  # its name
    member: Member | None = None  # None: a conversion such as `grad.float()`, with no gradient behind it
    owner: Callable[[], "ShownGradients | None"] = staticmethod(lambda: None)  # weak: see `Hook`

    @classmethod
    def of(cls, member: Member, owner: "ShownGradients") -> "GradPlaceholder":
        """Make the placeholder for this parameter's gradient."""
        shown = placeholder_scalar(member.param.dtype, member.param.device).expand(member.param.shape)
        made = shown.as_subclass(cls)
        made.parameter, made.member, made.owner = member.name, member, weakref.ref(owner)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run functions that do not read values, handle `zero_`, and raise for all others."""
        if func in WITHOUT_VALUES:
            return call_plain(func, args, kwargs)
        if func in CONVERSIONS:
            converted = call_plain(func, args, kwargs).as_subclass(GradPlaceholder)
            converted.parameter = args[0].parameter
            return converted
        given = args[0] if args and isinstance(args[0], (tuple, list)) else args
        found = [each for each in given if isinstance(each, GradPlaceholder)]
        if func in CLEARING and len(found) == len(given):
            for each in found:
                if (owner := each.owner()) is not None:
                    owner.zero(each)
            return args[0]
        if func is Tensor.__repr__:
            return f"<the gradient of {found[0].parameter}: averaged in a flat buffer>"
        name = found[0].parameter if found else "a parameter"
        raise RuntimeError(
            f"{name}.grad has no values: after backward, averaged gradients are in flat buffers. To clip "
            "their norm, set the key gradient_clipping; the norm is engine.get_global_grad_norm(). To read "
            "or replace a gradient, use zero_full.safe_get_full_grad(param) and safe_set_full_grad(param, "
            "value), or assign a tensor to param.grad. Do not use torch's GradScaler: the key fp16 has a "
            "loss scale"
        )


@dataclass
class Found:
    """Gradients that user code cleared or wrote since they were shown."""

    cleared: list[Member] = field(default_factory=list)
    written: list[tuple[Member, Tensor]] = field(default_factory=list)


class ShownGradients:
    """The placeholders and averaged gradients that we have put into `param.grad`."""

    def __init__(self, zero: Callable[[Member], None]) -> None:
        self.zero_gradient_of = zero
        self.shown: dict[Member, Tensor] = {}

    def show(self, members: Iterable[Member]) -> None:
        """Put placeholders into `grad` of these parameters, because their gradients are in a buffer."""
        with without_overrides():  # a released parameter has a `__torch_function__`
            for member in members:
                # A new one each time: one that user code has kept belongs to an earlier gradient.
                member.param.grad = self.shown[member] = GradPlaceholder.of(member, self)

    def hand_out(self, member: Member, gradient: Tensor) -> None:
        """Put this averaged gradient into `param.grad`."""
        member.param.grad = self.shown[member] = gradient

    def zero(self, placeholder: GradPlaceholder) -> None:
        """Set the gradient behind a placeholder to zero, if it is still the current one."""
        member = placeholder.member
        if member is not None and self.shown.get(member) is placeholder:
            self.zero_gradient_of(member)

    def changes(self) -> Found:
        """Return the gradients that user code cleared or replaced, each once."""
        found = Found()
        with without_overrides():
            for member, placeholder in list(self.shown.items()):
                grad = member.param.grad
                if grad is placeholder:
                    continue
                del self.shown[member]
                if grad is None:
                    found.cleared.append(member)
                else:
                    found.written.append((member, grad))
        return found

    def lift(self) -> None:
        """Remove all placeholders from `param.grad`, because autograd would accumulate into them."""
        for member, placeholder in self.shown.items():
            if member.param.grad is placeholder:
                member.param.grad = None
        self.shown.clear()


def names_of(members: Iterable[Member]) -> str:
    """Join the parameters' names for a message, in an order that is equal on every rank."""
    return ", ".join(sorted(member.name for member in members))
