"""Rehearsal: run a training step of one rank on the meta device, without values and without other ranks.

Sharding, hooks, buckets, collectives and the optimizer are those of a real run. Three parts are replaced. The
model is replaced by its shadow (`shadow.py`), and process groups by groups whose collectives do nothing
(`comm/fake_ranks.py`). The lane is one that completes reductions and gathers as late as possible (`Late` in
`comm/lane.py`).

[Note: the rank that holds most] The first rank is rehearsed. All ranks hold shards of the same size. They
differ in three ways: in the padding within a shard, which has no optimizer state; in the state per element,
which can depend on the parameter; and in the whole parameters that they own for the update (`everyone.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zero_full.checkpoint.save import Taken
from zero_full.comm.communicator import Communicator
from zero_full.comm.fake_ranks import PretendedGroup
from zero_full.comm.ledger import Traffic
from zero_full.comm.shared import HALF, window_of
from zero_full.comm.topology import Topology
from zero_full.config import Config, Resolved
from zero_full.config.schema import OptimizerConfig
from zero_full.engine.engine import Engine
from zero_full.errors import ConfigError
from zero_full.kernels.load import compiled_for
from zero_full.offload import BlockTier, HostTier
from zero_full.offload.arena import Places
from zero_full.optim import Peers, Piece, build_optimizer, check_elementwise
from zero_full.plan.answer import Phase
from zero_full.plan.elsewhere import PretendedFile, PretendedHost
from zero_full.plan.everyone import AllRanks
from zero_full.plan.saved import saved_bytes
from zero_full.plan.shadow import new_pass, shadow_of
from zero_full.plan.shelves import PretendedFileShelf, page_locked, pretended_shelf
from zero_full.plan.watch import Watch
from zero_full.settings import Settings
from zero_full.shard.access.held_bytes import bytes_behind
from zero_full.shard.deal.dealer import Dealer, Sharded, place_the_rest
from zero_full.shard.deal.host_memory import host_memory
from zero_full.shard.deal.one_bit_support import one_bit_settings
from zero_full.shard.group.parameters import Member
from zero_full.shard.group.process_groups import Connection, Pair, connect
from zero_full.shard.step.optimizer import ZeroOptimizer
from zero_full.start.argument_checks import check_optimizer
from zero_full.start.from_config import accumulation_of, scaler_of, settings_of, shard_ranks_of

NO_OPTIMIZER = OptimizerConfig(type="AdamW")  # assumed if the configuration has no optimizer
Returned = TypeVar("Returned")
META, CPU = torch.device("meta"), torch.device("cpu")
DIFFERENT = 3  # micro-batches to rehearse: the first, the last, and one for all in between, which are equal


@dataclass(frozen=True)
class Cluster:
    """The ranks and the device of the planned run."""

    world: int  # number of data-parallel ranks
    experts: int | None  # number of consecutive ranks that hold different experts
    device: str

    def topology(self, config: Config) -> Topology:
        """Return the process groups of the first rank, simulated."""
        everyone, size = range(self.world), self.experts
        topology = Topology(data=PretendedGroup(everyone, 0))
        if size is not None:
            neighbours, twins = PretendedGroup(everyone[:size], 0), PretendedGroup(everyone[::size], 0)
            topology = replace(topology, expert=neighbours, expert_data=twins)
        ranks = shard_ranks_of(config, self.world)
        return topology if ranks is None else topology.with_sub_groups(ranks)


class Rehearsal:
    """The model and optimizer of the first rank, after a step and before its gradients are freed.

    See [Note: the rank that holds most].
    """

    def __init__(self, model: nn.Module, resolved: Resolved, cluster: Cluster) -> None:
        self.config, self.cluster, self.shadow = resolved.config, cluster, shadow_of(model)
        self.watch, self.traffic = Watch(), Traffic()
        self.copied: dict[str, int] = {}  # bytes copied in a step between device and host, by direction
        self.file: PretendedFile | None = None  # spill file of the optimizer state
        self.shelf: PretendedFileShelf | None = None  # spill file of the parameters
        self.parameters_read = self.parameters_written = 0  # bytes in a step
        self.pinned = self.early = 0  # bytes of host memory: page-locked, and for speculative steps
        self.optimizer = self._optimizer()
        self.engine = Engine(self.shadow, self.optimizer, resolved, CPU)
        with self.watch:
            if self.optimizer.parts.sites:
                self._step(1)  # records the order in which modules are called
                self.optimizer.zero_grad()
            self.watch.begin(flat.full for flat in self.optimizer.parts.flats if flat.released_at_rest)
            self.sent = self._step(self.config.gradient_accumulation_steps)
        self.holdings = self.optimizer.holdings()
        self.most = {kind: self.watch.most(kind) for kind in ("gathered", "buckets", "update")}
        self.phases = tuple(self._phases())

    def _optimizer(self) -> ZeroOptimizer:
        base, topology = self._base(), self.cluster.topology(self.config)
        settings = one_bit_settings(base, settings_of(self.config), topology)
        chosen, self.delays = settings, settings.tier.delay_after is not None
        if settings.tier.apart:
            assert isinstance(settings.tier, HostTier)
            pins = settings.tier.kind == HostTier.kind and settings.tier.pin_memory
            planned = torch.device(self.cluster.device)
            tier: HostTier = PretendedHost(pins, settings.tier.ratio, watch=self.watch, planned=planned)
            if isinstance(settings.tier, BlockTier):
                numel = settings.tier.part_numel
                tier = self.file = PretendedFile(part_numel=numel, watch=self.watch, planned=planned)
            settings = replace(settings, tier=tier)
        groups = connect(topology, settings, Connection(META, self.traffic, False, None))
        groups = replace(groups, dense=self._watched(groups.dense))
        if groups.expert is not None:
            groups = replace(groups, expert=self._watched(groups.expert))
        if any(p is not None and p.shard.size > 1 for p in (groups.dense, groups.expert)):
            _refuse(partial(check_elementwise, base, self.config.zero_allow_untested_optimizer))
        shelf = pretended_shelf(settings.param_tier, torch.device(self.cluster.device), self.watch)
        self.shelf = shelf if isinstance(shelf, PretendedFileShelf) else None
        dealer = Dealer(base.param_groups, topology, groups, settings, shelf=shelf)
        parts = self._dealt(dealer, base, chosen)
        place_the_rest(self.shadow, parts, topology, groups, settings)
        scaler, accumulation = scaler_of(self.config), accumulation_of(self.config)
        made = ZeroOptimizer(base, self.shadow, parts, groups, settings, scaler, accumulation)
        for options in (base.defaults, *base.param_groups):
            _as_on_meta(options)
        steppers, planned = made.steppers, torch.device(self.cluster.device)
        places = {CPU if group.master.tier.apart else planned for group in parts.trained}
        steppers.fused_adam.compiled_for = lambda device: all(map(compiled_for, places))
        self.everyone = AllRanks(self.watch)
        steppers.peers_of = self.everyone.peers
        for stepper in (steppers.own, steppers.by_torch, steppers.fused_adam):
            if stepper is not None:
                kind = "update" if stepper.phases() else None
                stepper.step = self.watch.around(kind, stepper.step)  # type: ignore[method-assign]
        return made

    def _dealt(self, dealer: Dealer, base: torch.optim.Optimizer, chosen: Settings) -> Sharded:
        """Shard the model. Offloaded state is not counted as device memory.

        `chosen` are the settings of the real run.
        """
        drafts, planned = dealer.draft(self.shadow), torch.device(self.cluster.device)
        dealer.settings, settings = chosen, dealer.settings
        memory = host_memory(base, dealer, drafts, planned)
        dealer.settings, self.early = settings, memory.early
        parts = dealer.deal(drafts)
        for group in parts.trained:
            if group.master.tier.apart:
                group.master.fetch = self.watch.around(None, group.master.fetch)  # type: ignore[method-assign]
        if isinstance(chosen.tier, HostTier) and chosen.tier.locks(planned):
            self.pinned = Places([*memory.rooms, *memory.passing]).size
        return parts

    def _base(self) -> torch.optim.Optimizer:
        chosen = self.config.optimizer or NO_OPTIMIZER
        trained = [p for p in self.shadow.parameters() if p.requires_grad]
        if not trained:
            raise ValueError("there is nothing to train: no parameter requires gradients")
        groups = [{"params": trained}]
        base = _refuse(partial(build_optimizer, chosen.type, chosen.params, groups, self.shadow))
        _refuse(partial(check_optimizer, base, self.shadow))
        return base

    def _watched(self, pair: Pair) -> Pair:
        return replace(pair, gather=self.watch.around("gathered", pair.gather))

    # A step --------------------------------------------------------------------------------------

    def _passes(self, boundaries: Sequence[bool]) -> list[tuple[int, int]]:
        """Run forward and backward for each micro-batch. `boundaries`: which are accumulation boundaries.

        Returns, for each, the bytes sent and the bytes of parameters read from the spill file.
        """
        found = []
        for is_boundary in boundaries:
            if self.config.managed_gradient_accumulation:
                self.engine.set_gradient_accumulation_boundary(is_boundary)
            new_pass(self.shadow)
            before, before_reading = self.traffic.total(), self._read()
            with self.watch.of("gathered"):
                loss = self.engine(torch.zeros((), device=META))
            with self.watch.of("buckets"):
                self.engine.backward(loss)
            found.append((self.traffic.total() - before, self._read() - before_reading))
        return found

    def _read(self) -> int:
        """Return the bytes of parameters read from the spill file so far."""
        return self.shelf.read if self.shelf is not None else 0

    def _step(self, micro_batches: int) -> int:
        """Run a whole step and return the bytes sent in it."""
        self.traffic.clear()
        self.everyone.sent.clear()
        flow = self.optimizer.parts.flow
        copied = flow.copied if flow is not None else Traffic()
        copied.clear()
        count = min(micro_batches, DIFFERENT)
        read, written = self._read(), self.shelf.written if self.shelf is not None else 0
        passes = self._passes([place + 1 == count for place in range(count)])
        with self.watch.of("update"):
            self.optimizer.step()
        sent, again = (size * (micro_batches - count) for size in (passes[1] if count > 1 else (0, 0)))
        downs, ups = (copied.sent[what] for what in ("gradients down", "parameters up"))
        if self.optimizer.settings.frees_gradients:  # gradients are copied to the host in each pass
            downs = downs // count * micro_batches
        self.copied = {"down": downs, "up": ups}
        if self.shelf is not None:
            self.parameters_read = self.shelf.read - read + again
            self.parameters_written = self.shelf.written - written
        return self.traffic.total() + sent + self._more(self.everyone.sent)

    def _phases(self) -> Iterator[Phase]:
        """Run a step of each kind, for an optimizer that has several."""
        stepper = self.optimizer.contents.stepper
        for name, begin in stepper.phases().items():
            self.optimizer.zero_grad()
            begin()
            with self.watch:
                self.watch.begin(())
                sent = self._step(self.config.gradient_accumulation_steps)
            moments = bytes_behind(_state_in(self.optimizer.base.state.values())) + bytes_behind(
                stepper.held()
            )
            yield Phase(name, moments, self.watch.most("update"), sent, self._saved())

    # Results -------------------------------------------------------------------------------------

    def kept(self) -> dict[str, int]:
        """Return the bytes of persistent memory and of traffic, by kind."""
        done = {member.param for group in self.optimizer.parts.groups for member in group.members}
        elsewhere = [p for p in self.shadow.parameters() if p not in done]
        host, owned = (bytes_behind(self.holdings.get(kind, [])) for kind in ("host", "optimizer"))
        masters = (group.master for group in self.optimizer.trained)
        master = bytes_behind(m.values for m in masters if m.is_separate and not m.tier.apart)
        surplus_here, surplus_there = (self._more(self._states(apart)) for apart in (False, True))
        return {
            "parameters": bytes_behind([*self.holdings["parameters"], *elsewhere]),
            "buffers": bytes_behind(self.shadow.buffers()),
            "gradients": bytes_behind(self.holdings["gradients"]),
            "master": master,
            "moments": owned - master + surplus_here,
            "communication": self._windows(),
            **self._waiting(host, surplus_there),
            "pinned": self.pinned + page_locked(self.optimizer.parts.shelf),
            **self.copied,
            "saved": self._saved(),
        }

    def _waiting(self, host: int, surplus: int) -> dict[str, int]:
        """Return the bytes offloaded to host memory and disk, and the disk traffic of a step."""
        if self.file is None:
            waits = host + surplus + self.early + (self._aside() if self.delays else 0)
            state = 0
        else:
            waits = host + self.file.buffers
            state = sum(map(sum, self.file.blocks)) + surplus
        parameters, buffers = (self.shelf.disk, self.shelf.buffers) if self.shelf is not None else (0, 0)
        return {
            "host": waits + buffers,
            "disk": state + parameters,
            "read": state + self.parameters_read,
            "written": state + self.parameters_written,
        }

    def _aside(self) -> int:
        """Return the bytes of gradients that a delayed update keeps: see [Note: delayed updates]."""
        away = [group for group in self.optimizer.trained if group.master.tier.apart and not group.asleep]
        types = (
            group.master.dtype if group.master.flow is None else group.gradients.accumulate for group in away
        )
        return sum(group.layout.shard * dtype.itemsize for group, dtype in zip(away, types, strict=True))

    def _saved(self) -> int:
        taken = Taken(self.shadow, self.optimizer, exclude_frozen=False)
        return saved_bytes(taken, self.optimizer, self.cluster.experts or 1)

    def passing(self) -> dict[str, int]:
        """Return the peak bytes of temporary memory within a step, by kind."""
        return self.most

    def _states(self, apart: bool) -> dict[Communicator, list[int]]:
        """Return each rank's bytes of optimizer state, offloaded (`apart`) or not, by communicator."""
        known, bytes_of = self.optimizer.base.state, dict[tuple[int, torch.dtype], int]()
        states: dict[Communicator, list[int]] = {}
        for group in (each for each in self.optimizer.trained if each.master.tier.apart is apart):
            ranks = states.setdefault(group.ranks, [0] * group.ranks.size)
            for member in group.members if not group.asleep else ():
                kind = member.group, group.master.values.dtype
                piece = group.master.pieces.get(member)
                if piece is not None:
                    bytes_of[kind] = (
                        bytes_behind(_state_in([known.get(piece.master, {})])) // piece.master.numel()
                    )
                elif kind not in bytes_of:
                    bytes_of[kind] = self._bytes_of(member, group.master.values.dtype)
                for rank, numel in group.layout.shares(member.index):
                    ranks[rank] += numel * bytes_of[kind]
        return states

    def _bytes_of(self, member: Member, dtype: torch.dtype) -> int:
        """Return the state bytes per element of a parameter that has no elements on the first rank."""
        stepper, master = (
            self.optimizer.steppers.own,
            torch.empty(member.param.shape, dtype=dtype, device=META),
        )
        if stepper is None:
            return 0
        piece = Piece(member.name, master.shape, (0, master.numel()), member.group, master, master)
        with self.watch:
            stepper.begin([piece])
            stepper.step([piece], 1.0, Peers())
            stepper.end()
        return bytes_behind(_state_in([piece.state])) // master.numel()

    def _more(self, by_ranks: Mapping[Communicator, Sequence[int]]) -> int:
        """Return how much the largest rank exceeds the first. See [Note: the rank that holds most]."""
        groups, neighbours = self.optimizer.groups, self.cluster.experts or 1
        dense = by_ranks.get(groups.dense.shard, [0])
        experts = [0] if groups.expert is None else by_ranks.get(groups.expert.shard, [0])
        totals = [
            dense[rank % len(dense)] + experts[rank // neighbours % len(experts)]
            for rank in range(self.cluster.world)
        ]
        return max(totals) - totals[0]

    def _windows(self) -> int:
        """Return the bytes of shared-memory windows, if all ranks are on one host."""
        groups = [each for each in self.optimizer.groups.communicators if each.size > 1]
        shared = self.cluster.device == "cpu" and self.optimizer.settings.shared_memory
        return len(groups) * window_of(HALF) if shared else 0


def _refuse(act: Callable[[], Returned]) -> Returned:
    """Call `act`, and raise its TypeError or ValueError as ConfigError."""
    try:
        return act()
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _as_on_meta(options: dict[str, Any]) -> None:
    """Drop options that torch rejects on the meta device. The same stepper is chosen, with the same state."""
    if options.get("capturable"):  # the fused kernel is not used for capturable optimizers
        options.update(capturable=False, fused=False)
    elif options.get("fused"):
        options["fused"] = None


def _state_in(states: Iterable[Mapping[str, Any]]) -> list[Tensor]:
    """Return the tensors in these states, without step counters."""
    return [t for state in states for t in state.values() if isinstance(t, Tensor) and t.dim()]
