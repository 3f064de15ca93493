"""DeepSpeed's Adam and AdamW as torch's classes and arguments, and where torch's fused kernels are used.

Where it can, `fused_adam.py` replaces torch's step, with the same options and state.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

# Device types with a fused kernel in all supported versions of torch. On others torch chooses.
FUSED_ON = {
    torch.optim.Adam: {"cpu", "cuda", "mps", "xpu"},
    torch.optim.AdamW: {"cpu", "cuda", "mps", "xpu"},
    torch.optim.SGD: {"cpu", "cuda", "mps", "xpu"},
    torch.optim.Adagrad: {"cpu"},
}


def fused_if_possible(
    kind: type[Optimizer], groups: Iterable[Mapping[str, Any]], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `fused=True` if torch has a fused kernel for these parameters and no option excludes it."""
    devices = FUSED_ON.get(kind, set())
    params = [p for group in groups for p in group["params"]]
    broken = kind is torch.optim.SGD and any(p.device.type == "cpu" and p.element_size() < 4 for p in params)
    if broken and options.get("fused"):
        warnings.warn(
            "optimizer.params.fused: on CPU, torch's fused SGD skips most 16-bit elements (pytorch issue "
            "191763, in 2.13 and before). Set it to false, unless your torch is newer",
            stacklevel=3,
        )
    # Fused SGD also fails if some parameters get their momentum buffer later, because they are used later.
    broken = broken or (kind is torch.optim.SGD and bool(options.get("momentum")))
    if broken or "fused" in options or options.get("foreach") or options.get("differentiable"):
        return {}
    possible = all(p.is_floating_point() and p.device.type in devices for p in params)
    return {"fused": True} if devices and possible else {}


def adam_class(name: str, adam_w_mode: bool) -> type[Optimizer]:
    """torch's class: as in DeepSpeed, "Adam" is AdamW (decoupled decay) unless `adam_w_mode` is false."""
    return torch.optim.AdamW if name == "adamw" or adam_w_mode else torch.optim.Adam


def adam_options(params: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of torch's class, without DeepSpeed's own and with DeepSpeed's defaults."""
    options = {key: value for key, value in params.items() if key not in ("adam_w_mode", "torch_adam")}
    if not params.get("torch_adam"):
        options.setdefault("weight_decay", 0.0)  # torch's AdamW has 0.01
    return options
