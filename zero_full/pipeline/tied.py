"""Tied layers on several stages: equal values at the beginning, and one gradient, the sum of all stages'.

Each stage holds a copy of a tied module. After the micro-batches of a step, and before gradients are averaged
over the data ranks, the stages sum their gradients. So all copies make the same update. The copy of the first
stage is the one that the gradient norm counts and a checkpoint holds (`Topology.is_copy`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from zero_full.comm.communicator import Communicator
from zero_full.comm.topology import Topology, new_group, ranks_of
from zero_full.pipeline.module import PipelineModule
from zero_full.shard.group.checksum import digest
from zero_full.shard.passes.reduce import GradientReducer


@dataclass(frozen=True)
class Tie:
    """A tied module that several places of the pipeline have."""

    key: str
    params: Sequence[Parameter]
    group: dist.ProcessGroup  # the ranks of this pipeline that have it; the first one owns it


def open_ties(module: PipelineModule, topology: Topology) -> list[Tie]:
    """Open the groups of tied modules that this rank shares with other places of its pipeline."""
    ties, pipe = [], topology.pipe
    for key, stages in sorted(module.owners.items()):
        places = [*dict.fromkeys(module.place_of(stage) for stage in stages)]
        if pipe is not None and len(places) > 1 and module.place in places:
            ranks = ranks_of(pipe)
            group = new_group(sorted(ranks[place] for place in places), pipe)
            ties.append(Tie(key, [*module.tied[key].parameters()], group))
    return ties


def check_equal(module: PipelineModule, tie: Tie) -> None:
    """Raise ValueError if the copies of a tied module have different values. Its ranks must call this."""
    tied = module.tied[tie.key]
    mine = [digest(tensor.detach()) for tensor in (*tied.parameters(), *tied.buffers())]
    everyones: list[Any] = [None] * tie.group.size()
    dist.all_gather_object(everyones, mine, group=tie.group)
    if any(theirs != mine for theirs in everyones):
        raise ValueError(
            f"the tied layer {tie.key!r} has different values on ranks {ranks_of(tie.group)}. Build or load "
            "it with the same values on every rank"
        )


def sum_gradients(tie: Tie, communicator: Communicator, reducer: GradientReducer) -> None:
    """Replace this rank's gradients of a tied module by the sum over its stages. Its ranks must call this.

    A parameter without a gradient on every stage, such as a frozen one, stays without.
    """
    places = [reducer.group_and_member[p] for p in tie.params if p in reducer.group_and_member]
    own = [group.gradients.own(member) for group, member in places]
    if not places:
        return
    dtype = places[0][0].gradients.accumulate
    numels = [member.param.numel() for _, member in places]
    total = -(-(sum(numels) + len(places)) // communicator.size) * communicator.size
    flat = torch.zeros(total, dtype=dtype, device=places[0][1].param.device)
    *parts, has_gradient = _parts(flat, [*numels, len(places)])  # the number of stages with a gradient
    for number, (part, gradient) in enumerate(zip(parts, own, strict=True)):
        if gradient is not None:
            part.copy_(gradient.reshape(-1))
            has_gradient[number] = 1
    communicator.all_reduce(flat, 1, f"gradients of the tied layer {tie.key}")
    for number, (part, gradient, (group, member)) in enumerate(zip(parts, own, places, strict=True)):
        summed = part.view(member.param.shape)
        if gradient is not None:
            gradient.copy_(summed)
        elif has_gradient[number] > 0:  # no micro-batch on this stage used it
            member.param.grad = summed.to(member.param.dtype)
            reducer.used.add(member)
            if not group.gradients.uses_param_grad:
                group.gradients.take(member, final=False)


def _parts(flat: Tensor, numels: Sequence[int]) -> list[Tensor]:
    parts, start = [], 0
    for numel in numels:
        parts.append(flat[start : start + numel])
        start += numel
    return parts
