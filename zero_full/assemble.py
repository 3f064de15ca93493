"""Typed entry point: `shard` makes a sharded optimizer from a model, an optimizer and `Settings`.

    optimizer = shard(model, torch.optim.AdamW(model.parameters()), Settings(stage=3))
    for inputs, targets in loader:
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

`initialize` converts a DeepSpeed configuration to the same settings, calls `compose` like `shard`, and wraps
the result in an engine.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_full.checkpoint import load_weights
from zero_full.comm.devices import ON_CPU, own_accelerator
from zero_full.comm.topology import Topology, this_rank
from zero_full.comm.traffic import Traffic
from zero_full.construct import Deferred, has_values, outside_recording
from zero_full.engine.forward_hooks import DdpCheck, ForwardHooks
from zero_full.formatting import listed
from zero_full.kernels.load import load
from zero_full.offload import Need, ParamStore, Tier, memory_limits, shortage_message
from zero_full.optim import check_elementwise
from zero_full.precision import DynamicScale, StaticScale
from zero_full.settings import Settings
from zero_full.shard.access.gathered_parameters import guard
from zero_full.shard.deal.dealer import Dealer, Drafts, place_the_rest, warn_of_parameters, warn_of_share
from zero_full.shard.deal.host_memory import host_memory
from zero_full.shard.deal.one_bit_support import check_backend, one_bit_settings
from zero_full.shard.group.process_groups import Connection, connect
from zero_full.shard.passes.backward import Accumulation
from zero_full.shard.step.optimizer import ZeroOptimizer
from zero_full.shard.step.wrapped_optimizer import NoOptimizer
from zero_full.start.argument_checks import check_arguments, check_model, check_optimizer
from zero_full.start.dtensor_checks import check_dtensors, check_split_rule, compare_values
from zero_full.start.startup_checks import attempt, check_shared_devices, compare, facts_of, gather_objects

log = logging.getLogger("zero_full")
OpenTier = Callable[[torch.optim.Optimizer, Dealer, Drafts, torch.device], Tier]
OPERATORS = "operators"
UNKNOWN_STATE = (
    "the size of %s's state is not known before its first step. The check for enough free host memory and "
    "disk space (offload_optimizer) did not count it"
)
SWITCH = "ZERO_FULL_SHARED_MEMORY"


@outside_recording
def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    settings: Settings | None = None,
    topology: Topology | None = None,
    *,
    scaler: StaticScale | None = None,
) -> ZeroOptimizer:
    """Shard parameters, gradients and optimizer state across ranks. Every rank must call this.

    model      moved to this rank's device; every rank gets the first rank's values
    optimizer  over parameters of the model; None: inference only, with parameters sharded as by the stage
    settings   stage, precision, offload tiers and other options; None: stage 1 in the model's own precision
    topology   the process groups; None: all ranks of torch.distributed share all state
    scaler     the loss scaler; None: a `DynamicScale` with fp16 parameters, else none. With a scaler, call
               `optimizer.scale(loss).backward()`, or let the model return its loss

    Returns the optimizer to use in place of the given one: with `step`, `zero_grad`, `state_dict`, and
    `last`, the report of the last step. Gradients of several backward passes add up until `step`.
    """
    settings, topology = settings or Settings(), topology or Topology()
    given = {"process_group": None, "mesh": None, "mpu": None, "topology": topology}
    check_arguments(model, optimizer, None, settings.gathering.wrap, given)
    if not (optimizer is None or isinstance(optimizer, torch.optim.Optimizer)):
        raise TypeError(f"optimizer must be a torch optimizer or None, not {type(optimizer).__name__}")
    _check_distributed(topology)
    facts = {"settings": dict(_facts(settings))}
    accumulation = Accumulation(plain_divisor=settings.plain_divisor)
    made, _ = compose(model, topology, settings, lambda: (optimizer, None), scaler, accumulation, facts)
    if made.scaler.scales:
        made.hooks.append(ForwardHooks(model, made, scales_outputs=True))
    return made


def compose(
    model: nn.Module,
    topology: Topology,
    settings: Settings,
    make: Callable[[], tuple[torch.optim.Optimizer | None, Any]],
    scaler: StaticScale | None,
    accumulation: Accumulation,
    facts: Mapping[str, Mapping[str, Any]],
    shard_ranks: int | None = None,
) -> tuple[ZeroOptimizer, Any]:
    """Compare arguments between ranks, then assemble a sharded optimizer. Every rank must call this.

    make          returns an optimizer over the model's parameters, or None, and its LR scheduler; called when
                  the model is on its device. Its exceptions are raised on every rank
    scaler        None: a `DynamicScale` with fp16 parameters, else none
    accumulation  the micro-batches of a step
    facts         values that must be equal on every rank, besides those of the model and the optimizer
    shard_ranks   size of the groups of consecutive ranks that share the state, which other groups replicate;
                  None: defined by the topology

    Returns the optimizer and the LR scheduler of `make`.
    """
    prepared = attempt(partial(_prepare, model, topology, settings, make, scaler), topology)
    agreed = {**facts, **facts_of(model, prepared.base), OPERATORS: prepared.operators}
    compare(agreed, topology, may_differ=OPERATORS)
    if prepared.has_dtensors:
        compare_values(model, topology)
    if shard_ranks is not None:
        topology = topology.with_sub_groups(shard_ranks)
    return assemble(model, topology, prepared, accumulation), prepared.schedule


@dataclass(frozen=True)
class Prepared:
    """What a rank prepares before the first collective. Only devices are compared, through the store."""

    deferred: Deferred
    base: torch.optim.Optimizer
    settings: Settings
    scaler: StaticScale
    operators: Mapping[str, str]  # "compiled" or the reason why not, by kind of device
    has_dtensors: bool = False  # tensor parallelism has cut the model: see `dtensor_checks.py`
    schedule: Any = None


def _prepare(
    model: nn.Module,
    topology: Topology,
    settings: Settings,
    make: Callable[[], tuple[torch.optim.Optimizer | None, Any]],
    scaler: StaticScale | None,
) -> Prepared:
    check_model(model)
    has_dtensors = check_dtensors(model, topology, settings)
    deferred = Deferred(model, _device(model))
    if has_dtensors and deferred.parameters:
        raise ValueError(
            f"{listed([name for name, p in model.named_parameters() if p in deferred.parameters])} were "
            "constructed in zero_full.Init, and other parameters are DTensors. Construct the model without "
            "Init, then cut it"
        )
    check_shared_devices(topology, deferred.device)
    model.to(deferred.device)  # recorded tensors do not move
    if not _shares_memory():
        settings = replace(settings, shared_memory=False)
    base, schedule = make()
    if base is None:
        base = NoOptimizer(p for p in model.parameters() if p.requires_grad and not settings.shards_state)
    if isinstance(base, NoOptimizer):  # without steps, no fp32 master weights or loss scale are needed
        settings = replace(settings, dtypes=replace(settings.dtypes, low_master=True))
        scaler = StaticScale(1.0)
    else:
        check_optimizer(base, model)
    if scaler is None:
        in_fp16 = any(settings.dtypes.of(p.dtype) == torch.float16 for p in model.parameters())
        scaler = DynamicScale() if in_fp16 else StaticScale(1.0)
    operators = dict(_operators(deferred.device, settings.tier))
    if topology.tensor is not None:
        check_split_rule(model, base, topology, settings.allow_untested)
    return Prepared(deferred, base, settings, scaler, operators, has_dtensors, schedule)


def _operators(device: torch.device, tier: Tier) -> Iterator[tuple[str, str]]:
    """Yield the operators in use on this rank's devices. Missing ones are compiled."""
    where_stepped = tier.allocate(0, torch.float32, device).device
    for place in dict.fromkeys((device, where_stepped)):
        loaded = load(place)
        why = loaded.reason.partition("\n")[0]
        yield f"on {place.type}", "compiled" if loaded.path else f"torch's own ({why})"


