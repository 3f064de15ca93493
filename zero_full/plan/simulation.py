"""Simulate a training step of one rank on the meta device, without values and without other ranks.

`assemble` composes the run, so that sharding, hooks, buckets, collectives and the optimizer are real. Three
parts are replaced: the model by its copy on the meta device (`meta_model.py`), process groups by fake ones
whose collectives do nothing (`comm/fake_ranks.py`), and offload by tiers that only count (`fake_offload.py`).
The lane completes reductions and gathers as late as possible (`LazyLane` in `comm/lane.py`).

[Note: the rank that holds most] The first rank is simulated. All ranks hold shards of the same size. They
differ in three ways: in the padding within a shard, which has no optimizer state; in the state per element,
which can depend on the parameter; and in the whole parameters that they own for the update (`fake_peers.py`).
"""

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_full.assemble import Prepared, assemble
from zero_full.checkpoint.save import SaveContents
from zero_full.comm.communicator import Communicator
from zero_full.comm.fake_ranks import FakeGroup
from zero_full.comm.shared_memory import HALF, window_of
from zero_full.comm.topology import Topology
from zero_full.comm.traffic import Traffic
from zero_full.config import Config, Resolved
from zero_full.config.schema import OptimizerConfig
from zero_full.construct import Deferred
from zero_full.engine.engine import Engine
from zero_full.errors import ConfigError
from zero_full.generation.budget import whole_bytes
from zero_full.kernels.load import compiled_for
from zero_full.offload import HostTier, Tier
from zero_full.offload.arena import Places
from zero_full.offload.block_memory import bytes_moved
from zero_full.optim import build_optimizer, check_elementwise
from zero_full.optim.one_bit import OneBitOptimizer
from zero_full.optim.state_size import state_bytes
from zero_full.plan.activations import BACKWARD, FORWARD
from zero_full.plan.checkpoint_bytes import saved_bytes
from zero_full.plan.fake_offload import META, FakeBlockTier, FakeFileParamStore, fake_tier
from zero_full.plan.fake_peers import FakePeers
from zero_full.plan.memory_tracker import ARRIVING, MemoryTracker
from zero_full.plan.meta_model import begin_pass, meta_copy_of
from zero_full.plan.result import Phase
from zero_full.plan.work import NORM, MemoryPass, Work, WorkRecorder, dtype_name
from zero_full.shard.access.held_bytes import bytes_behind
from zero_full.shard.deal.dealer import Dealer, Drafts
from zero_full.shard.deal.host_memory import Sizes, host_memory
from zero_full.shard.step.optimizer import ZeroOptimizer
from zero_full.start.argument_checks import check_optimizer
from zero_full.start.dtensor_checks import check_split_rule
from zero_full.start.from_config import accumulation_of, scaler_of, settings_of, shard_ranks_of

DEFAULT_OPTIMIZER = OptimizerConfig(type="AdamW")  # assumed if the configuration has no optimizer
DISTINCT = 3  # micro-batches to simulate: the first, the last, and one for all in between, which are equal
UPDATE = "update"  # the part of the step's work that is not within forward and backward
CPU = torch.device("cpu")
log = logging.getLogger("zero_full")


@dataclass(frozen=True)
class Cluster:
    """The ranks and the device of the planned run."""

    world: int  # number of data-parallel ranks
    experts: int | None  # number of consecutive ranks that hold different experts
    device: str
    tensor: int | None = None  # number of tensor-parallel ranks

    def topology(self, config: Config) -> Topology:
        """Return fake process groups of the first rank."""
        ranks, size = range(self.world), self.experts
        topology = Topology(data=FakeGroup(ranks, 0))
        if size is not None:
            different, same = FakeGroup(ranks[:size], 0), FakeGroup(ranks[::size], 0)
            topology = replace(topology, expert=different, expert_data=same)
        if self.tensor is not None:
            topology = replace(topology, tensor=FakeGroup(range(self.tensor), 0))
        shard_ranks = shard_ranks_of(config, self.world)
        return topology if shard_ranks is None else topology.with_sub_groups(shard_ranks)


