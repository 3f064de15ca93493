"""`initialize`: create an engine from a model and a DeepSpeed configuration."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_full.assemble import compose
from zero_full.comm.devices import ON_CPU
from zero_full.comm.shared_memory import can_share_memory
from zero_full.comm.topology import Topology, this_rank
from zero_full.config import Config, LeafModuleConfig, Resolved, resolve
from zero_full.config.resolve import Transport
from zero_full.config.rules import MICRO, TRAIN
from zero_full.config.schema import OptimizerConfig
from zero_full.construct import outside_recording
from zero_full.engine.engine import Engine
from zero_full.engine.hybrid_engine import HybridEngine
from zero_full.engine.loader import RankLoader
from zero_full.engine.monitors import Monitors, is_monitored
from zero_full.errors import ConfigError
from zero_full.formatting import listed
from zero_full.freed_memory import keep_freed_memory
from zero_full.optim import build_optimizer, build_scheduler, parameter_groups
from zero_full.pipeline.module import PipelineModule
from zero_full.pipeline.setup import open_pipeline, pipeline_engine
from zero_full.settings import Settings
from zero_full.shard.deal.units import Wrap
from zero_full.shard.step.optimizer import ZeroOptimizer
from zero_full.shard.step.wrapped_optimizer import NoOptimizer
from zero_full.start.argument_checks import (
    check_arguments,
    check_optimizer,
    check_scale,
    check_schedule,
    check_training_data,
    untrained_parameters,
)
from zero_full.start.from_config import (
    accumulation_of,
    facts_of_config,
    is_leaf,
    scaler_of,
    scales,
    settings_of,
    shard_ranks_of,
)
from zero_full.start.launch import init_distributed, spans_hosts
from zero_full.start.startup_checks import StartupBarrier, attempt

log = logging.getLogger("zero_full")


@outside_recording
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    config_params: Any = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    topology: Topology | None = None,
    wrap: Wrap | None = None,
) -> tuple[Engine, ZeroOptimizer, Any, Any]:
    """Wrap `model` in an engine. Returns (engine, optimizer, data loader, LR scheduler).

    model             moved to this rank's device; every rank gets the first rank's values. A PipelineModule
                      gets a PipelineEngine
    optimizer         an instance, a class or a function of the parameters; None: the config's. If the config
                      has none, the engine runs forward only; at stage 0 it also averages gradients, for an
                      optimizer of your own
    model_parameters  the parameters to train, or parameter groups; None: all that require gradients
    training_data     a dataset; each rank's loader yields a different part
    lr_scheduler      an instance, or a function of the optimizer; None: the config's
    config            a dict, or the path of a JSON file, with DeepSpeed's keys (also: args.deepspeed_config)
    process_group     the ranks that share the state; or pass a named `mesh`, Megatron's `mpu` or a `topology`
    wrap              stage 3: (name, module) -> whether to gather it as a whole; None: as in the config
    """
    if isinstance(model, Engine):
        raise TypeError("the model is an engine already. Pass the module itself, engine.module")
    given = {"process_group": process_group, "mesh": mesh, "mpu": mpu, "topology": topology}
    check_arguments(model, optimizer, lr_scheduler, wrap, given)
    check_training_data(training_data)
    assert model is not None
    if dist_init_required is not False:
        init_distributed()
    topology = open_pipeline(model, given) if isinstance(model, PipelineModule) else _topology(**given)
    data_rank, data_ranks = _place_among_data(topology)

    read = partial(
        _read, (args, config, config_params), data_ranks, wrap, training_data, StartupBarrier(topology)
    )
    resolved, settings, monitors = attempt(read, topology)
    checked = resolved.config
    kind: Callable[..., Engine] = HybridEngine if checked.hybrid_engine.enabled else Engine
    if isinstance(model, PipelineModule):
        kind = pipeline_engine(model, topology, checked)
    make = partial(_make, resolved, settings, model, optimizer, model_parameters, lr_scheduler)
    facts, shard_ranks = {"configuration": facts_of_config(checked)}, shard_ranks_of(checked, data_ranks)
    accumulation = accumulation_of(checked)
    wrapped, schedule = compose(
        model, topology, settings, make, scaler_of(checked), accumulation, facts, shard_ranks
    )
    loader = None
    if training_data is not None:
        batch, drop = checked.train_micro_batch_size_per_gpu, checked.dataloader_drop_last
        loader = RankLoader(training_data, batch, data_rank, data_ranks, collate_fn, drop)
    device = wrapped.communicators.device
    if device.type == "cpu":
        keep_freed_memory()
    plan = partial(_planned, model, wrapped, checked, data_ranks)
    engine = kind(model, wrapped, resolved, device, schedule, loader, data_ranks, plan)
    if (path := checked.debug.record) is not None:  # if one rank cannot write, all ranks raise
        attempt(partial(engine.record, path, checked.debug.record_steps), topology)
    if engine.reporting is not None:
        engine.reporting.monitors = monitors
    _announce(engine, optimizer, lr_scheduler)
    engine.is_made = True
    return engine, wrapped, loader, schedule


def _planned(model: nn.Module, wrapped: ZeroOptimizer, config: Config, world: int) -> dict[str, int]:
    """Return the bytes of a plan of this run, by the kinds of the ledger. For an out-of-memory error only."""
    from zero_full.plan import plan  # an ordinary run needs none

    base, device = wrapped.base, wrapped.communicators.device
    name = type(base).__name__
    if config.optimizer is None or config.optimizer.type.lower() != name.lower():  # passed to initialize
        params = {key: base.defaults[key] for key in ("momentum", "amsgrad") if base.defaults.get(key)}
        config = config.model_copy(update={"optimizer": OptimizerConfig(type=name, params=params)})
    made = plan(model, config, world, device=device.type)
    if isinstance(model, PipelineModule):
        made = made.places[model.place]
    kinds = {
        "parameters": made.parameters + made.gathered,
        "gradients": made.gradients + made.buckets,
        "optimizer": made.master + made.moments + made.update,
        "host": made.host,
        "disk": made.disk,
    }
    return {kind: size for kind, size in kinds.items() if size}


def _read(
    configs: tuple[Any, Any, Any],
    data_ranks: int,
    wrap: Wrap | None,
    training_data: Any,
    roll_call: StartupBarrier,
) -> tuple[Resolved, Settings, Monitors | None]:
    """Return the resolved configuration, its settings and, on the first rank, its open monitors."""
    resolved = resolve(_config(*configs), data_ranks, _transport())
    settings = settings_of(resolved.config)
    if settings.check_timeout_s is not None:
        roll_call.wait(settings.check_timeout_s)
    if training_data is not None and not resolved.config.train_micro_batch_size_per_gpu:
        raise ConfigError(f"training_data needs a batch size. Set {MICRO} or {TRAIN} in the configuration")
    if wrap is not None:
        settings = replace(settings, gathering=replace(settings.gathering, wrap=wrap))
    # Opened before anything is built, so that after an error the model can be initialized again.
    is_writer = this_rank() == 0 and is_monitored(resolved.config)
    return resolved, settings, Monitors(resolved.config) if is_writer else None


def _transport() -> Transport:
    """Return how ranks reach each other, as far as the environment says. Equal on all ranks."""
    on_cpu = dist.get_backend() in ON_CPU if dist.is_initialized() else not torch.accelerator.is_available()
    if not on_cpu:
        return "accelerator"
    if spans_hosts():
        return "network"
    return "shared memory" if can_share_memory() else "loopback"


def _make(
    resolved: Resolved,
    settings: Settings,
    model: nn.Module,
    optimizer: Any,
    parameters: Iterable[Any] | None,
    schedule: Any,
) -> tuple[torch.optim.Optimizer, Any]:
    """Return the optimizer and the LR scheduler: the given ones, or the configuration's."""
    base = _optimizer(resolved, model, optimizer, parameters)
    check_optimizer(base, model)
    if not scales(resolved.config):
        check_scale(base, model, settings.dtypes.of)
    return base, _schedule(resolved, base, schedule)


