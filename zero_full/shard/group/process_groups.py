"""Communicators of a topology: the process groups that shard and replicate state, and their collectives."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_full.comm.communicator import Communicator
from zero_full.comm.quantized import Gather, Nodes, QuantizedGather, TwoHopReduce
from zero_full.comm.topology import Topology, new_group, no_copy, ranks_of
from zero_full.comm.traffic import Traffic
from zero_full.comm.user_calls import UserCalls
from zero_full.precision.norms import has_fp64
from zero_full.settings import Settings

Reduce = Callable[[Tensor, Tensor, float, str], None]  # reduce-scatter: input, output, divisor, name
Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Pair:
    """The communicators of one kind of state: shards on `shard_comm`, replicas on `replica_comm`."""

    shard_comm: Communicator
    replica_comm: Communicator
    gather: Gather
    reduce: Reduce
    node: Communicator | None = None  # ranks of `shard_comm` on this node, which keep a copy among them
    gather_exactly: Gather | None = None  # without quantization; None: `gather` is exact
    gather_ranks: Communicator | None = None  # `gather` is its all-gather; None: another kind of gather

    def gather_objects(self, mine: Any, what: str) -> list[Any]:
        """All-gather small objects, with those of one `shard_comm` in a row. Every rank must call this."""
        gathered = [mine]
        for communicator in (self.shard_comm, self.replica_comm):
            gathered = [each for some in communicator.gather_objects(gathered, what) for each in some]
        return gathered


@dataclass(frozen=True)
class Communicators:
    """All communicators of an engine."""

    dense: Pair
    expert: Pair | None
    between_experts: Communicator | None  # ranks that hold different experts
    tensor: Communicator | None  # ranks that split single layers (tensor parallelism)
    pipe: Communicator | None  # ranks that hold different layers (pipeline parallelism)
    data_ranks: int  # number of ranks that average gradients
    traffic: Traffic
    all: list[Communicator]
    opened: list[dist.ProcessGroup]  # process groups of this engine alone, to be destroyed at the end
    user_calls: list[UserCalls]  # of the ranks that have the same parameters
    model_parallel_calls: list[UserCalls]  # of the ranks of `model_parallel`
    is_copy: Callable[..., bool] = no_copy  # by name: another rank of `pipe` counts and saves it

    def close(self) -> None:
        """Close all communicators, and destroy process groups of this engine. Every rank must call this.

        All are destroyed even if one of them raises; that error is raised at the end.
        """
        with ExitStack() as others:  # callbacks run in reverse order: communicators close first
            while self.opened:
                others.callback(_destroy, self.opened.pop())
            for communicator in self.all:
                others.callback(communicator.close)

    @property
    def device(self) -> torch.device:
        """The device of the model and of every collective."""
        return self.dense.shard_comm.device

    @property
    def model_parallel(self) -> list[Communicator]:
        """The communicators between ranks that hold different parts of the model."""
        return [each for each in (self.tensor, self.pipe) if each is not None]

    @property
    def everyone(self) -> list[Communicator]:
        """The communicators that reach every rank of the step, if they are used one after the other."""
        groups = [self.dense.shard_comm, self.dense.replica_comm]
        for each in (self.tensor, self.pipe):
            if each is not None:
                groups.append(each)
        return groups


def _destroy(group: dist.ProcessGroup) -> None:
    with suppress(ValueError):  # user code has destroyed all process groups already
        dist.destroy_process_group(group)


@dataclass(frozen=True)
class Connection:
    """Options for opening communicators, and lists of those that are open."""

    device: torch.device
    traffic: Traffic
    own_groups: bool  # open new groups, so that our collectives cannot interleave with user code's
    check_timeout_s: float | None
    shared_memory: bool = True  # use it between ranks of one host, if possible
    given: tuple[dist.ProcessGroup, ...] = ()  # groups that were opened for this engine already
    communicators: list[Communicator] = field(default_factory=list)
    opened: list[dist.ProcessGroup] = field(default_factory=list)

    def open(self, group: Group, label: str = "") -> Communicator:
        """Open a communicator for this group; None: for a single rank."""
        ours = any(group is each for each in self.given)
        if group is not None and group.size() > 1 and self.own_groups and not ours:
            group = new_group(ranks_of(group), group, self.device)
            self.opened.append(group)
        return self._over(group, label)

    def _over(self, group: Group, label: str = "") -> Communicator:
        made = Communicator(group, self.device, self.traffic, self.check_timeout_s, label, self.shared_memory)
        self.communicators.append(made)
        return made

    def pair(self, settings: Settings, shard: Group, replicas: Group) -> Pair:
        """Open the communicators for one kind of state. At stage 0 `shard` is a single rank."""
        if not settings.shards_state:
            shard, replicas = None, shard
        cut, copies = self.open(shard), self.open(replicas)
        if not settings.shards_parameters or shard is None or cut.size == 1:
            return Pair(cut, copies, cut.all_gather, cut.reduce_scatter, gather_ranks=cut)
        # With overlap, all-gathers of parameters run at the same time as reduce-scatters of gradients. They
        # need a group of their own, because the order of the two lanes differs from rank to rank.
        own_group = replace(self, own_groups=True, given=()) if settings.overlap else self
        gathering, reduce = settings.gathering, cut.reduce_scatter
        gathers = own_group.open(shard) if settings.overlap else cut
        gather: Gather = gathers.all_gather
        gather_ranks: Communicator | None = gathers
        nodes = node = gather_exactly = None
        if gathering.node_ranks > 1 or gathering.quantized_weights:
            nodes = self.nodes(gathering.node_ranks, shard)
            node, gather_ranks = nodes.inner if gathering.node_ranks > 1 else None, None
        if nodes is not None and gathering.quantized_weights:
            gather_exactly = gather
            gather = QuantizedGather(nodes).or_exactly(gather)
        if gathering.quantized_gradients:
            if nodes is None or settings.overlap:
                nodes = self.nodes(gathering.node_ranks, shard)
            reduce = TwoHopReduce(nodes).reduce_scatter
        return Pair(cut, copies, gather, reduce, node, gather_exactly, gather_ranks)

    def nodes(self, node_ranks: int, group: dist.ProcessGroup) -> Nodes:
        """Split the group into nodes of `node_ranks` neighbours, and open groups within and between nodes."""
        inner, outer = Topology(data=group).sub_groups(node_ranks, "zero_hpz_partition_size")
        self.opened.extend((inner, outer))
        return Nodes(self._over(inner), self._over(outer, "between nodes"))


def connect(topology: Topology, settings: Settings, connection: Connection) -> Communicators:
    """Open a communicator for every group of the topology. Every rank must call this."""
    data = topology.data
    if data is None and dist.is_initialized():
        data = dist.group.WORLD
    if data is not None and data.size() > 1 and not has_fp64(connection.device):
        raise ValueError(
            f"{connection.device.type} has no 64-bit floats, which ranks need to sum counts and norms. Use "
            "another device, or a single rank"
        )
    if topology.shard is not None and not settings.shards_state:
        raise ValueError(
            "stage 0 shards nothing, but the topology has `shard` and `replicate` groups. Use stage 1, 2 "
            "or 3, or omit these groups"
        )
    connection = replace(connection, given=topology.opened)
    dense = connection.pair(settings, topology.shard or data, topology.replicate)
    expert = None
    if topology.expert_data is not None:
        flat = replace(settings, gathering=replace(settings.gathering, node_ranks=1))
        expert = connection.pair(flat, topology.expert_data, None)
    tensor = connection.open(topology.tensor) if topology.tensor is not None else None
    pipe = connection.open(topology.pipe) if topology.pipe is not None else None
    between_experts = connection.open(topology.expert) if expert is not None else None
    made, opened = connection.communicators, [*topology.opened, *connection.opened]
    user_calls = [
        UserCalls(each, made) for each in (dense.shard_comm, dense.replica_comm) if each.store is not None
    ]
    parts = [each for each in (tensor, pipe) if each is not None and each.store is not None]
    return Communicators(
        dense=dense,
        expert=expert,
        between_experts=between_experts,
        tensor=tensor,
        pipe=pipe,
        data_ranks=dense.shard_comm.size * dense.replica_comm.size,
        traffic=connection.traffic,
        all=made,
        opened=opened,
        user_calls=user_calls,
        model_parallel_calls=[UserCalls(each, made) for each in parts],
        is_copy=topology.is_copy,
    )
