"""What Adam means here: which class of torch's, in which form, and when its fused kernel runs.

Our own (`shard/fused_adam.py`) stands in for torch's step, with these options and this state, where it can.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

# Adagrad's came to CPU first and to GPUs later; elsewhere the choice is left to torch.
FUSED_ON = {
    torch.optim.Adam: {"cpu", "cuda", "mps", "xpu"},
    torch.optim.AdamW: {"cpu", "cuda", "mps", "xpu"},
    torch.optim.SGD: {"cpu", "cuda", "mps", "xpu"},
    torch.optim.Adagrad: {"cpu"},
}


def fused_if_possible(
    kind: type[Optimizer], groups: Iterable[Mapping[str, Any]], options: Mapping[str, Any]
) -> dict[str, Any]:
    """`fused=True` if torch has such a kernel here and the user asked for nothing that excludes it."""
    devices = FUSED_ON.get(kind, set())
    params = [p for group in groups for p in group["params"]]
    broken = kind is torch.optim.SGD and any(p.device.type == "cpu" and p.element_size() < 4 for p in params)
    if broken and options.get("fused"):
        warnings.warn(
            "optimizer.params.fused: on CPU, torch's fused SGD leaves most 16-bit elements where they are "
            "(pytorch issue 191763, in 2.13 and before); set it to false unless your torch is newer",
            stacklevel=3,
        )
    # Nor can fused SGD give some parameters their momentum later than others, as those that are used late.
    broken = broken or (kind is torch.optim.SGD and bool(options.get("momentum")))
    if broken or "fused" in options or options.get("foreach") or options.get("differentiable"):
        return {}
    possible = all(p.is_floating_point() and p.device.type in devices for p in params)
    return {"fused": True} if devices and possible else {}


def adam_class(name: str, adam_w_mode: bool) -> type[Optimizer]:
    """As in DeepSpeed, "Adam" is AdamW, whose decay is decoupled, unless `adam_w_mode` is false."""
    return torch.optim.AdamW if name == "adamw" or adam_w_mode else torch.optim.Adam


def adam_options(params: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for torch's class: DeepSpeed's own are taken out and its defaults put in."""
    options = {key: value for key, value in params.items() if key not in ("adam_w_mode", "torch_adam")}
    if not params.get("torch_adam"):
        options.setdefault("weight_decay", 0.0)  # torch's AdamW decays by 0.01 when nothing is said
    return options