def _config(args: Any, config: Any, config_params: Any) -> Any:
    given = (config, config_params, getattr(args, "deepspeed_config", None))
    found = [each for each in given if each is not None]
    if len(found) != 1:
        raise ValueError(
            f"initialize needs exactly one config and got {len(found)}. Pass config=<dict or path>, or an "
            "argument --deepspeed_config, not both"
        )
    return found[0]


def _topology(
    process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None, mpu: Any, topology: Topology | None
) -> Topology:
    if mesh is not None:
        return Topology.from_mesh(mesh)
    if mpu is not None:
        return Topology.from_mpu(mpu)
    return topology if topology is not None else Topology(data=process_group)


def _place_among_data(topology: Topology) -> tuple[int, int]:
    """Return (rank, number of ranks) among the ranks that train on different data."""
    shard, copies = topology.shard, topology.replicate
    if shard is not None and copies is not None:
        return copies.rank() * shard.size() + shard.rank(), copies.size() * shard.size()
    group = dist.group.WORLD if topology.data is None and dist.is_initialized() else topology.data
    return (group.rank(), group.size()) if group is not None else (0, 1)


def _optimizer(
    resolved: Resolved, model: nn.Module, given: Any, parameters: Iterable[Any] | None
) -> torch.optim.Optimizer:
    section, stage = resolved.config.optimizer, resolved.config.zero_optimization.stage
    if given is None and section is None:
        return NoOptimizer([p for p in model.parameters() if p.requires_grad] if stage == 0 else [])
    if isinstance(given, torch.optim.Optimizer):
        groups = given.param_groups
    else:
        if parameters is None:
            parameters = [p for p in model.parameters() if p.requires_grad]
        groups = parameter_groups(parameters)  # includes frozen parameters, which may be trained later
    if not any(p.requires_grad for group in groups for p in group["params"]):
        raise ValueError("there is nothing to train: no parameter requires gradients")
    if isinstance(given, torch.optim.Optimizer):
        return given
    if given is None:
        assert section is not None
        return build_optimizer(section.type, section.params, groups, model)
    made: torch.optim.Optimizer = given(groups)
    return made


