"""Merge LoRA adapters into their base weights to generate, and restore the base weights bit for bit.

PEFT's layers merge by an addition and unmerge by a subtraction, which rounds: the base weights would come
back with other low bits. So their values are kept aside and copied back. Parameters that stage 3 has gathered
for the generation need no copy: the gathered values are dropped, and this rank's shard was not written.

Layers are found by their methods, so PEFT is not imported.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zero_full.shard.group.parameters import FlatParameters
from zero_full.shard.step.optimizer import ZeroOptimizer

Bases = list[tuple[Any, dict[str, str]]]  # layers with adapters and their names: see `renaming`
Adapters = dict[nn.Module, list[str]]  # names of the adapters that a forward of each module uses
METHODS = ("merge", "unmerge", "get_base_layer")  # of PEFT's BaseTunerLayer


def adapter_layers(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the layers with adapters, by name in the module."""
    return [
        (name, each)
        for name, each in module.named_modules()
        if hasattr(each, "merged_adapters") and all(callable(getattr(each, name, None)) for name in METHODS)
    ]


@contextmanager
def merged_adapters(layers: Sequence[Any], optimizer: ZeroOptimizer) -> Iterator[None]:
    """Merge active adapters into their base weights within the context. These must be whole on this rank.

    Adapters that are merged already stay merged. Disabled adapters (PEFT's `disable_adapter`) are left out.
    """
    layers = [layer for layer in layers if not layer.merged_adapters and not _is_disabled(layer)]
    bases = dict.fromkeys(p for layer in layers for p in layer.get_base_layer().parameters())
    dropped, kept = _split(bases, optimizer)
    optimizer.merges += bool(layers)
    try:
        for layer in layers:
            layer.merge()
        yield
    finally:
        for layer in layers:
            if layer.merged_adapters:  # not if user code has unmerged or disabled them
                layer.unmerge()
        for param, (memory, values) in kept.items():
            param.data = memory
            memory.copy_(values)
        for flat in dropped:
            flat.show()  # points parameters to their memory again, and forgets writes
        optimizer.merges -= bool(layers)


def _split(
    params: dict[Parameter, None], optimizer: ZeroOptimizer
) -> tuple[list[FlatParameters], dict[Parameter, tuple[Tensor, Tensor]]]:
    """Return parameters whose flat buffer will be released, and copies of all other parameters."""
    dropped: dict[FlatParameters, None] = {}
    kept: dict[Parameter, tuple[Tensor, Tensor]] = {}
    for param in params:
        group, _ = optimizer.sharded.places.get(param, (None, None))
        if group is not None and group.parameters.released_at_rest and group.parameters.users == 1:
            dropped[group.parameters] = None
        else:
            memory = param.data
            kept[param] = memory, memory.clone(memory_format=torch.preserve_format)
    return list(dropped), kept


def plain_name(name: str) -> str:
    """Return the name that a parameter has in the model without adapters."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _is_disabled(layer: Any) -> bool:
    return bool(getattr(layer, "disable_adapters", False))


def active(layer: Any) -> list[str]:
    """Return the names of the adapters that a forward of the layer uses."""
    names = [] if _is_disabled(layer) else getattr(layer, "active_adapters", ["default"])
    return [names] if isinstance(names, str) else [*names]


def active_adapters(bases: Bases) -> list[str]:
    """Return the names of the adapters that are merged in any of these layers."""
    return sorted({name for layer, _ in bases for name in active(layer)})


def adapters_in_use(module: nn.Module) -> Adapters:
    """Return the active adapters of every layer with adapters, and of every module with trained copies."""
    layers = [layer for _, layer in adapter_layers(module)]
    return {each: active(each) for each in (*layers, *(copied for _, copied in _copied_modules(module)))}


def _copied_modules(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield PEFT's modules_to_save: wrappers with trained copies of whole modules, by name."""
    for name, each in module.named_modules():
        if hasattr(each, "modules_to_save") and hasattr(each, "original_module"):
            yield name, each


def renaming(module: nn.Module) -> tuple[Callable[[str], str | None], Bases]:
    """Return the names of a model whose adapters are merged.

    First a function from names in the module's state dict to names in the model without adapters. It returns
    None for adapters, and for the base weights that they change. Then the layers of these, each with its base
    weights: name in the layer's base, and in the model without adapters.
    """
    bases, prefixes, copies = Bases(), list[str](), dict[str, str | None]()
    for name, layer in adapter_layers(module):
        base = layer.get_base_layer()
        place = next(inner for inner, each in layer.named_modules() if each is base)
        names = {key: plain_name(f"{name}.{place}.{key}") for key, _ in base.named_parameters()}
        bases.append((layer, names))
        prefixes.append(f"{name}.")
    for name, each in _copied_modules(module):
        used = next((key for key in active(each) if key in each.modules_to_save), None)
        copies[f"{name}.original_module."] = f"{name}." if used is None else None
        for key in each.modules_to_save:
            copies[f"{name}.modules_to_save.{key}."] = f"{name}." if key == used else None

    def rename(name: str) -> str | None:
        if any(name.startswith(prefix) for prefix in prefixes):
            return None
        for prefix, instead in copies.items():
            if name.startswith(prefix):
                return None if instead is None else plain_name(instead + name.removeprefix(prefix))
        return plain_name(name)

    return rename, bases