class Simulation:
    """The model and optimizer of the first rank, after a step and before its gradients are freed.

    See [Note: the rank that holds most].
    """

    def __init__(
        self,
        model: nn.Module,
        resolved: Resolved,
        cluster: Cluster,
        arrivals: Sequence[str] = (),
        recorder: WorkRecorder | None = None,
    ) -> None:
        """`arrivals`: names of parameters in the order in which gradients arrive, if known.

        `recorder`: records the work of the runtime in a step, for `runtime_work`.
        """
        self.recorder = recorder
        self.planned, self.tracker = torch.device(cluster.device), MemoryTracker()
        self.config, self.cluster = resolved.config, cluster
        self.model = meta_copy_of(model, arrivals, partial(self.tracker.counting, ARRIVING))
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(_arrived, self.tracker, name))
        self.copied: dict[str, int] = {}  # bytes copied in a step between device and host, by direction
        self.sent_by_rank: dict[Communicator, list[int]] = {}  # bytes of whole parameters in a step
        self.parameters_read = self.parameters_written = 0  # bytes in a step, in a spill file
        base = self._base()
        with _silent():
            self.optimizer = self._assembled(base)
            self.traffic, self.param_store = (
                self.optimizer.communicators.traffic,
                self.optimizer.sharded.param_store,
            )
            self.engine = Engine(self.model, self.optimizer, resolved, CPU)
            with self.tracker:
                if self.optimizer.sharded.sites:
                    self._step(1)  # records the order in which modules are called
                    self.optimizer.zero_grad()
                if recorder is not None:
                    recorder.parts.clear()
                    recorder.checks_finite = self.optimizer.settings.needs_norm
                    self.traffic.listener = recorder
                flats = self.optimizer.sharded.flats
                self.tracker.begin(flat.full for flat in flats if flat.released_at_rest)
                with recorder or nullcontext():
                    self.sent = self._step(self.config.gradient_accumulation_steps)
            self.traffic.listener = None
            self.holdings = self.optimizer.holdings()
            # Peak bytes of temporary memory within a step, by kind.
            self.peaks = {kind: self.tracker.peak(kind) for kind in ("gathered", "update")}
            self.peaks["buckets"] = self.tracker.peak("buckets", ARRIVING)
            # Bytes of gradients and gathered parameters: see [Note: moments of a pass].
            self.moments = self.tracker.between_marks(("gathered", "buckets"))
            self.phases = tuple(self._phases())

    # Assembly ------------------------------------------------------------------------------------

    def _base(self) -> torch.optim.Optimizer:
        """Build the configuration's optimizer over the model's copy, and check it."""
        chosen = self.config.optimizer or DEFAULT_OPTIMIZER
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if not trained:
            raise ValueError("there is nothing to train: no parameter requires gradients")
        with _config_errors():
            base = build_optimizer(chosen.type, chosen.params, [{"params": trained}], self.model)
            check_optimizer(base, self.model)
        if isinstance(base, OneBitOptimizer):
            # This machine may lack the backend of the planned run.
            base.model_options = {**base.model_options, "comm_backend_name": None}
        return base

    def _assembled(self, base: torch.optim.Optimizer) -> ZeroOptimizer:
        """Assemble the optimizer of a run with fake offload, and track the memory of its parts."""
        topology, settings = self.cluster.topology(self.config), settings_of(self.config)
        cut = (topology.shard or topology.data, topology.expert_data) if settings.shards_state else ()
        if any(group is not None and group.size() > 1 for group in cut):
            with _config_errors():
                check_elementwise(base, settings.allow_untested)
        if topology.tensor is not None:
            check_split_rule(self.model, base, topology, settings.allow_untested)
        tier, param_tier = (
            fake_tier(each, self.planned, self.tracker) for each in (settings.tier, settings.param_tier)
        )
        settings = replace(settings, tier=tier, param_tier=param_tier, check_timeout_s=None)
        prepared = Prepared(Deferred(self.model, META), base, settings, scaler_of(self.config), {})
        made = assemble(self.model, topology, prepared, accumulation_of(self.config), self._open_tier)
        for options in (base.defaults, *base.param_groups):
            _adapt_to_meta(options)
        counting = self.tracker.counting
        for flat in made.sharded.flats:
            flat.gather_slices = counting("gathered")(flat.gather_slices)
        for group in made.trained:
            if group.master.tier.is_offloaded:
                group.master.fetch = counting(None)(group.master.fetch)  # type: ignore[method-assign]
        steppers = made.steppers
        stepped_on = {CPU if group.master.tier.is_offloaded else self.planned for group in made.trained}
        is_compiled = all(map(compiled_for, stepped_on))
        steppers.fused_adam.compiled_for = lambda device: is_compiled
        for group in made.trained:
            group.master.compiled_for = lambda device: is_compiled
        tensor = made.communicators.tensor
        steppers.peers_of = partial(FakePeers, self.tracker, self.sent_by_rank, tensor=tensor)
        for stepper in (steppers.own, steppers.by_torch, steppers.fused_adam):
            if stepper is not None:
                kind = "update" if stepper.phases() else None
                stepper.step = counting(kind)(stepper.step)  # type: ignore[method-assign]
        return made

    def _open_tier(
        self, base: torch.optim.Optimizer, dealer: Dealer, drafts: Drafts, device: torch.device
    ) -> Tier:
        """Count the host memory that only the drafts show, and open the tier without its checks."""
        memory, tier = host_memory(base, dealer, drafts, self.planned), dealer.settings.tier
        self.pinned = 0  # page-locked bytes of host memory
        self.gradient_copies = 0  # bytes of host memory for gradients of a delayed update
        if isinstance(tier, HostTier) and tier.locks(self.planned):
            self.pinned = Places(memory.arena).size
        if tier.delay_after is not None:
            size_of = Sizes(base, dealer, self.planned).gradient_copies
            self.gradient_copies = sum(size_of(draft) for draft in drafts.offloaded if not draft.kind.asleep)
        return tier.open(memory.rooms, device)

    # A step --------------------------------------------------------------------------------------

    def _passes(self, boundaries: Sequence[bool]) -> list[tuple[int, int]]:
        """Run forward and backward for each micro-batch. `boundaries`: which are accumulation boundaries.

        Returns, for each, the bytes sent and the bytes of parameters read from the spill file.
        """
        found = list[tuple[int, int]]()
        for is_boundary in boundaries:
            if self.config.managed_gradient_accumulation:
                self.engine.set_gradient_accumulation_boundary(is_boundary)
            begin_pass(self.model)
            if self.recorder is not None:
                self.recorder.begin(f"pass {len(found)}")
            before, (before_reading, _) = self.traffic.total(), self._file_traffic()
            with self.tracker.counting("gathered"):
                loss = self.engine(torch.zeros((), device=META))
            self.tracker.mark(FORWARD)
            with self.tracker.counting("buckets"):
                self.engine.backward(loss)
            self.tracker.mark(BACKWARD)
            found.append((self.traffic.total() - before, self._file_traffic()[0] - before_reading))
        return found

    def _file_traffic(self) -> tuple[int, int]:
        """Return the bytes of parameters read from the spill file and written to it so far."""
        store = self.param_store
        return (store.read, store.written) if isinstance(store, FakeFileParamStore) else (0, 0)

    def _step(self, micro_batches: int) -> int:
        """Run a whole step and return the bytes sent in it."""
        self.traffic.clear()
        self.sent_by_rank.clear()
        copy_threads = self.optimizer.sharded.copy_threads
        copied = copy_threads.copied if copy_threads is not None else Traffic()
        copied.clear()
        count, before = min(micro_batches, DISTINCT), self._file_traffic()
        passes = self._passes([place + 1 == count for place in range(count)])
        if self.recorder is not None:
            self.recorder.begin(UPDATE, in_pass=False)
        with self.tracker.counting("update"):
            self.optimizer.step()
        sent, again = (size * (micro_batches - count) for size in (passes[1] if count > 1 else (0, 0)))
        down, up = (copied.sent[what] for what in ("gradients down", "parameters up"))
        if self.optimizer.settings.shards_gradients:  # gradients are copied to the host in each pass
            down = down // count * micro_batches
        self.copied = {"down": down, "up": up}
        read, written = (now - then for now, then in zip(self._file_traffic(), before, strict=True))
        self.parameters_read, self.parameters_written = read + again, written
        return self.traffic.total() + sent + self._excess(self.sent_by_rank)

    def _phases(self) -> Iterator[Phase]:
        """Run a step of each kind, for an optimizer that has several."""
        stepper = self.optimizer.contents.stepper
        for name, begin in stepper.phases().items():
            self.optimizer.zero_grad()
            begin()
            with self.tracker:
                self.tracker.begin(())
                sent = self._step(self.config.gradient_accumulation_steps)
            state = _state_in(self.optimizer.base.state.values())
            moments = bytes_behind(state) + bytes_behind(stepper.held())
            yield Phase(name, moments, self.tracker.peak("update"), sent, self._saved())

    # Results -------------------------------------------------------------------------------------

    def kept(self) -> dict[str, int]:
        """Return the bytes of persistent memory and of traffic, by kind."""
        whole = [p for p in self.model.parameters() if p not in self.optimizer.sharded.places]
        host, owned = (bytes_behind(self.holdings.get(kind, [])) for kind in ("host", "optimizer"))
        masters = (group.master for group in self.optimizer.trained)
        master = bytes_behind(m.values for m in masters if m.is_separate and not m.tier.is_offloaded)
        return {
            "parameters": bytes_behind([*self.holdings["parameters"], *whole]),
            "buffers": bytes_behind(self.model.buffers()),
            "gradients": bytes_behind(self.holdings["gradients"]),
            "master": master,
            "moments": owned - master + self._excess(self._state_by_rank(is_offloaded=False)),
            "communication": self._windows(),
            **self._offloaded(host, self._excess(self._state_by_rank(is_offloaded=True))),
            "pinned": self.pinned + getattr(self.param_store, "locked", 0),
            **self.copied,
            "saved": self._saved(),
            "whole": whole_bytes([g for g in self.optimizer.sharded.groups if g.parameters.released_at_rest]),
        }

    def _offloaded(self, host: int, excess: int) -> dict[str, int]:
        """Return the bytes offloaded to host memory and disk, and the disk traffic of a step.

        `host` are the first rank's tensors on the host, `excess` is the state that the largest rank has more.
        """
        tier, state, moved = self.optimizer.settings.tier, 0, 0
        if isinstance(tier, FakeBlockTier):
            host, state = host + tier.in_memory, sum(map(sum, tier.blocks)) + excess
            moved = bytes_moved(tier.blocks, tier.in_memory)
            moved += excess if moved else 0
        else:
            host += excess + self.gradient_copies
        param_store = self.param_store if isinstance(self.param_store, FakeFileParamStore) else None
        return {
            "host": host + (param_store.buffers if param_store else 0),
            "disk": state + (param_store.disk if param_store else 0),
            "read": moved + self.parameters_read,
            "written": moved + self.parameters_written,
        }

    def _saved(self) -> int:
        taken = SaveContents(self.model, self.optimizer, exclude_frozen=False)
        return saved_bytes(taken, self.optimizer, self.cluster.experts or 1)

    def _state_by_rank(self, is_offloaded: bool) -> dict[Communicator, list[int]]:
        """Return each rank's bytes of optimizer state, offloaded (`is_offloaded`) or not, by communicator."""
        base, dtypes = self.optimizer.base, self.optimizer.settings.dtypes
        per_element = dict[tuple[int, torch.dtype], int]()
        by_rank = dict[Communicator, list[int]]()
        for group in self.optimizer.trained:
            if group.master.tier.is_offloaded is not is_offloaded:
                continue
            ranks = by_rank.setdefault(group.shard_comm, [0] * group.shard_comm.size)
            for member in group.members if not group.asleep else ():
                kind = member.group, group.master.values.dtype
                piece = group.master.pieces.get(member)
                if piece is not None:
                    state = _state_in([base.state.get(piece.master, {})])
                    per_element[kind] = bytes_behind(state) // piece.master.numel()
                elif kind not in per_element:
                    per_element[kind] = state_bytes(base, *kind, dtypes) or 0
                for rank, numel in group.layout.shares(member.index):
                    ranks[rank] += numel * per_element[kind]
        return by_rank

    def _excess(self, by_rank: Mapping[Communicator, Sequence[int]]) -> int:
        """Return how much the largest rank exceeds the first. See [Note: the rank that holds most]."""
        communicators, expert_ranks = self.optimizer.communicators, self.cluster.experts or 1
        dense = by_rank.get(communicators.dense.shard_comm, [0])
        experts = [0] if communicators.expert is None else by_rank.get(communicators.expert.shard_comm, [0])
        totals = [
            dense[rank % len(dense)] + experts[rank // expert_ranks % len(experts)]
            for rank in range(self.cluster.world)
        ]
        return max(totals) - totals[0]

    def runtime_work(self) -> Work:
        """Return the recorded work of the runtime in a step, for all micro-batches."""
        assert self.recorder is not None
        parts, count = self.recorder.parts, self.config.gradient_accumulation_steps
        middle = parts["pass 1"].times(count - min(count, DISTINCT))  # those that were not simulated
        work = sum(parts.values(), Work()) + middle
        if self.optimizer.settings.needs_norm:  # of tensors without values it is not computed
            for gradients in (group.gradients for group in self.optimizer.trained if not group.asleep):
                size = gradients.layout.shard_numel * gradients.accumulate.itemsize
                work.items[MemoryPass(NORM, dtype_name(gradients.accumulate), size)] += 1
        return work

    def _windows(self) -> int:
        """Return the bytes of shared-memory windows, if all ranks are on one host."""
        groups = [each for each in self.optimizer.communicators.all if each.size > 1]
        shared = self.cluster.device == "cpu" and self.optimizer.settings.shared_memory
        return len(groups) * window_of(HALF) if shared else 0


def _arrived(tracker: MemoryTracker, name: str, param: Tensor) -> None:
    tracker.arrive(name, param.grad)


@contextmanager
def _silent() -> Iterator[None]:
    """Drop this thread's log records: they would advise on training, which the simulation does not do."""
    here = threading.get_ident()

    def is_from_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != here

    log.addFilter(is_from_another_thread)
    try:
        yield
    finally:
        log.removeFilter(is_from_another_thread)


@contextmanager
def _config_errors() -> Iterator[None]:
    """Raise a TypeError or ValueError of this block as ConfigError."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _adapt_to_meta(options: dict[str, Any]) -> None:
    """Drop options that torch rejects on the meta device. The same stepper is chosen, with the same state."""
    if options.get("capturable"):  # the fused kernel is not used for capturable optimizers
        options.update(capturable=False, fused=False)
    elif options.get("fused"):
        options["fused"] = None


def _state_in(states: Iterable[Mapping[str, Any]]) -> list[Tensor]:
    """Return the tensors in these states, without step counters."""
    return [t for state in states for t in state.values() if isinstance(t, Tensor) and t.dim()]
