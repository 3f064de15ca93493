"""Assign a model's parameters to parameter groups, and find the modules that need them."""

import logging
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zero_full.comm.topology import Topology
from zero_full.layout import FlatLayout, backward_order, deal, round_robin
from zero_full.offload import BlockTier, CopyThreads, DeviceTier, ParamStore, Tier
from zero_full.settings import Settings
from zero_full.shard.deal.memory_overlap import Extent, check_no_overlap
from zero_full.shard.deal.units import MAX_JOINED, Unit, choose_units, join_small, kept_whole, size_limit
from zero_full.shard.group.dtensors import (
    block_of,
    counts_as_dtensor,
    is_dtensor,
    largest_numel,
    local_of,
    local_shape,
    point,
)
from zero_full.shard.group.gradients import FlatGradients, HostGradients, Spares
from zero_full.shard.group.master import Master
from zero_full.shard.group.parameter_group import ParameterGroup, TrainedGroup
from zero_full.shard.group.parameters import (
    FROZEN,
    FlatParameters,
    Kind,
    Member,
    as_bytes,
    is_released,
    layout_of,
)
from zero_full.shard.group.process_groups import Communicators, Pair
from zero_full.shard.group.registry import check_unowned
from zero_full.shard.passes.gather import Site, UnitState

log = logging.getLogger("zero_full")
NEAR = 0.1  # fraction of the state: no warning for a smaller difference from the requested ratio


@dataclass(frozen=True)
class Sharded:
    """The parameter groups of a model."""

    trained: list[TrainedGroup]  # in the order in which gradients are reduced
    frozen: list[ParameterGroup]  # at stage 3: parameters of no optimizer group, which are gathered, too
    sites: list[Site]  # modules that gather parameters
    copy_threads: CopyThreads | None = (
        None  # host-device copies of gradients and parameters; None: no offload
    )
    param_store: ParamStore = field(default_factory=ParamStore)  # slices of gathered parameters
    spares: Spares = field(default_factory=list)  # free gradient buffers, shared by the groups
    # Frozen parameters of no group, whole on every rank: name, and the ranks that have the same values.
    whole: dict[Parameter, tuple[str, Pair]] = field(default_factory=dict)

    @property
    def groups(self) -> list[ParameterGroup]:
        """All parameter groups."""
        return [*self.trained, *self.frozen]

    @property
    def flats(self) -> list[FlatParameters]:
        """The flat parameters of all groups."""
        return [group.parameters for group in self.groups]

    @cached_property
    def places(self) -> dict[Parameter, tuple[ParameterGroup, Member]]:
        """The group and the member of each parameter."""
        return {member.param: (group, member) for group in self.groups for member in group.members}

    def fill(self, param: Parameter, value: Tensor) -> None:
        """Set a parameter's values. Every rank must do the same."""
        if param in self.places:
            group, member = self.places[param]
            group.fill(member, value)
        else:
            param.data = value.to(param.device)


Named = tuple[str, Parameter]


@dataclass(frozen=True, eq=False)
class Draft:
    """The plan of one flat buffer, without memory."""

    named: Sequence[Named]
    kind: Kind
    layout: FlatLayout
    unit: Unit | None  # the stage-3 unit that it belongs to; None: a gradient bucket

    @property
    def numel(self) -> int:
        """The number of elements of the parameters, without padding."""
        return sum(self.layout.numels)


@dataclass(frozen=True)
class Drafts:
    """The plan of all flat buffers."""

    units: list[Unit]
    everything: list[Draft]
    reduce_order: list[Draft]  # trained ones, in the order in which gradients are reduced
    offloaded: frozenset[Draft]  # trained ones with offloaded state


def first_share(reduce_order: Sequence[Draft], tier: Tier) -> frozenset[Draft]:
    """Choose the drafts with state in the tier: see [Note: part of the state] in `offload/tiers.py`.

    These are the first ones, with a share of the elements as close to the tier's ratio as possible. Of two
    equally close counts it takes the larger one.
    """
    if not tier.is_offloaded:
        return frozenset()
    sums = list(accumulate((draft.numel for draft in reduce_order), initial=0))
    wanted = tier.ratio * sums[-1]
    count = min(range(len(sums)), key=lambda count: (abs(sums[count] - wanted), -count))
    return frozenset(reduce_order[:count])


