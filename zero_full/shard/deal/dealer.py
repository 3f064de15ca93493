"""From a model and an optimizer to flat buffers, buckets and the modules that need them."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zero_full.comm.topology import Topology
from zero_full.layout import FlatLayout, backward_order, deal, round_robin
from zero_full.offload import DeviceTier, Flow, Shelf, Tier
from zero_full.settings import Settings
from zero_full.shard.deal.memory_overlap import Extent, refuse_overlaps
from zero_full.shard.deal.units import Unit, choose_units, kept_whole, size_limit
from zero_full.shard.group.gradients import Bucket
from zero_full.shard.group.master import Owned
from zero_full.shard.group.parameters import (
    FROZEN,
    FlatParameter,
    Kind,
    Member,
    as_bytes,
    is_released,
    layout_of,
)
from zero_full.shard.group.process_groups import Groups, Pair
from zero_full.shard.group.registry import refuse_owned
from zero_full.shard.passes.module_sites import Site


@dataclass(frozen=True)
class Sharded:
    """A model's parameters, dealt."""

    owned: list[Owned]  # what is trained, in the order in which gradients leave
    frozen: list[FlatParameter]  # of stage 3: what nobody trains is gathered like the rest
    sites: list[Site]
    flow: Flow | None = None  # where gradients and parameters are copied between a device and the host
    shelf: Shelf = field(default_factory=Shelf)  # where slices of what is gathered for use wait

    @property
    def flats(self) -> list[FlatParameter]:
        """All flat buffers of parameters."""
        return [owned.flat for owned in self.owned] + self.frozen

    @property
    def buckets(self) -> list[Bucket]:
        """All gradient buckets."""
        return [owned.bucket for owned in self.owned]

    @cached_property
    def places(self) -> dict[Parameter, tuple[Owned | FlatParameter, Member]]:
        """Where each parameter is."""
        trained = {m.param: (owned, m) for owned in self.owned for m in owned.flat.members}
        return trained | {m.param: (flat, m) for flat in self.frozen for m in flat.members}

    def fill(self, param: Parameter, value: Tensor) -> None:
        """Give a parameter new values. Every rank must do the same."""
        if param in self.places:
            part, member = self.places[param]
            part.fill(member, value)
        else:
            param.data = value.to(param.device)


Named = tuple[str, Parameter]


@dataclass(frozen=True, eq=False)
class Draft:
    """Parameters that will share a flat buffer."""

    named: Sequence[Named]
    kind: Kind
    layout: FlatLayout
    unit: Unit | None

    @property
    def numel(self) -> int:
        """Elements of the parameters."""
        return sum(self.layout.numels)


@dataclass(frozen=True)
class Drafts:
    """Everything that will be dealt."""

    units: list[Unit]
    everything: list[Draft]
    leaving: list[Draft]  # what is trained, in the order in which gradients leave
    away: frozenset[Draft]  # of these, whose state does not wait on the device


def first_share(leaving: Sequence[Draft], tier: Tier) -> frozenset[Draft]:
    """Those whose state waits in the tier: see [Note: part of the state] in `offload/tiers.py`.

    As many of the first as have the number of elements next to its ratio; if in doubt, one more.
    """
    if not tier.apart:
        return frozenset()
    sums = list(accumulate((draft.numel for draft in leaving), initial=0))
    wanted = tier.ratio * sums[-1]
    count = min(range(len(sums)), key=lambda count: (abs(sums[count] - wanted), -count))
    return frozenset(leaving[:count])