def _schedule(resolved: Resolved, base: torch.optim.Optimizer, given: Any) -> Any:
    section = resolved.config.scheduler
    if given is not None:
        made = given(base) if callable(given) and not hasattr(given, "step") else given
        check_schedule(made, base)
        return made
    if section is None or isinstance(base, NoOptimizer):
        return None
    return build_scheduler(section.type, section.params, base)


def _warnings(engine: Engine, optimizer: Any, schedule: Any) -> Iterator[str]:
    """Yield warnings about parts of the configuration and the model that have no effect as given."""
    config, zero = engine.config, engine.config.zero_optimization
    has_optimizer = not isinstance(engine.optimizer.base, NoOptimizer)
    yield from engine.resolved.warnings
    yield from engine.resolved.assumed if has_optimizer else ()
    asked = [key for key in ("steps_per_print", "wall_clock_breakdown") if getattr(config, key)]
    if asked and log.hasHandlers() and not log.isEnabledFor(logging.INFO):
        yield (
            f"{' and '.join(asked)} log at level INFO, which this script's logging drops. Call "
            'logging.getLogger("zero_full").setLevel(logging.INFO)'
        )
    called = [(n, m) for n, m in engine.module.named_modules() if type(m).forward is not nn.Module.forward]
    for key in zero.leaf_module.model_fields_set if zero.stage == 3 else ():
        for item in getattr(zero.leaf_module, key):
            alone = LeafModuleConfig(**{"classes": [], key: [item]})
            if not any(is_leaf(alone, name, module) for name, module in called):
                yield f"zero_optimization.leaf_module.{key}: {item!r} matches no module that is called"
    if has_optimizer and (names := untrained_parameters(engine.optimizer, engine.module)):
        yield (
            f"{len(names)} parameters require gradients and are in no parameter group of the optimizer, so "
            f"they are not trained: {listed(names)}"
        )
    if config.pipeline.model_fields_set and not isinstance(engine.module, PipelineModule):
        yield '"pipeline" has no effect: the model is no PipelineModule'
    used = "passed to initialize is used instead of the configuration's"
    if optimizer is not None and config.optimizer is not None:
        yield f'the optimizer {used} "optimizer" ({config.optimizer.type})'
    if schedule is not None and config.scheduler is not None:
        yield f'the schedule {used} "scheduler" ({config.scheduler.type})'
    elif config.scheduler is not None and not has_optimizer:
        yield f'"scheduler" ({config.scheduler.type}) has no effect: there is no optimizer'


def _announce(engine: Engine, optimizer: Any, schedule: Any) -> None:
    """Log warnings and the resolved configuration, on one rank."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    for warning in _warnings(engine, optimizer, schedule):
        log.warning("%s", warning)
    model_dtype = next((p.dtype for p in engine.module.parameters()), torch.float32)
    dtypes = engine.optimizer.settings.dtypes.table(model_dtype)
    rows = [(f"dtype of {kind}", dtype, "derived") for kind, dtype in dtypes.items()]
    log.info("zero_full configuration\n%s", engine.resolved.table(rows))
    if rule := engine.division_rule():
        log.info("%s", rule)