class Dealer:
    """Plans flat buffers for a model's parameters, and moves the parameters into them."""

    def __init__(
        self,
        param_groups: Sequence[Mapping[str, Iterable[Parameter]]],
        topology: Topology,
        communicators: Communicators,
        settings: Settings,
        deferred: Container[Parameter] = (),
        param_store: ParamStore | None = None,
    ) -> None:
        self.topology, self.communicators, self.settings, self.deferred = (
            topology,
            communicators,
            settings,
            deferred,
        )
        self.param_store = param_store or ParamStore()
        listed = {p: number for number, group in enumerate(param_groups) for p in group["params"]}
        self.copy_threads: CopyThreads | None = None  # see `deal`
        # Frozen parameters in a group may be trained later. Integers cannot, and are left out.
        self.group_of = {p: n for p, n in listed.items() if p.requires_grad or p.is_floating_point()}

    def draft(self, model: nn.Module) -> Drafts:
        """Plan the flat buffers: of trained parameters, and at stage 3 also of frozen ones.

        Nothing is allocated. The plan depends only on model and settings, so it is equal on all ranks.
        """
        names = {p: name for name, p in model.named_parameters()}
        not_in_model = [p for p in self.group_of if p not in names]
        if not_in_model and len(not_in_model) == len(self.group_of):
            raise ValueError(
                "the optimizer has none of this model's parameters. Construct it with the parameters of the "
                "model that initialize gets (a copy of the model has others)"
            )
        names |= {p: f"parameter {number} (not in the model)" for number, p in enumerate(not_in_model)}
        everything = [(name, p) for p, name in names.items()]
        check_unowned(everything)
        trained = [(name, p) for name, p in everything if p in self.group_of]
        _check_not_released([(name, p) for name, p in everything if p not in self.deferred])
        here = [(name, p) for name, p in trained if p not in self.deferred and p.numel() and not p.is_meta]
        extents = ((name, local_of(p)) for name, p in here)
        check_no_overlap(Extent(0, p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in extents)
        units = self._units(model) if self.settings.shards_parameters else []
        in_units = {p for unit in units for _, p in unit.parameters}
        kept = [(name, p) for name, p in trained if p not in in_units]
        drafts = [*(draft for unit in units for draft in self._unit(unit)), *self._buckets(kept)]
        # Backward produces gradients of the last parameters first, so their buffers are reduced first.
        place = {p: number for number, p in enumerate(names)}
        reduce_order = sorted(
            (draft for draft in drafts if draft.kind.trained),
            key=lambda draft: min(place[p] for _, p in draft.named),
            reverse=True,
        )
        return Drafts(units, drafts, reduce_order, first_share(reduce_order, self.settings.tier))

    def deal(self, drafts: Drafts) -> Sharded:
        """Move the parameters into flat buffers, and make gradients and masters for trained ones.

        Every rank must call this: the first rank's values are broadcast.
        """
        self.copy_threads = self.settings.tier.copy_threads(
            self.communicators.device, self.settings.needs_norm
        )
        spares: Spares = []
        made: dict[Draft, ParameterGroup] = {}
        for draft in drafts.everything:
            flat = self._flat(draft)
            tier = self.settings.tier if draft in drafts.offloaded else DeviceTier()
            made[draft] = self._trained(flat, tier, spares) if draft.kind.trained else ParameterGroup(flat)
        of_unit: dict[Unit | None, list[ParameterGroup]] = {}
        for draft, group in made.items():
            of_unit.setdefault(draft.unit, []).append(group)
        sites = [site for unit in drafts.units for site in _sites(unit, of_unit[unit])]
        in_order = map(made.__getitem__, drafts.reduce_order)
        trained = [group for group in in_order if isinstance(group, TrainedGroup)]
        frozen = [group for group in made.values() if not isinstance(group, TrainedGroup)]
        return Sharded(trained, frozen, sites, self.copy_threads, self.param_store, spares)

    def _units(self, model: nn.Module) -> list[Unit]:
        """Choose the units; none for a single rank without parameter offload, which has nothing to gather."""
        pairs = (self.communicators.dense, self.communicators.expert or self.communicators.dense)
        if all(pair.shard_comm.size == 1 for pair in pairs) and not self.param_store.is_offloaded:
            return []
        limits = self.settings.gathering
        limit = size_limit(model, limits.max_live)
        units = choose_units(model, limit, limits.wrap, kept_whole(model, limits))
        return join_small(
            units, min(limit, MAX_JOINED, limits.prefetch_numel, self.param_store.prefetch_numel)
        )

    def _unit(self, unit: Unit) -> Iterator[Draft]:
        kinds: dict[Kind, list[Named]] = {}
        for name, param in unit.parameters:
            kind = replace(self._kind(name, param), released_at_rest=True)
            kinds.setdefault(kind, []).append((name, param))
        return (self._draft(named, kind, unit) for kind, named in kinds.items())

    def _buckets(self, trained: Sequence[Named]) -> Iterator[Draft]:
        """Plan gradient buckets for parameters that stay whole, in the order of backward."""
        kinds = [self._kind(name, p) for name, p in trained]
        numels = [largest_numel(p) for _, p in trained]
        limit, part = self.settings.bucket_numel, self.settings.tier.part_numel
        if part is not None:  # state is stepped in parts: a bucket is at most one
            limit = min(limit, part * self.communicators.dense.shard_comm.size)
        for indices in deal(backward_order(len(trained)), numels, kinds, limit):
            kind = kinds[indices[0]]
            if self.settings.round_robin:
                indices = round_robin(indices, self._pair(kind).shard_comm.size)
            yield self._draft([trained[index] for index in indices], kind)

    def _draft(self, named: Sequence[Named], kind: Kind, unit: Unit | None = None) -> Draft:
        numels = [local_shape(p).numel() for _, p in named]
        return Draft(named, kind, layout_of(numels, self._pair(kind)), unit)

    def _flat(self, draft: Draft) -> FlatParameters:
        named, kind = draft.named, draft.kind
        members = [
            Member(name, p, self.group_of.get(p, FROZEN), i, local_shape(p), block_of(p))
            for i, (name, p) in enumerate(named)
        ]
        deferred = any(p in self.deferred for _, p in named)
        made = FlatParameters
        if kind.is_dtensor and is_dtensor(named[0][1]):  # other runs do not import its file
            from zero_full.shard.group.dtensor_groups import DTensorParameters

            made = DTensorParameters
        return made(members, kind, self._pair(kind), deferred, self.param_store)

    def _trained(self, flat: FlatParameters, tier: Tier, spares: Spares) -> TrainedGroup:
        """Make the gradients and the master of a flat buffer, on the host for an offload tier."""
        settings, divisors = self.settings, self.settings.divisors(self.communicators.data_ranks)
        copy_threads, reduce = self.copy_threads if tier.is_offloaded else None, self._pair(flat.kind).reduce
        kind = FlatGradients if copy_threads is None else HostGradients
        if is_dtensor(flat.params[0]):
            from zero_full.shard.group.dtensor_groups import gradients_class

            kind = gradients_class(kind)
        gradients = kind(flat, settings, divisors, reduce, spares, copy_threads)
        return TrainedGroup(gradients, Master(flat, gradients, settings.dtypes, tier, copy_threads))

    def rank_of(self, draft: Draft) -> int:
        """Return the index of this rank's slice."""
        return self._pair(draft.kind).shard_comm.rank

    def _pair(self, kind: Kind) -> Pair:
        return (
            self.communicators.expert
            if kind.expert and self.communicators.expert is not None
            else self.communicators.dense
        )

    def _kind(self, name: str, param: Parameter) -> Kind:
        """Determine the kind of a parameter; parameters of one kind can share a flat buffer."""
        trained = param in self.group_of
        if trained and not param.is_floating_point():
            raise TypeError(f"{name} is {param.dtype}, but only floating-point parameters can be trained")
        expert = self.topology.is_expert(name, param)
        if expert and self.communicators.expert is None:
            raise ValueError(
                f"{name} is marked as an expert, but there are no expert groups. "
                "Pass topology=Topology(expert=..., expert_data=...)"
            )
        tensor, block = self.communicators.tensor, block_of(param)
        is_split = tensor is not None and (block is not None or self.topology.is_split(name, param))
        in_norm = is_split or tensor is None or tensor.rank == 0
        in_norm = in_norm and not self.topology.is_copy(name, param)
        asleep = trained and not param.requires_grad
        run_dtype = self.settings.dtypes.of(param.dtype, name)
        return Kind(
            param.dtype,
            run_dtype,
            param.device,
            expert,
            in_norm,
            trained,
            asleep,
            is_dtensor=counts_as_dtensor(param),
            is_split=is_split,
        )


def _sites(unit: Unit, groups: Sequence[ParameterGroup]) -> list[Site]:
    shared = UnitState(groups, joined=len(unit.modules) > 1)
    return [Site(name, module, shared) for name, module in unit.modules]


def place_the_rest(
    model: nn.Module, sharded: Sharded, topology: Topology, communicators: Communicators, settings: Settings
) -> None:
    """Broadcast buffers and frozen parameters that stay whole from the first rank; convert their dtypes."""
    done = {m.param for group in sharded.groups for m in group.members}
    frozen = [(name, p) for name, p in model.named_parameters() if p not in done]
    dtypes = settings.dtypes.of_buffers(model)
    for name, tensor in [*frozen, *model.named_buffers()]:
        expert = isinstance(tensor, Parameter) and topology.is_expert(name, tensor)
        pair = communicators.expert if expert and communicators.expert is not None else communicators.dense
        if isinstance(tensor, Parameter):
            sharded.whole[tensor] = name, pair
        own_type = settings.dtypes.of(tensor.dtype, name)
        wanted = own_type if isinstance(tensor, Parameter) else dtypes[name]
        if is_dtensor(tensor):
            _broadcast(local_of(tensor), pair, name)
            point(tensor, local_of(tensor).to(wanted))
            continue
        _broadcast(tensor.data, pair, name)
        tensor.data = tensor.data.to(wanted)


def _broadcast(tensor: Tensor, pair: Pair, name: str) -> None:
    """Broadcast the first rank's values in place, through a contiguous copy if necessary."""
    sent = tensor.contiguous()
    raw = as_bytes(sent)
    for communicator in (pair.shard_comm, pair.replica_comm):
        if raw.numel():
            communicator.broadcast(raw, name)
    if sent.data_ptr() != tensor.data_ptr() and not torch.equal(tensor, sent):
        try:
            tensor.copy_(sent)
        except RuntimeError as error:
            raise RuntimeError(f"the first rank's values cannot be copied to {name}: {error}") from error


def _check_not_released(named: Sequence[Named]) -> None:
    """Raise ValueError if a parameter is released, as its values are lost."""
    for name, param in named:
        if is_released(param):
            raise ValueError(
                f"{name} was released by an engine that no longer exists. End an engine with "
                "destroy(gather=True) on every rank, so that it leaves whole parameters"
            )


# Warnings if less could be offloaded than requested ---------------------------------------------------


def warn_of_share(drafts: Drafts, settings: Settings) -> None:
    """Warn if the offloaded share of the optimizer's state is far from the requested ratio."""
    asked, everything = settings.tier.ratio, sum(draft.numel for draft in drafts.reduce_order)
    if not (settings.tier.is_offloaded and everything):
        return
    away = sum(draft.numel for draft in drafts.offloaded) / everything
    if abs(away - asked) > NEAR:
        cut = "buckets and modules that are gathered as one" if settings.shards_parameters else "buckets"
        largest = max(draft.numel for draft in drafts.reduce_order) / everything
        log.warning(
            f"offload_optimizer.ratio is {asked:g}, but {away:.2f} of the optimizer's state is offloaded. "
            f"Only whole {cut} can be: there are {len(drafts.reduce_order)}, the largest with "
            f"{largest:.2f} of all elements. A smaller reduce_bucket_size makes smaller buckets"
        )


def warn_of_parameters(sharded: Sharded, settings: Settings) -> None:
    """Warn if no parameter is offloaded although `param_tier` requests it."""
    tier, flats = settings.param_tier, sharded.flats
    if not (tier.is_offloaded and sharded.param_store.is_offloaded) or any(
        flat.slice.kind == tier.kind for flat in flats
    ):
        return
    if isinstance(tier, BlockTier) and any(flat.kind.released_at_rest for flat in flats):
        why = (
            f"max_in_cpu is {tier.memory_numel:,}, so all elements of this rank's slices stay in memory. "
            "Set a smaller number, or 0"
        )
    else:
        why = "no module's parameters are released. See stage3_param_persistence_threshold"
    where = "nvme_path" if isinstance(tier, BlockTier) else "the host"
    log.warning(f"offload_param has no effect, because no parameter is offloaded to {where}: {why}")