def assemble(
    model: nn.Module,
    topology: Topology,
    prepared: Prepared,
    accumulation: Accumulation,
    open_tier: OpenTier | None = None,
) -> ZeroOptimizer:
    """Open process groups, shard the parameters, and create the optimizer. Every rank must call this.

    `open_tier` opens the offload tier, without the usual checks of this host's memory and disks.
    """
    deferred, base = prepared.deferred, prepared.base
    settings = replace(prepared.settings, dtypes=prepared.settings.dtypes.for_model(model))
    settings = one_bit_settings(base, settings, topology)
    device = deferred.device
    separate = settings.overlap or device.type != "cpu"  # accelerators queue all work, always
    connection = Connection(device, Traffic(), separate, settings.check_timeout_s, settings.shared_memory)
    communicators = connect(topology, settings, connection)
    if communicators.dense.shard_comm.size > 1 or (
        communicators.expert is not None and communicators.expert.shard_comm.size > 1
    ):
        check_elementwise(base, settings.allow_untested)
    check_backend(base, communicators, device)
    deferred.check_optimizer_parameters(base.param_groups)
    deferred.exchange_random_states(communicators.dense)
    if communicators.expert is not None and deferred.parameters:
        raise ValueError("experts have different values on each rank. Construct them without Init")
    param_store = _open_param_store(settings, device, topology)
    dealer = Dealer(base.param_groups, topology, communicators, settings, deferred.parameters, param_store)
    drafts = dealer.draft(model)
    settings = dealer.settings = replace(settings, tier=(open_tier or _opened)(base, dealer, drafts, device))
    sharded = dealer.deal(drafts)
    if this_rank() == 0:
        warn_of_share(drafts, settings)
        warn_of_parameters(sharded, settings)
    if deferred.parameters:
        attempt(partial(deferred.run_replay, sharded.fill), topology)
        deferred.broadcast_differences(sharded.fill)
    place_the_rest(model, sharded, topology, communicators, settings)
    optimizer = ZeroOptimizer(base, model, sharded, communicators, settings, prepared.scaler, accumulation)
    is_behind = optimizer.steppers.own is not None or settings.tier.delay_after is not None
    optimizer.state_dict_guards = guard(model) if sharded.sites or is_behind else []
    optimizer.hooks.append(DdpCheck(model))
    for path in deferred.weights:
        load_weights(model, optimizer, path)
    return optimizer


