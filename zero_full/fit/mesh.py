"""A described model on a mesh: its matrices cut for tensor parallelism, or its layers for a pipeline.

Tensor parallelism cuts what transformers' own plans cut (`base_model_tp_plan`), in families whose plans have
no other rules: projections into a block by columns, those out of it by rows, and the output layer by columns
unless it is tied to the embedding.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zero_full.errors import FitError
from zero_full.fit.activation_estimate import LOSS, Batch, activations
from zero_full.fit.hf_config import Shape, key_of
from zero_full.pipeline.module import PipelineModule, TiedLayerSpec
from zero_full.plan import Plan

COLUMNS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "query_key_value", "dense_h_to_4h", "fc1"}
ROWS = {"o_proj", "down_proj", "dense", "dense_4h_to_h", "fc2"}
HEADS = {"lm_head", "embed_out"}  # output layers
FAMILIES = ("gemma", "gemma2", "gpt_neox", "llama", "mistral", "olmo", "phi", "qwen2")


def cut_for_tensor(shape: Shape, model: nn.Module, ranks: int) -> dict[str, str]:
    """Replace the model's matrices by those of one of `ranks` tensor-parallel ranks.

    Returns the kind of cut, "Colwise" or "Rowwise", by the modules' names, with * for the layers' numbers.
    """
    if shape.family.model_type not in FAMILIES:
        raise FitError(
            f"--tensor: {shape.family.model_type} is not supported, only {', '.join(FAMILIES)}. Cut "
            "the model yourself, and use python -m zero_full plan --tensor"
        )
    for name in ("heads", "kv"):
        if shape.sizes.get(name, ranks) % ranks:
            key, size = key_of(shape.family, name), shape.sizes[name]
            raise FitError(f"--tensor: {key}, {size:,}, is not divisible by {ranks}")
    first, found = next(model.parameters()), dict[str, str]()
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        weight = getattr(module, "weight", None)
        if last in ROWS:
            _cut(name, module, "weight", 1, ranks)
        elif last in COLUMNS or (last in HEADS and weight is not first):
            for param in [param for param, _ in module.named_parameters(recurse=False)]:
                _cut(name, module, param, 0, ranks)
        else:
            continue
        numbers = ("*" if part.isdigit() else part for part in name.split("."))
        found[".".join(numbers)] = "Rowwise" if last in ROWS else "Colwise"
    return found


def _cut(name: str, module: nn.Module, param: str, dim: int, ranks: int) -> None:
    sizes = [*getattr(module, param).shape]
    if sizes[dim] % ranks:
        raise FitError(f"--tensor: {name}.{param} has {sizes[dim]:,} rows or columns to divide by {ranks}")
    sizes[dim] //= ranks
    made = nn.Parameter(torch.empty(sizes, device="meta"))
    made.tensor_model_parallel = True  # type: ignore[attr-defined]
    module.register_parameter(param, made)


def as_pipeline(shape: Shape, ranks: int) -> PipelineModule:
    """Describe the model as a PipelineModule of `ranks` ranks: embedding, blocks, last norm, output layer."""
    layers: list[Any] = [layer for layer, _ in layers_of(shape.model())]
    if ranks > len(layers):
        raise FitError(f"--pipe: {ranks} stages, but the model has only {len(layers)} layers")
    first, last = layers[0], layers[-1]
    if next(last.parameters()) is next(first.parameters()):
        layers[0] = layers[-1] = TiedLayerSpec("embedding", lambda: first)
    with torch.device("meta"):
        return PipelineModule(layers, ranks)


def layers_of(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the modules that run one after the other, and whether each is a block. Lists are opened."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from ((block, True) for block in child)
        elif any(isinstance(inner, nn.ModuleList) for inner in child.children()):
            yield from layers_of(child)
        else:
            yield child, False


def with_activations(
    shape: Shape, batch: Batch, micro_batches: int, parameter_bytes: int, made: Plan
) -> Plan:
    """Return the plan of the pipeline's place with the highest peak, with estimated activations."""
    is_block = [block for _, block in layers_of(shape.model())]
    handed = batch.tokens * shape.sizes["width"] * parameter_bytes * micro_batches
    places = []
    for place in made.places:
        part = place.pipeline
        assert part is not None
        ((first, end),), (flying,) = part.layers, part.in_flight
        is_last = part.place + 1 == part.ranks
        held = activations(shape, batch, parameter_bytes, sum(is_block[first:end]), flying, is_last)
        if held is not None and is_last:
            held += LOSS[parameter_bytes] * batch.tokens * shape.sizes["vocabulary"]
        received = handed * ((part.place > 0) + (not is_last))
        places.append(replace(place, activations=held, received=received))
    return replace(max(places, key=lambda each: each.peak), places=tuple(places))
