"""From a configuration's `optimizer` section to a torch optimizer."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zero_full.optim.adam import adam_class, adam_options, fused_if_possible
from zero_full.optim.arguments import check_arguments, nearest
from zero_full.optim.lion import Lion

NOT_LANDED = {
    "onebitadam": "Adam",
    "zerooneadam": "Adam",
    "lamb": "AdamW",
    "onebitlamb": "AdamW",
    "muadam": "Adam",
    "musgd": "SGD",  # and any other mu: Muon, MuAdamW
}
# DeepSpeed's switches that torch does not have, at the value which torch's optimizers have anyway.
FIXED = {
    "bias_correction": (True, "torch always corrects the bias; remove it"),
    "fp32_optimizer_states": (True, "the state has the type of the master parameters; remove it"),
}


def build_optimizer(type: str, params: Mapping[str, Any], groups: list[dict[str, Any]]) -> Optimizer:
    """The optimizer of that name, in any case, over `groups`; a group's own options win over `params`."""
    name = type.lower()
    if "max_grad_norm" in params:
        raise ValueError(
            "optimizer.params.max_grad_norm: clipping is not the optimizer's; use the top-level key "
            "gradient_clipping"
        )
    options = dict(params)
    if "betas" in options:
        options["betas"] = tuple(float(beta) for beta in options["betas"])  # torch asks for a tuple of floats
    if name in ("adam", "adamw"):
        kind = adam_class(name, options.get("adam_w_mode", True))
        options = adam_options(options)
    else:
        kind = _class_of(type)
    if name in ("adam", "adamw", "adagrad", "lion"):
        options = _without_fixed(options)
    check_arguments("optimizer.params", kind, options)
    return kind(groups, **options, **fused_if_possible(kind, groups, options))


def _class_of(type: str) -> Any:
    name = type.lower()
    if name in NOT_LANDED or name.startswith("mu"):
        instead = NOT_LANDED.get(name, "AdamW")
        raise ValueError(f"optimizer.type: {type} has not landed in zero_full yet; the nearest is {instead}")
    known: dict[str, Any] = {"Lion": Lion, **_optimizers_of_torch()}
    for each, kind in known.items():
        if each.lower() == name:
            return kind
    hint = nearest(type, known) or f"; there are {', '.join(known)}"
    raise ValueError(f"optimizer.type: no optimizer is named {type!r}{hint}")


def _optimizers_of_torch() -> dict[str, Any]:
    found = {name: getattr(torch.optim, name) for name in dir(torch.optim)}
    return {
        name: each
        for name, each in found.items()
        if inspect.isclass(each) and issubclass(each, Optimizer) and each is not Optimizer
    }


def _without_fixed(options: Mapping[str, Any]) -> dict[str, Any]:
    for key, (only, reason) in FIXED.items():
        if options.get(key, only) != only:
            raise ValueError(f"optimizer.params.{key} cannot be {options[key]}: {reason}")
    return {key: value for key, value in options.items() if key not in FIXED}
