"""Check whether an optimizer may step on flat pieces of parameters.

A rank holds a range of a flat buffer: pieces of tensors, cut anywhere, in one dimension. An elementwise
update is the same on pieces. One that uses rows, columns, norms or products would silently compute something
else, so it raises unless its class declares that it can step pieces.
"""

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

from zero_full.optim.step import Stepper, steps_as_its_class

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    torch.optim.ASGD,
)
NOT_ELEMENTWISE: dict[type[Optimizer], str] = {
    torch.optim.LBFGS: "takes inner products over all parameters and calls a closure many times a step",
    torch.optim.Adafactor: "keeps means of whole rows and columns and divides by the norm of each tensor",
    torch.optim.Muon: "orthogonalises whole matrices",
    torch.optim.SparseAdam: "works on sparse gradients, and a flat buffer of gradients is dense",
}


def check_elementwise(optimizer: Optimizer, allow_untested: bool = False) -> None:
    """Raise TypeError, with the reason and a remedy, unless the optimizer may step on pieces."""
    kind, name = type(optimizer), type(optimizer).__name__
    if _declares(kind, "zero_full_elementwise") or _declares(kind, "zero_full_stepper"):
        return
    for refused, reason in NOT_ELEMENTWISE.items():
        if isinstance(optimizer, refused):
            instead = "an elementwise optimizer such as AdamW, or stage 0 without tensor parallelism"
            if refused is torch.optim.Muon:
                instead = "zero_full.Muon, which does the same at every stage"
            raise TypeError(f"{name} cannot step on pieces of parameters: it {reason}. Use {instead}")
    if not allow_untested and not any(_same_step(kind, known) for known in ELEMENTWISE):
        raise TypeError(
            f"zero_full does not know whether {name} can step on parameters that are cut into flat pieces. "
            "If its update of each element depends on that element alone, set the class attribute "
            f"{name}.zero_full_elementwise = True. If it can step pieces of tensors, give it a method "
            "zero_full_stepper that returns a zero_full.Stepper. To try at your own risk, set "
            '"zero_allow_untested_optimizer": true in the configuration'
        )


def own_stepper(optimizer: Optimizer, step: Any) -> Stepper | None:
    """Return the optimizer's own stepper, from its `zero_full_stepper`; None if it has none."""
    if not hasattr(optimizer, "zero_full_stepper"):
        return None
    kind = type(optimizer)
    if not (_declares(kind, "zero_full_stepper") and steps_as_its_class(optimizer, step)):
        raise TypeError(
            f"{kind.__name__} overrides step() but not zero_full_stepper, so its step() would never be "
            "called. Give it a zero_full_stepper of its own"
        )
    stepper: Stepper = optimizer.zero_full_stepper()
    return stepper


def _declares(kind: type[Optimizer], attribute: str) -> bool:
    """Return whether the class declares this attribute. Subclasses that override `step` do not inherit it."""
    for each in kind.__mro__:
        if attribute in vars(each):
            return bool(vars(each)[attribute]) and _same_step(kind, each)
    return False


def _same_step(one: type, other: type) -> bool:
    """Return whether both classes have the same `step`, without torch's wrapper."""
    steps = [inspect.unwrap(each.step) if hasattr(each, "step") else None for each in (one, other)]
    return steps[0] is steps[1]
