"""Checks of a model whose parameters are DTensors, before anything is built: layout, options and values."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zero_full.comm.topology import Topology, ranks_of
from zero_full.errors import DisagreementError
from zero_full.formatting import by_value, listed
from zero_full.optim import check_elementwise
from zero_full.settings import Settings
from zero_full.shard.group.checksum import fingerprint
from zero_full.shard.group.dtensors import block_of, is_dtensor, local_of
from zero_full.start.startup_checks import gather_everywhere

HOW = (
    'mesh = init_device_mesh(device, (data, tensor), mesh_dim_names=("data", "tensor")), then '
    'parallelize_module(model, mesh["tensor"], plan) and initialize(model=model, mesh=mesh, ...)'
)
SHARD, REPLICATE = "Shard", "Replicate"  # placements


def _named(model: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def check_dtensors(model: nn.Module, topology: Topology, settings: Settings) -> bool:
    """Return whether the model has DTensors. Raises ValueError if the engine does not support them."""
    found = [(name, tensor) for name, tensor in _named(model) if is_dtensor(tensor)]
    for name, tensor in found:
        _check_layout(name, tensor, topology)
    if not found:
        return False
    if topology.pipe is not None and topology.pipe.size() > 1:
        raise ValueError(
            f"{found[0][0]} is a DTensor. Pipeline stages of layers that tensor parallelism has cut are not "
            "supported. Use one of the two dimensions of the mesh"
        )
    for name, param in model.named_parameters():
        if not is_dtensor(param) and topology.is_split(name, param):
            raise ValueError(
                f"{name} is marked as split over tensor-parallel ranks, but is no DTensor, and {found[0][0]} "
                "is one. Cut all layers of a model by the same tool"
            )
        if topology.is_expert(name, param):
            raise ValueError(f"{name} is an expert. Experts in a model with DTensors are not supported")
    check_dtensor_options(found[0][0], settings)
    return True


def check_dtensor_options(name: str, settings: Settings) -> None:
    """Raise ValueError if an option does not support DTensors, of which `name` is one."""
    for key, is_used in _unsupported(settings).items():
        if is_used:
            raise ValueError(
                f"{key} is not supported with DTensors ({name}). Leave it out, or pass a model that tensor "
                "parallelism has not cut"
            )


def _check_layout(name: str, tensor: Any, topology: Topology) -> None:
    """Raise ValueError unless this DTensor is laid out over the `tensor` ranks of the topology."""
    what = f"{name} is a DTensor on {tensor.device_mesh}"
    if topology.tensor is None:
        raise ValueError(
            f"{what}, and initialize got no mesh with a dimension 'tensor'. With parallelize_module or "
            f"from_pretrained(tp_plan=...): {HOW}. A model of fully_shard is sharded over the data ranks "
            "already: pass it as it was constructed"
        )
    ranks = sorted(tensor.device_mesh.mesh.flatten().tolist())
    if tensor.device_mesh.ndim != 1 or ranks != sorted(ranks_of(topology.tensor)):
        raise ValueError(
            f"{what}, but the dimension 'tensor' of this rank has the ranks {ranks_of(topology.tensor)}. Cut "
            f'the model over mesh["tensor"] of the mesh that initialize gets: {HOW}'
        )
    (placement,) = tensor.placements
    if type(placement).__name__ not in (SHARD, REPLICATE):
        raise ValueError(
            f"{name} is a DTensor with placement {placement!r}. Supported are Shard(dim) and Replicate(): "
            "redistribute it before initialize"
        )


def _unsupported(settings: Settings) -> Mapping[str, bool]:
    """Return the options that were not tried with DTensors, and whether they are in use."""
    gathering = settings.gathering
    return {
        "zero_hpz_partition_size": gathering.node_ranks > 1,
        "zero_quantized_weights": gathering.quantized_weights,
        "zero_quantized_gradients": gathering.quantized_gradients,
        "offload_optimizer.delay_update_after": settings.tier.delay_after is not None,
    }


WHOLE = "needs whole parameters"
FLAT = "compresses gradients with a scale for each flat buffer, which tensor parallelism cuts differently"
REASONS = {"Muon": WHOLE, "OneBitAdam": FLAT, "OneBitLamb": FLAT, "ZeroOneAdam": FLAT}


def check_split_rule(
    model: nn.Module, base: torch.optim.Optimizer, topology: Topology, allow_untested: bool = False
) -> None:
    """Raise ValueError or TypeError if the optimizer cannot update parameters that are cut.

    Elementwise rules can, and LAMB, whose norms are summed over the `tensor` ranks.
    """
    groups = ((p, name) for name, p in model.named_parameters())
    trained = {param for group in base.param_groups for param in group["params"]}
    split = [
        name for p, name in groups if p in trained and (block_of(p) is not None or topology.is_split(name, p))
    ]
    if not split:
        return
    if hasattr(base, "zero_full_stepper") and not getattr(base, "zero_full_sums_only", False):
        reason = REASONS.get(type(base).__name__, WHOLE)
        raise ValueError(
            f"{type(base).__name__} {reason}, and {listed(split)} are split over tensor-parallel ranks. Use "
            "an elementwise optimizer such as AdamW, or Lamb"
        )
    check_elementwise(base, allow_untested)


def compare_values(model: nn.Module, topology: Topology) -> None:
    """Raise DisagreementError on every rank if the ranks have different DTensors, or different values.

    Parts of a parameter must be equal on the ranks that hold the same part, and parameters that are not cut
    on the ranks of `tensor`. Every rank must call this.
    """
    assert topology.tensor is not None
    names = [name for name, _ in model.named_parameters()]
    laid_out = {name: _layout(p) for name, p in model.named_parameters()}
    prints = [fingerprint(local_of(p).detach().contiguous().view(-1)) for _, p in model.named_parameters()]
    values = dict(zip(names, torch.stack(prints).tolist() if prints else [], strict=True))
    mine = topology.tensor.rank(), ranks_of(topology.tensor), laid_out, values
    everyones = gather_everywhere(mine, topology)
    known = {rank: each[2] for rank, each in everyones.items()}
    differing = [name for name in names if len({each.get(name) for each in known.values()}) > 1]
    if differing or len({len(each) for each in known.values()}) > 1:
        name = differing[0] if differing else "the number of parameters"
        told = by_value({rank: str(each.get(name, len(each))) for rank, each in known.items()})
        raise DisagreementError(f"tensor-parallel ranks have different models: {name} is {'; '.join(told)}")
    row = everyones[min(everyones)][1]  # the tensor ranks of the first data rank
    columns: dict[int, list[int]] = {}
    for rank, (place, *_) in everyones.items():
        columns.setdefault(place, []).append(rank)
    told = []
    for name in names:
        how = laid_out[name]
        alike = [*columns.values()] if SHARD in how else [[*everyones]] if REPLICATE in how else [row]
        told += [
            f"{name} ({how}) on ranks {ranks[0]} and {other}"
            for ranks in alike
            for other in ranks
            if everyones[other][3][name] != everyones[ranks[0]][3][name]
        ][:1]
    if told:
        raise DisagreementError(
            f"ranks hold different values of the same parameters: {listed(told)}. Parts that tensor "
            "parallelism has cut must be equal on all data ranks, and whole parameters on all tensor ranks. "
            "Seed every rank alike before the model is constructed, or load the same weights"
        )


def _layout(param: Any) -> str:
    how = f"{param.dtype} of shape {tuple(param.shape)}"
    return f"{how}, {param.placements[0]!r}" if is_dtensor(param) else f"{how}, no DTensor"
