"""From a model and an optimizer to flat buffers, buckets and the modules that need them."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zero_full.comm.topology import Topology
from zero_full.layout import backward_order, deal, round_robin
from zero_full.offload import Shelf
from zero_full.shard.bucket import Bucket
from zero_full.shard.extents import Extent, refuse_overlaps
from zero_full.shard.flat import FROZEN, FlatParameter, Kind, Member, as_bytes, is_released
from zero_full.shard.groups import Groups, Pair
from zero_full.shard.owned import Owned
from zero_full.shard.owners import refuse_owned
from zero_full.shard.settings import Settings
from zero_full.shard.sites import Site
from zero_full.shard.units import Unit, choose_units, kept_whole, size_limit


@dataclass(frozen=True)
class Sharded:
    """A model's parameters, dealt."""

    owned: list[Owned]  # what is trained, in the order in which gradients leave
    frozen: list[FlatParameter]  # of stage 3: what nobody trains is gathered like the rest
    sites: list[Site]
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
        self.group_of = {p: n for p, n in listed.items() if p.requires_grad or p.is_floating_point()}

    def deal(self, model: nn.Module) -> Sharded:
        """Every trained parameter into a bucket, and at stage 3 every frozen one into a buffer, too."""
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
        made: dict[Unit, list[Owned | FlatParameter]] = {unit: self._unit(unit) for unit in units}
        of_units = [part for parts in made.values() for part in parts]
        place = {p: number for number, p in enumerate(names)}
        owned = [*self._buckets(kept), *(part for part in of_units if isinstance(part, Owned))]
        owned.sort(key=lambda part: min(place[m.param] for m in part.flat.members), reverse=True)
        frozen = [part for part in of_units if isinstance(part, FlatParameter)]
        sites = [Site(unit.name, unit.module, list(map(_flat_of, parts))) for unit, parts in made.items()]
        return Sharded(owned, frozen, sites, self.shelf)

    def _units(self, model: nn.Module) -> list[Unit]:
        """What is gathered for use only; nothing, if there is nobody and nowhere to gather it from."""
        pairs = [self.groups.dense] + ([self.groups.expert] if self.groups.expert is not None else [])
        if all(pair.shard.size == 1 for pair in pairs) and not self.shelf.apart:
            return []
        limits = self.settings.gathering
        limit = size_limit(model, limits.max_live)
        return choose_units(model, limit, limits.wrap, kept_whole(model, limits))

    def _unit(self, unit: Unit) -> list[Owned | FlatParameter]:
        kinds: dict[Kind, list[Named]] = {}
        for name, param in unit.parameters:
            kind = replace(self._kind(name, param), released_at_rest=True)
            kinds.setdefault(kind, []).append((name, param))
        flats = [self._flat(named, kind) for kind, named in kinds.items()]
        return [self._owned(flat) if flat.kind.trained else flat for flat in flats]

    def _buckets(self, trained: Sequence[Named]) -> Iterator[Owned]:
        kinds = [self._kind(name, p) for name, p in trained]
        numels = [p.numel() for _, p in trained]
        order = backward_order(len(trained))
        for indices in deal(order, numels, kinds, self._bucket_numel()):
            kind = kinds[indices[0]]
            if self.settings.round_robin:
                indices = round_robin(indices, self._pair(kind).shard.size)
            yield self._owned(self._flat([trained[index] for index in indices], kind))

    def _bucket_numel(self) -> int:
        """As many as the run has chosen; where state comes in parts, no more than one part of every rank."""
        chosen, part = self.settings.bucket_numel, self.settings.tier.part_numel
        return chosen if part is None else min(chosen, part * self.groups.dense.shard.size)

    def _flat(self, named: Sequence[Named], kind: Kind) -> FlatParameter:
        members = [Member(*one, self.group_of.get(one[1], FROZEN), i) for i, one in enumerate(named)]
        deferred = any(p in self.deferred for _, p in named)
        return FlatParameter(members, kind, self._pair(kind), self.settings.dtypes, deferred, self.shelf)

    def _owned(self, flat: FlatParameter) -> Owned:
        settings, divisors = self.settings, self.settings.divisors(self.groups.data_ranks)
        bucket = Bucket(flat, settings, divisors, self._pair(flat.kind).reduce)
        return Owned(flat, bucket, settings.dtypes, settings.tier)

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
