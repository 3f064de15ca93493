"""The table behind a plan: every flat buffer of a run, and what it costs. Integers, no tensors.

Buffers are laid out by the functions that the runtime lays them out with. What is kept of them follows
`shard/bucket.py`; `tests/zero_full/test_plan.py` compares the two to the byte.

[Note: stage 3 in a plan] Small parameters stay whole and travel in buckets, as at stage 2. The others are
in units. A rank keeps its slices of a unit: parameters, master, optimizer state and gradients; of frozen
parameters only the first. Which units are whole at a time is played through once, forward and back, by the
rules of `shard/gatherer.py`, as if units were called in the order in which the model lists them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zero_full.config import Config, ConfigError
from zero_full.config.schema import OptimizerConfig
from zero_full.kernels.load import compiled_for
from zero_full.layout import FlatLayout, backward_order, deal, round_robin
from zero_full.optim import build_optimizer, check_elementwise
from zero_full.optim.fused_adam import is_plain_adam
from zero_full.precision import Dtypes
from zero_full.shard.flat import ALIGNMENT
from zero_full.shard.reducer import IN_FLIGHT
from zero_full.shard.settings import Settings
from zero_full.shard.units import Unit, choose_units, kept_whole, size_limit
from zero_full.translate import settings_of

NO_OPTIMIZER = OptimizerConfig(type="AdamW")  # where the config leaves it to the script
Named = tuple[str, Parameter]


@dataclass(frozen=True)
class Run:
    """What the configuration decides about bytes."""

    settings: Settings
    micro_batches: int
    shards: int  # ranks that a buffer is cut over
    copies: int  # ranks that hold the same slice

    @property
    def dtypes(self) -> Dtypes:
        """Of everything."""
        return self.settings.dtypes

    @property
    def groups(self) -> int:
        """How many groups this rank shares memory with: see `Connection.pair`."""
        beside = self.settings.stage == 3 and self.settings.overlap
        return (self.shards > 1) * (2 if beside else 1) + (self.copies > 1)

    def layout(self, params: Iterable[Named]) -> FlatLayout:
        """These parameters in one buffer."""
        return FlatLayout(tuple(p.numel() for _, p in params), self.shards, ALIGNMENT, self.copies)


@dataclass(frozen=True)
class Flat:
    """Parameters that live in one flat buffer: a bucket, or at stage 3 what is of one kind in a unit."""

    layout: FlatLayout
    dtype: torch.dtype  # of the parameters while they are trained
    trained: bool = True
    cut: bool = False  # whole only while it is used

    @property
    def whole(self) -> int:
        """Bytes of all parameters."""
        return self.layout.total * self.dtype.itemsize

    @property
    def piece(self) -> int:
        """Bytes of one rank's slice."""
        return self.layout.shard * self.dtype.itemsize


@dataclass(frozen=True)
class UnitBytes:
    """A unit: what is gathered and released together."""

    name: str
    flats: tuple[Flat, ...]

    @property
    def numel(self) -> int:
        """Elements, with padding."""
        return sum(flat.layout.total for flat in self.flats)

    @property
    def bytes(self) -> int:
        """Of its parameters."""
        return sum(flat.whole for flat in self.flats)

    def has_inside(self, other: "UnitBytes") -> bool:
        """Whether the other's module is a part of this one's."""
        return not self.name or other.name.startswith(f"{self.name}.")


@dataclass(frozen=True)
class Laid:
    """A model, laid out."""

    buckets: list[Flat]
    units: list[UnitBytes]
    unmoved: int  # bytes of frozen parameters that stay where they are

    @property
    def flats(self) -> list[Flat]:
        """All buffers."""
        return [*self.buckets, *(flat for unit in self.units for flat in unit.flats)]

    @property
    def trained(self) -> list[Flat]:
        """Those that have gradients."""
        return [flat for flat in self.flats if flat.trained]


