"""Build the torch optimizer of a configuration's `optimizer` section."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_full.formatting import shown
from zero_full.optim.arguments import as_call, check_signature, checked_options, classes_in, flag, nearest
from zero_full.optim.fused_adam import FusedAdam
from zero_full.optim.lamb import Lamb
from zero_full.optim.lion import Lion
from zero_full.optim.muon import Muon, muon_groups
from zero_full.optim.one_bit import OneBitAdam
from zero_full.optim.one_bit_lamb import OneBitLamb
from zero_full.optim.zero_one_adam import ZeroOneAdam

NOT_SUPPORTED = {"muadam": "Adam", "muadamw": "AdamW", "musgd": "SGD"}  # DeepSpeed's; the nearest one here
ADAM_SWITCHES = {"adam_w_mode", "torch_adam"}  # options that choose between torch's classes
# DeepSpeed's switches that our classes lack: the only value that is allowed, and the reason.
Fixed = Mapping[str, tuple[bool | str, str]]
OF_TORCH: Fixed = {
    "bias_correction": (True, "this optimizer has no such switch. Remove it"),
    "fp32_optimizer_states": (True, "the state has the dtype of the master parameters. Remove it"),
}
OF_LAMB: Fixed = {"amsgrad": (False, "LAMB has no such variant. Remove it")}
OF_MUON: Fixed = {
    **OF_TORCH,
    "adam_w_mode": (True, "parameters outside of Muon are stepped by AdamW. Remove it"),
    "torch_adam": (False, "Muon has its own AdamW. Remove it"),
    "per_head_muon": (False, "attention heads are not orthogonalized one by one. Remove it"),
}
FIXED: dict[str, Fixed] = {
    **dict.fromkeys(("adam", "adamw", "adagrad", "lion"), OF_TORCH),
    **dict.fromkeys(("lamb", "fusedlamb"), OF_LAMB),
    "muon": OF_MUON,
}
# Device types with a fused kernel in all supported versions of torch. On others torch chooses.
FUSED_ON = {
    torch.optim.Adam: {"cpu", "cuda", "mps", "xpu"},
    torch.optim.AdamW: {"cpu", "cuda", "mps", "xpu"},
    torch.optim.SGD: {"cpu", "cuda", "mps", "xpu"},
    torch.optim.Adagrad: {"cpu"},
}


def build_optimizer(
    type: str, params: Mapping[str, Any], groups: list[dict[str, Any]], model: nn.Module | None = None
) -> Optimizer:
    """Build the optimizer with this name, in any case. Options of `groups` take precedence over `params`.

    `model`: the model with the parameters, from which Muon learns which of them are hidden matrices.
    """
    if not isinstance(type, str):
        raise ValueError(f"optimizer.type must be the name of an optimizer, not {shown(type)}")
    name = type.lower()
    if "max_grad_norm" in params:
        raise ValueError(
            "optimizer.params.max_grad_norm: the optimizer does not clip. Use the top-level key "
            "gradient_clipping"
        )
    options = dict(params)
    for key in ADAM_SWITCHES & options.keys():
        options[key] = flag(f"optimizer.params.{key}", options[key])
    if name in ("adam", "adamw"):
        # As in DeepSpeed, "Adam" is AdamW (decoupled decay) unless `adam_w_mode` is false.
        decoupled = options.pop("adam_w_mode", True) or name == "adamw"
        kind: Any = torch.optim.AdamW if decoupled else torch.optim.Adam
        is_torchs = options.pop("torch_adam", False)
        if not is_torchs:
            options.setdefault("weight_decay", 0.0)  # DeepSpeed's default; torch's AdamW has 0.01
        if not flag("optimizer.params.bias_correction", options.get("bias_correction", True)):
            if is_torchs:
                raise ValueError(
                    "optimizer.params.bias_correction cannot be false with torch_adam: torch always corrects "
                    "the bias. Remove torch_adam"
                )
            kind = FusedAdam
            options["adam_w_mode"] = decoupled
    else:
        kind = optimizer_class(type)
    fixed = FIXED.get(name, {})
    if kind is FusedAdam:
        fixed = {key: each for key, each in fixed.items() if key != "bias_correction"}
    options = _drop_fixed(options, fixed)
    check_signature("optimizer.params", kind, options)
    groups = parameter_groups(groups)
    options = checked_options(kind, options, "optimizer.params.{}".format)
    groups = [
        checked_options(kind, group, f'"{{}}" of parameter group {number}'.format)
        for number, group in enumerate(groups)
    ]
    if kind is Muon and model is not None:
        groups = muon_groups(model, groups)
    options |= fused_if_possible(kind, groups, options)
    try:
        made: Optimizer = kind(groups, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"optimizer.params: {as_call(type, params)} is invalid: {error}") from error
    return made


def parameter_groups(given: Iterable[Any]) -> list[dict[str, Any]]:
    """Return parameters, or groups of parameters, as a list of groups with lists."""
    if not isinstance(given, Iterable):
        raise TypeError(f"model_parameters must be parameters, or groups of them, not {shown(given)}")
    everything = list(given)
    if not any(isinstance(each, Mapping) for each in everything):
        return [{"params": _tensors(everything, "model_parameters")}]
    groups = []
    for number, group in enumerate(everything):
        if not isinstance(group, Mapping) or "params" not in group:
            raise ValueError(f'parameter group {number} must be a dictionary with a key "params"')
        params = group["params"]
        if isinstance(params, set):
            raise ValueError(
                f"parameter group {number} is a set, which ranks may iterate in different orders. Pass a list"
            )
        listed = [params] if isinstance(params, Tensor) else list(params)
        groups.append({**group, "params": _tensors(listed, f"parameter group {number}")})
    return groups


def _tensors(params: list[Any], where: str) -> list[Tensor]:
    for each in params:
        if not isinstance(each, Tensor):
            raise TypeError(f"{where} must have parameters, such as model.parameters(), not {shown(each)}")
    return params


def optimizer_class(type: str) -> Any:
    """Return the optimizer class of this name, in any case; ValueError if the name is unknown."""
    name = type.lower()
    if near := NOT_SUPPORTED.get(name):
        raise ValueError(f"optimizer.type: zero_full does not have {type} yet. The nearest is {near}")
    ours: dict[str, Any] = {"Lion": Lion, "Lamb": Lamb, "FusedLamb": Lamb, "Muon": Muon}
    ours |= {"OneBitAdam": OneBitAdam, "OneBitLamb": OneBitLamb, "ZeroOneAdam": ZeroOneAdam}
    known = ours | classes_in(torch.optim, Optimizer) | ours  # ours first, and our Muon instead of torch's
    for each, kind in known.items():
        if each.lower() == name:
            return kind
    hint = nearest(type, known) or f"; there are {', '.join(known)}"
    raise ValueError(f"optimizer.type: no optimizer is named {type!r}{hint}")


def served_stages(type: str) -> Sequence[int]:
    """Return the ZeRO stages that an optimizer of this name supports."""
    stages: Sequence[int] = getattr(optimizer_class(type), "zero_full_stages", (0, 1, 2, 3))
    return stages


def _drop_fixed(options: Mapping[str, Any], fixed: Mapping[str, tuple[bool | str, str]]) -> dict[str, Any]:
    for key in fixed.keys() & options.keys():
        only, reason = fixed[key]
        given = flag(f"optimizer.params.{key}", options[key]) if isinstance(only, bool) else options[key]
        if given != only:
            raise ValueError(f"optimizer.params.{key} cannot be {options[key]}: {reason}")
    return {key: value for key, value in options.items() if key not in fixed}


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
