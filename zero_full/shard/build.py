"""From a topology, a model and an optimizer to communicators and buckets."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from zero_full.comm.communicator import Communicator
from zero_full.comm.ledger import Traffic
from zero_full.comm.topology import Topology, new_group
from zero_full.layout import backward_order, deal, round_robin
from zero_full.precision.norms import GradientNorm
from zero_full.shard.bucket import Bucket, Kind, Member
from zero_full.shard.owners import refuse_owned
from zero_full.shard.settings import Settings


@dataclass(frozen=True)
class Pair:
    """State is cut over the ranks of `shard` and repeated over those of `across`."""

    shard: Communicator
    across: Communicator


@dataclass(frozen=True)
class Groups:
    """The topology as communicators, made once."""

    dense: Pair
    expert: Pair | None
    model: Communicator | None
    norm: GradientNorm
    data_ranks: int  # ranks whose gradients are averaged
    traffic: Traffic

    @property
    def everyone(self) -> list[Communicator]:
        """Groups that together reach every rank whose gradients meet this rank's."""
        groups = [self.dense.shard, self.dense.across]
        return [*groups, self.model] if self.model is not None else groups


@dataclass(frozen=True)
class Connection:
    """How to open communicators."""

    device: torch.device
    traffic: Traffic
    own_groups: bool  # so that calls beside backward never mix with the user's on the same group
    check_timeout_s: float | None

    def to(self, group: dist.ProcessGroup | None) -> Communicator:
        """A communicator for this group; None: a rank that is alone."""
        if group is not None and self.own_groups:
            group = new_group(dist.get_process_group_ranks(group), like=group)
        return Communicator(group, self.device, self.traffic, self.check_timeout_s)

    def pair(self, stage: int, shard: dist.ProcessGroup | None, across: dist.ProcessGroup | None) -> Pair:
        """Stage 0 cuts nothing: its shard is this rank alone."""
        return Pair(self.to(None), self.to(shard)) if stage == 0 else Pair(self.to(shard), self.to(across))


def connect(topology: Topology, stage: int, connection: Connection) -> Groups:
    """Open a communicator for every group of the topology. Every rank must call this."""
    data = topology.data
    if data is None and dist.is_initialized():
        data = dist.group.WORLD
    if topology.shard is not None and stage == 0:
        raise ValueError("stage 0 shards nothing: use stage 1 or 2, or drop `shard` and `replicate`")
    dense = connection.pair(stage, topology.shard or data, topology.replicate)
    expert = None
    if topology.expert_data is not None:
        expert = connection.pair(stage, topology.expert_data, None)
    model = connection.to(topology.model) if topology.model is not None else None
    norm = GradientNorm(
        dense.shard,
        expert.shard if expert is not None else None,
        connection.to(topology.expert) if expert is not None else None,
        model,
    )
    ranks = dense.shard.size * dense.across.size
    return Groups(dense, expert, model, norm, ranks, connection.traffic)


def make_buckets(
    model: nn.Module,
    param_groups: Sequence[Mapping[str, Iterable[Parameter]]],
    topology: Topology,
    groups: Groups,
    settings: Settings,
) -> list[Bucket]:
    """Deal every trained parameter into a bucket, in the order in which buckets will leave."""
    group_of = {p: number for number, group in enumerate(param_groups) for p in group["params"]}
    names = {p: name for name, p in model.named_parameters()}
    strangers = {p: f"parameter {i} (not in the model)" for i, p in enumerate(group_of) if p not in names}
    trained = [(name, p) for p, name in (names | strangers).items() if p in group_of and p.requires_grad]
    refuse_owned(trained)
    _refuse_shared_memory(trained)
    kinds = [_kind(name, p, topology, groups) for name, p in trained]
    numels = [p.numel() for _, p in trained]
    buckets = []
    for indices in deal(backward_order(len(trained)), numels, kinds, settings.bucket_numel):
        kind = kinds[indices[0]]
        pair = groups.expert if kind.expert and groups.expert is not None else groups.dense
        if settings.round_robin:
            indices = round_robin(indices, pair.shard.size)
        members = [
            Member(*trained[index], group_of[trained[index][1]], place) for place, index in enumerate(indices)
        ]
        divisors = settings.divisors(groups.data_ranks)
        buckets.append(Bucket(members, kind, pair.shard, pair.across, settings, divisors))
    return buckets


def settle_the_rest(
    model: nn.Module,
    param_groups: Sequence[Mapping[str, Iterable[Parameter]]],
    topology: Topology,
    groups: Groups,
    settings: Settings,
) -> None:
    """Frozen parameters and buffers: the first rank's values, in the trained parameters' dtype."""
    trained = {p for group in param_groups for p in group["params"] if p.requires_grad}
    frozen = [(name, p) for name, p in model.named_parameters() if p not in trained]
    for name, tensor in [*frozen, *model.named_buffers()]:
        expert = isinstance(tensor, Parameter) and topology.is_expert(name, tensor)
        pair = groups.expert if expert and groups.expert is not None else groups.dense
        _broadcast(tensor.data, pair, name)
        tensor.data = tensor.data.to(settings.dtypes.of(tensor.dtype))


def _broadcast(tensor: Tensor, pair: Pair, name: str) -> None:
    sent = tensor.contiguous()
    raw = sent.view(torch.uint8) if sent.dtype == torch.bool else sent  # gloo knows no bool
    for group in (pair.shard, pair.across):
        if raw.numel():
            group.broadcast(raw, name)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.copy_(sent)


def _kind(name: str, param: Parameter, topology: Topology, groups: Groups) -> Kind:
    if not param.is_floating_point():
        raise TypeError(f"{name} is {param.dtype}: only floating-point parameters can be trained here")
    expert = topology.is_expert(name, param)
    if expert and groups.expert is None:
        raise ValueError(
            f"{name} is marked as an expert, but there are no expert groups: "
            "pass topology=Topology(expert=..., expert_data=...)"
        )
    counts = groups.model is None or groups.model.rank == 0 or topology.is_split(name, param)
    return Kind(param.dtype, param.device, expert, counts)


def _refuse_shared_memory(trained: Sequence[tuple[str, Parameter]]) -> None:
    """Two parameters in the same memory would be torn apart, and no longer be tied."""
    spans = sorted(
        (p.untyped_storage().data_ptr() + p.storage_offset() * p.element_size(), p.nbytes, name)
        for name, p in trained
        if p.numel()
    )
    for (start, size, name), (next_start, _, next_name) in pairwise(spans):
        if next_start < start + size:
            raise ValueError(
                f"{name} and {next_name} share memory but are two parameters. To tie weights, assign the "
                "same nn.Parameter to both modules"
            )