def _opened(base: torch.optim.Optimizer, dealer: Dealer, drafts: Drafts, device: torch.device) -> Tier:
    """Open the offload tier. If it fails on one rank, all ranks raise."""
    tier, topology, param_store = dealer.settings.tier, dealer.topology, dealer.param_store
    with ExitStack() as failing:
        failing.callback(param_store.close)
        memory = host_memory(base, dealer, drafts, device)
        if tier.is_offloaded or dealer.settings.param_tier.is_offloaded:
            needs = gather_objects(Need(memory.total, tuple(memory_limits(socket.gethostname()))), topology)
            if reason := shortage_message(needs):
                raise MemoryError(reason)
        if not memory.knows_state and this_rank() == 0:
            log.warning(UNKNOWN_STATE, type(base).__name__)
        opened = attempt(partial(tier.open, memory.arena, device), topology)
        failing.callback(opened.close)
        in_files: list[tuple[Tier | ParamStore, int]] = []
        in_files += [(param_store, memory.parameters_in_file)] if param_store.can_fail else []
        in_files += [(opened, memory.state_in_file)] if opened.moves else []
        _check_disk_space(in_files, topology)
        for advice in {each.advice for each, _ in in_files if each.advice and this_rank() == 0}:
            log.warning("%s", advice)
        failing.pop_all()
    return opened


def _open_param_store(settings: Settings, device: torch.device, topology: Topology) -> ParamStore:
    """Open the store for shards of parameters."""
    chosen = settings.param_tier
    param_store = attempt(partial(chosen.param_store, device), topology)
    if chosen.is_offloaded and not param_store.is_offloaded and this_rank() == 0:
        log.info(
            "offload_param has no effect: the model is on the CPU, so its parameters are in host memory "
            "already"
        )
    return param_store


def _check_disk_space(opened: Sequence[tuple[Tier | ParamStore, int]], topology: Topology) -> None:
    """Raise on every rank if a disk has too little space for the offloaded state of all ranks that use it.

    Ranks exchange their host names, since a launcher may not define the number of ranks per host.
    """
    if not opened:
        return
    mine = [((socket.gethostname(), each.disk_id), need) for each, need in opened]
    needs = gather_objects(mine, topology)
    for (each, _), (here, _) in zip(opened, mine, strict=True):
        together = sum(need for theirs in needs.values() for place, need in theirs if place == here)
        attempt(partial(each.check_space, together), topology)


def _device(model: nn.Module) -> torch.device:
    """Return the model's accelerator, or this rank's if the backend supports it, else the CPU."""
    real = (p.device for p in model.parameters() if has_values(p))
    here = next(real, torch.device("cpu"))
    if here.type != "cpu" or not torch.accelerator.is_available():
        return here
    if dist.is_initialized() and dist.get_backend() in ON_CPU:
        return here
    return own_accelerator()


def _shares_memory() -> bool:
    """Return whether shared memory is enabled. ZERO_FULL_SHARED_MEMORY=off disables it."""
    value = os.environ.get(SWITCH, "on").lower()
    if value not in ("on", "off"):
        raise ValueError(f"{SWITCH}={value!r}: set it to on or off")
    return value == "on"


def _check_distributed(topology: Topology) -> None:
    """Raise if a launcher has started several ranks that would train independently of each other."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if topology == Topology() and not dist.is_initialized() and ranks != "1":
        raise RuntimeError(
            f"this is one of {ranks} ranks (WORLD_SIZE), and torch.distributed is not initialised, so each "
            "rank would train alone. Call zero_full.init_distributed() first"
        )


def _facts(settings: Settings) -> Iterator[tuple[str, Any]]:
    """Yield the settings that must be equal on every rank. Functions cannot be compared."""

    def flat(prefix: str, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in section.items():
            if isinstance(value, Mapping):
                yield from flat(f"{prefix}{key}.", value)
            elif isinstance(value, Tier):  # a user-defined tier, whose repr may differ between ranks
                yield f"settings.{prefix}{key}", type(value).__qualname__
            elif not callable(value):
                yield f"settings.{prefix}{key}", repr(value)

    yield from flat("", asdict(settings))