def run_of(config: Config, world: int) -> Run:
    """What a resolved configuration means for so many ranks."""
    settings, mics = settings_of(config), config.zero_optimization.mics_shard_size
    shards = mics if mics > 0 and world > 1 else world
    if settings.stage == 0:
        shards = 1
    return Run(settings, config.gradient_accumulation_steps, shards, world // shards)


# What is laid out where --------------------------------------------------------------------------


def lay_out(model: nn.Module, run: Run) -> Laid:
    """The model's parameters in buckets and units."""
    stays = list(model.named_parameters())
    units: list[Unit] = []
    if run.settings.stage == 3 and run.shards > 1:
        limits = run.settings.gathering
        limit, small = size_limit(model, limits.max_live), kept_whole(model, limits)
        units = choose_units(model, limit, limits.wrap, small)
        in_units = {p for unit in units for _, p in unit.parameters}
        stays = [(name, p) for name, p in stays if p not in in_units]
    buckets = _buckets([(name, p) for name, p in stays if p.requires_grad], run)
    unmoved = sum(p.numel() * run.dtypes.of(p.dtype).itemsize for _, p in stays if not p.requires_grad)
    return Laid(buckets, [_unit(unit, run) for unit in units], unmoved)


def _buckets(trained: Sequence[Named], run: Run) -> list[Flat]:
    """As `Dealer` deals them."""
    numels, kinds = [p.numel() for _, p in trained], [p.dtype for _, p in trained]
    flats = []
    for indices in deal(backward_order(len(trained)), numels, kinds, run.settings.bucket_numel):
        if run.settings.round_robin:
            indices = round_robin(indices, run.shards)
        layout = run.layout(trained[index] for index in indices)
        flats.append(Flat(layout, run.dtypes.of(kinds[indices[0]])))
    return flats


def _unit(unit: Unit, run: Run) -> UnitBytes:
    kinds: dict[tuple[torch.dtype, bool], list[Named]] = {}
    for name, p in unit.parameters:
        kinds.setdefault((p.dtype, p.requires_grad), []).append((name, p))
    flats = (
        Flat(run.layout(params), run.dtypes.of(dtype), trained, cut=True)
        for (dtype, trained), params in kinds.items()
    )
    return UnitBytes(unit.name, tuple(flats))


# What is kept ------------------------------------------------------------------------------------


def kept(laid: Laid, run: Run) -> Counter[str]:
    """Bytes from step to step, by kind."""
    found: Counter[str] = Counter(parameters=laid.unmoved)
    for flat in laid.flats:
        found["parameters"] += flat.piece if flat.cut else flat.whole
    for flat in laid.trained:
        master = run.dtypes.master_of(flat.dtype)
        found["gradients"] += _gradients(flat, run)
        found["master"] += flat.layout.shard * master.itemsize if master != flat.dtype else 0
    return found


def _gradients(flat: Flat, run: Run) -> int:
    """See [Note: a gradient's way] in `shard/bucket.py`."""
    if _is_direct(flat, run):
        return sum(flat.layout.numels) * flat.dtype.itemsize
    accumulate, collected = run.dtypes.accumulate_of(flat.dtype), _collected_in(flat, run)
    own = flat.layout.shard * accumulate.itemsize
    if run.settings.stage >= 2:
        return own
    is_window = collected == accumulate and run.dtypes.reduce in (None, accumulate)
    return flat.layout.total * collected.itemsize + (0 if is_window else own)


def _is_direct(flat: Flat, run: Run) -> bool:
    """A rank that is alone and needs no other type steps with `param.grad`."""
    alone = run.shards == run.copies == 1
    one_type = flat.dtype == run.dtypes.master_of(flat.dtype) == run.dtypes.accumulate_of(flat.dtype)
    return alone and one_type and run.settings.divisors(1) == (1, 1)


def _collected_in(flat: Flat, run: Run) -> torch.dtype:
    """The type of the buffer in which this rank's own gradients meet: see `Bucket.take`."""
    nothing_is_added = run.settings.stage >= 2 or run.micro_batches == 1
    return flat.dtype if nothing_is_added else run.dtypes.accumulate_of(flat.dtype)


def moments(laid: Laid, config: Config, run: Run) -> int:
    """Bytes of the optimizer's state. Padding has none, so ranks differ: the most that one has."""
    masters = [run.dtypes.master_of(flat.dtype) for flat in laid.trained]
    each = {dtype: _state_of_an_element(config, dtype, run) for dtype in set(masters)}
    ranks = [0] * run.shards
    for flat, master in zip(laid.trained, masters, strict=True):
        for rank in range(run.shards):
            ranks[rank] += each[master] * sum(f.numel for f in flat.layout.fragments(rank))
    return max(ranks)


def _optimizer_of(config: Config, param: Tensor) -> torch.optim.Optimizer:
    chosen = config.optimizer or NO_OPTIMIZER
    try:
        return build_optimizer(chosen.type, chosen.params, [{"params": [param]}])
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _state_of_an_element(config: Config, dtype: torch.dtype, run: Run) -> int:
    """Bytes, as found in the config's own optimizer after it has moved a small parameter."""
    param = torch.ones(ALIGNMENT, dtype=dtype, device="cpu", requires_grad=True)
    optimizer = _optimizer_of(config, param)
    if is_plain_adam(optimizer):
        return 2 * run.dtypes.moments_of(dtype).itemsize
    if run.shards > 1:
        try:
            check_elementwise(optimizer, config.zero_allow_untested_optimizer)
        except TypeError as error:
            raise ConfigError(str(error)) from error
    param.grad = torch.ones_like(param)
    optimizer.step()
    state = optimizer.state[param].values()
    return sum(v.element_size() for v in state if isinstance(v, Tensor) and v.shape == param.shape)


# What passes -------------------------------------------------------------------------------------


def gathered(laid: Laid, run: Run) -> tuple[list[bool], int]:
    """Which units stay whole from forward to backward, and the most bytes of whole units at a time."""
    played = Play(laid.units, run.settings)
    played.forward()
    stays = [unit in played.live for unit in laid.units]
    played.backward()
    return stays, played.most


class Play:
    """Units that are gathered and released. See [Note: stage 3 in a plan]."""

    def __init__(self, units: Sequence[UnitBytes], settings: Settings) -> None:
        self.units, self.limits, self.prefetches = units, settings.gathering, settings.overlap
        self.live: dict[UnitBytes, None] = {}
        self.most = 0

    @property
    def live_numel(self) -> int:
        """Elements that are whole."""
        return sum(unit.numel for unit in self.live)

    def forward(self) -> None:
        """Units inside others come while those are at work."""
        at_work: list[int] = []
        for place, unit in enumerate(self.units):
            while at_work and not self.units[at_work[-1]].has_inside(unit):
                self._leave(at_work.pop())
            self._need([unit], self.units[place + 1 : place + 2])
            at_work.append(place)
        while at_work:
            self._leave(at_work.pop())

    def backward(self) -> None:
        """The other way round; nothing stays."""
        for place in reversed(range(len(self.units))):
            unit = self.units[place]
            around = [outer for outer in self.units[:place] if outer.has_inside(unit)]
            self._need([*around, unit], self.units[max(0, place - 1) : place])
            del self.live[unit]

    def _need(self, needed: Sequence[UnitBytes], following: Sequence[UnitBytes]) -> None:
        self.live |= dict.fromkeys(needed)
        for unit in following if self.prefetches else ():
            if unit.numel <= min(self.limits.prefetch_numel, self.limits.max_live - self.live_numel):
                self.live[unit] = None
        self.most = max(self.most, sum(unit.bytes for unit in self.live))

    def _leave(self, place: int) -> None:
        later = sum(unit.numel for unit in self.units[place + 1 :])
        is_near = 2 * later < self.limits.max_reuse
        if not (is_near and self.live_numel <= self.limits.max_live):
            del self.live[self.units[place]]


def updating(laid: Laid, config: Config, run: Run, device: str) -> int:
    """Bytes of gradients converted for the optimizer, unless it reads them as they are.

    Stage 3 steps a part at a time.
    """
    if compiled_for(torch.device(device)) and is_plain_adam(_optimizer_of(config, torch.ones(1))):
        return 0
    parts, room = [0], 0
    for flat in laid.trained:
        if run.settings.stage == 3 and flat.layout.shard > room:
            parts, room = [*parts, 0], run.settings.sub_group_numel
        room -= flat.layout.shard
        master = run.dtypes.master_of(flat.dtype)
        if master != run.dtypes.accumulate_of(flat.dtype):
            parts[-1] += flat.layout.shard * master.itemsize
    return max(parts)


def _most(sizes: Sequence[int], neighbours: int) -> int:
    """The most that so many neighbours have together."""
    starts = range(max(1, len(sizes) - neighbours + 1))
    return max(sum(sizes[start : start + neighbours]) for start in starts)


def on_their_way(laid: Laid, run: Run) -> int:
    """Bytes of gradients at the worst moment of backward that will not be there after the step."""
    flats = [flat for flat in laid.trained if not _is_direct(flat, run)]
    reducing = max((_in_reduction(flat, run) for flat in flats), default=0)
    arriving = max((_arriving(flat, run) for flat in flats), default=0)
    if run.settings.stage < 2 or not flats:
        return arriving + reducing
    at_once = IN_FLIGHT + 1 if run.settings.overlap else 1  # with the one that is being filled
    units = _most([sum(f.whole for f in unit.flats if f.trained) for unit in laid.units], at_once)
    if run.settings.stage == 3:  # buckets wait for the end
        return arriving + reducing + units + sum(flat.whole for flat in laid.buckets)
    return arriving + reducing + _most([flat.whole for flat in laid.buckets], at_once)


def _arriving(flat: Flat, run: Run) -> int:
    """What autograd has made and nobody has moved: one gradient, or a bucket's if they move together."""
    numels = flat.layout.numels
    return (max(numels) if run.settings.copy_on_arrival else sum(numels)) * flat.dtype.itemsize


def _in_reduction(flat: Flat, run: Run) -> int:
    """Copies that exist while a buffer is reduced: see `Bucket._average`."""
    collected, accumulate = _collected_in(flat, run), run.dtypes.accumulate_of(flat.dtype)
    wire = run.dtypes.reduce or collected
    copies = flat.layout.total * wire.itemsize if wire != collected else 0
    if run.settings.stage >= 2:
        return copies + (flat.layout.shard * accumulate.itemsize if run.micro_batches > 1 else 0)
    shared = run.copies > 1 and wire != accumulate
    return copies + (flat.layout.shard * wire.itemsize if shared else 0)


# What is sent ------------------------------------------------------------------------------------


def sent(laid: Laid, run: Run) -> int:
    """Bytes that a rank sends in a step, as the ledger of traffic counts them."""
    pieces = sum(flat.piece for flat in laid.buckets)
    stays, _ = gathered(laid, run)
    for unit, stay in zip(laid.units, stays, strict=True):
        pieces += run.micro_batches * (1 if stay else 2) * sum(flat.piece for flat in unit.flats)
    return (run.shards - 1) * pieces + sum(_gradients_sent(flat, run) for flat in laid.trained)


def _gradients_sent(flat: Flat, run: Run) -> int:
    first = second = run.dtypes.reduce or _collected_in(flat, run)
    rounds = 1 if run.settings.reduce_scatter else 2
    if run.settings.stage >= 2:
        rounds *= run.micro_batches
        second = run.dtypes.reduce or run.dtypes.accumulate_of(flat.dtype)
    cut = rounds * (run.shards - 1) * flat.layout.shard * first.itemsize
    return cut + 2 * (run.copies - 1) * (flat.layout.shard * second.itemsize // run.copies)