class Dealer:
    """Deals parameters into flat buffers."""

    def __init__(
        self,
        param_groups: Sequence[Mapping[str, Iterable[Parameter]]],
        topology: Topology,
        groups: Groups,
        settings: Settings,
        deferred: Container[Parameter] = (),
        shelf: Shelf | None = None,
    ) -> None:
        self.topology, self.groups, self.settings, self.deferred = topology, groups, settings, deferred
        self.shelf = shelf or Shelf()
        listed = {p: number for number, group in enumerate(param_groups) for p in group["params"]}
        # What is listed and frozen may be trained later; numbers that cannot be trained are left alone.
        self.flow: Flow | None = None  # see `deal`
        self.group_of = {p: n for p, n in listed.items() if p.requires_grad or p.is_floating_point()}

    def draft(self, model: nn.Module) -> "Drafts":
        """Which parameters will lie together: every trained one, and at stage 3 every frozen one, too.

        Nothing has memory yet.
        """
        names = {p: name for name, p in model.named_parameters()}
        strangers = [p for p in self.group_of if p not in names]
        if strangers and len(strangers) == len(self.group_of):
            raise ValueError(
                "the optimizer has none of this model's parameters: make it of the parameters of the model "
                "that initialize gets (a copy of a model has others)"
            )
        names |= {p: f"parameter {number} (not in the model)" for number, p in enumerate(strangers)}
        everything = [(name, p) for p, name in names.items()]
        refuse_owned(everything)
        trained = [(name, p) for name, p in everything if p in self.group_of]
        _refuse_released([(name, p) for name, p in everything if p not in self.deferred])
        here = [(name, p) for name, p in trained if p not in self.deferred and p.numel() and not p.is_meta]
        refuse_overlaps(Extent(0, p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in here)
        units = self._units(model) if self.settings.releases_parameters else []
        in_units = {p for unit in units for _, p in unit.parameters}
        kept = [(name, p) for name, p in trained if p not in in_units]
        drafts = [*(draft for unit in units for draft in self._unit(unit)), *self._buckets(kept)]
        place = {p: number for number, p in enumerate(names)}
        leaving = sorted(
            (draft for draft in drafts if draft.kind.trained),
            key=lambda draft: min(place[p] for _, p in draft.named),
            reverse=True,
        )
        return Drafts(units, drafts, leaving, first_share(leaving, self.settings.tier))

    def rooms(self, drafts: "Drafts") -> list[int]:
        """The bytes of each room that this rank will ask its tier for."""
        away = (draft for draft in drafts.leaving if draft in drafts.away and not draft.kind.asleep)
        return [self.room_of(draft) for draft in away]

    def room_of(self, draft: "Draft") -> int:
        """The bytes of this rank's master."""
        dtypes = self.settings.dtypes
        return draft.layout.shard * dtypes.master_of(dtypes.of(draft.kind.dtype)).itemsize

    def deal(self, drafts: "Drafts") -> Sharded:
        """Parameters move into their flat buffers, and what is trained into buckets."""
        self.flow = self.settings.tier.flow(self.groups.dense.shard.device, self.settings.needs_norm)
        made: dict[Draft, Owned | FlatParameter] = {}
        for draft in drafts.everything:
            flat = self._flat(draft)
            tier = self.settings.tier if draft in drafts.away else DeviceTier()
            made[draft] = self._owned(flat, tier) if draft.kind.trained else flat
        flats = {unit: [_flat_of(made[d]) for d in made if d.unit is unit] for unit in drafts.units}
        sites = [Site(unit.name, unit.module, flats[unit]) for unit in drafts.units]
        owned = [part for part in map(made.__getitem__, drafts.leaving) if isinstance(part, Owned)]
        frozen = [part for part in made.values() if isinstance(part, FlatParameter)]
        return Sharded(owned, frozen, sites, self.flow, self.shelf)

    def _units(self, model: nn.Module) -> list[Unit]:
        """What is gathered for use only; nothing, if there is nobody and nowhere to gather it from."""
        pairs = [self.groups.dense] + ([self.groups.expert] if self.groups.expert is not None else [])
        if all(pair.shard.size == 1 for pair in pairs) and not self.shelf.apart:
            return []
        limits = self.settings.gathering
        limit = size_limit(model, limits.max_live)
        return choose_units(model, limit, limits.wrap, kept_whole(model, limits))

    def _unit(self, unit: Unit) -> Iterator["Draft"]:
        kinds: dict[Kind, list[Named]] = {}
        for name, param in unit.parameters:
            kind = replace(self._kind(name, param), released_at_rest=True)
            kinds.setdefault(kind, []).append((name, param))
        return (self._draft(named, kind, unit) for kind, named in kinds.items())

    def _buckets(self, trained: Sequence[Named]) -> Iterator["Draft"]:
        kinds = [self._kind(name, p) for name, p in trained]
        numels = [p.numel() for _, p in trained]
        order = backward_order(len(trained))
        for indices in deal(order, numels, kinds, self._bucket_numel()):
            kind = kinds[indices[0]]
            if self.settings.round_robin:
                indices = round_robin(indices, self._pair(kind).shard.size)
            yield self._draft([trained[index] for index in indices], kind)

    def _bucket_numel(self) -> int:
        """As many as the run has chosen; where state comes in parts, no more than one part of every rank."""
        chosen, part = self.settings.bucket_numel, self.settings.tier.part_numel
        return chosen if part is None else min(chosen, part * self.groups.dense.shard.size)

    def _draft(self, named: Sequence[Named], kind: Kind, unit: Unit | None = None) -> "Draft":
        return Draft(named, kind, layout_of([p.numel() for _, p in named], self._pair(kind)), unit)

    def _flat(self, draft: "Draft") -> FlatParameter:
        named, kind = draft.named, draft.kind
        members = [Member(*one, self.group_of.get(one[1], FROZEN), i) for i, one in enumerate(named)]
        deferred = any(p in self.deferred for _, p in named)
        return FlatParameter(members, kind, self._pair(kind), self.settings.dtypes, deferred, self.shelf)

    def _owned(self, flat: FlatParameter, tier: Tier) -> Owned:
        settings, divisors = self.settings, self.settings.divisors(self.groups.data_ranks)
        flow = self.flow if tier.apart else None
        bucket = Bucket(flat, settings, divisors, self._pair(flat.kind).reduce, flow)
        return Owned(flat, bucket, settings.dtypes, tier, flow)

    def rank_of(self, draft: "Draft") -> int:
        """Which of those slices is this rank's."""
        return self._pair(draft.kind).shard.rank

    def _pair(self, kind: Kind) -> Pair:
        return self.groups.expert if kind.expert and self.groups.expert is not None else self.groups.dense

    def _kind(self, name: str, param: Parameter) -> Kind:
        trained = param in self.group_of
        if trained and not param.is_floating_point():
            raise TypeError(f"{name} is {param.dtype}: only floating-point parameters can be trained here")
        expert = self.topology.is_expert(name, param)
        if expert and self.groups.expert is None:
            raise ValueError(
                f"{name} is marked as an expert, but there are no expert groups: "
                "pass topology=Topology(expert=..., expert_data=...)"
            )
        model = self.groups.model
        in_norm = model is None or model.rank == 0 or self.topology.is_split(name, param)
        asleep = trained and not param.requires_grad
        return Kind(param.dtype, param.device, expert, in_norm, trained, asleep)


def _flat_of(part: Owned | FlatParameter) -> FlatParameter:
    return part.flat if isinstance(part, Owned) else part


def place_the_rest(
    model: nn.Module, parts: Sharded, topology: Topology, groups: Groups, settings: Settings
) -> None:
    """Frozen parameters that stay whole, and buffers: the first rank's values, in the types of training."""
    done = {m.param for flat in parts.flats for m in flat.members}
    frozen = [(name, p) for name, p in model.named_parameters() if p not in done]
    dtypes = settings.dtypes.of_buffers(model)
    for name, tensor in [*frozen, *model.named_buffers()]:
        expert = isinstance(tensor, Parameter) and topology.is_expert(name, tensor)
        pair = groups.expert if expert and groups.expert is not None else groups.dense
        _broadcast(tensor.data, pair, name)
        own_type = settings.dtypes.of(tensor.dtype)
        tensor.data = tensor.data.to(own_type if isinstance(tensor, Parameter) else dtypes[name])


def _broadcast(tensor: Tensor, pair: Pair, name: str) -> None:
    sent = tensor.contiguous()
    raw = as_bytes(sent)
    for group in (pair.shard, pair.across):
        if raw.numel():
            group.broadcast(raw, name)
    if sent.data_ptr() != tensor.data_ptr() and not torch.equal(tensor, sent):
        try:
            tensor.copy_(sent)
        except RuntimeError as error:
            raise RuntimeError(f"{name} cannot get the first rank's values: {error}") from error


def _refuse_released(named: Sequence[Named]) -> None:
    for name, param in named:
        if is_released(param):
            raise ValueError(
                f"{name} was released by an engine that is gone: end that one with destroy(gather=True), on "
                "every rank, so that it leaves whole parameters"
            )
