"""`initialize`: a model, a config, and what to make of them."""

import argparse
import atexit
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_full.checkpoint import load_weights
from zero_full.comm.ledger import Traffic
from zero_full.comm.topology import Topology
from zero_full.config import Config, LeafModuleConfig, resolve
from zero_full.construct import Deferred, has_values, outside_recording
from zero_full.data import RankLoader
from zero_full.engine import Engine
from zero_full.optim import build_optimizer, build_scheduler, check_elementwise
from zero_full.precision import Dtypes, DynamicScale, StaticScale
from zero_full.precision.dtypes import NAMES
from zero_full.shard import Connection, Dealer, Gathering, Settings, ZeroOptimizer, connect, settle_the_rest
from zero_full.shard.units import Wrap
from zero_full.shard.whole import guard

log = logging.getLogger("zero_full")
LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init_distributed(
    dist_backend: str | None = None, timeout: timedelta | None = None, init_method: str | None = None
) -> None:
    """Join the world that torchrun describes, unless this process has. Alone, it does nothing.

    Who joins by this leaves at exit, too: a process group that is still open then may abort the process.
    """
    if dist.is_initialized() or (init_method is None and not all(key in os.environ for key in LAUNCHER)):
        return
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(dist_backend, timeout=timeout, init_method=init_method)
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        with suppress(RuntimeError):  # the others may have gone
            dist.destroy_process_group()
    # A thread of gloo's may still wait for the GIL, to let go of the last collective's tensors. Whoever waits
    # for it while the interpreter ends is ended, and that aborts the process. A sleep hands over the GIL.
    time.sleep(0.05)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The command-line arguments that DeepSpeed scripts have."""
    group = parser.add_argument_group("zero_full")
    group.add_argument(
        "--deepspeed", action="store_true", help="accepted and ignored: there is no other mode"
    )
    group.add_argument("--deepspeed_config", metavar="FILE", help="the configuration, a JSON file")
    return parser


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
    """Put `model` under an engine's care. Returns (engine, optimizer, data loader, schedule).

    model             moved to this rank's device; every rank gets the first rank's values
    optimizer         an instance, a class or a function of the parameters; None: the config's
    model_parameters  what to train: parameters, or groups of them; None: all that require gradients
    training_data     a dataset; each rank's loader has its own part
    lr_scheduler      an instance, or a function of the optimizer; None: the config's
    config            a dict, or the path of a JSON file, with DeepSpeed's keys (also: args.deepspeed_config)
    process_group     the ranks that share the state; or a named `mesh`, Megatron's `mpu`, a `topology`
    wrap              stage 3: (name, module) -> whether it is gathered as a whole; None: the config's way
    """
    if model is None:
        raise ValueError("initialize needs a model")
    given = _config(args, config, config_params)
    if dist_init_required is not False:
        init_distributed()
    topology = _topology(process_group, mesh, mpu, topology)
    data_rank, data_ranks = _place_among_data(topology)
    resolved = resolve(given, data_ranks)
    settings = settings_of(resolved.config)
    if wrap is not None:
        settings = replace(settings, gathering=replace(settings.gathering, wrap=wrap))
    if resolved.config.zero_optimization.mics_shard_size > 0 and settings.stage > 0 and data_ranks > 1:
        topology = topology.with_sub_groups(resolved.config.zero_optimization.mics_shard_size)
    device = _device(model)
    deferred = Deferred(model, device)
    model.to(device)
    base = _optimizer(resolved.config, model, optimizer, model_parameters)
    schedule = _schedule(resolved.config, base, lr_scheduler)
    wrapped = _shard(model, base, topology, resolved.config, settings, deferred)
    loader = None
    if training_data is not None:
        batch, drop = resolved.config.train_micro_batch_size_per_gpu, resolved.config.dataloader_drop_last
        loader = RankLoader(training_data, batch, data_rank, data_ranks, collate_fn, drop)
    engine = Engine(model, wrapped, resolved, device, schedule, loader, data_ranks)
    _announce(engine)
    return engine, wrapped, loader, schedule


def _config(args: Any, config: Any, config_params: Any) -> Any:
    candidates = [config, config_params, getattr(args, "deepspeed_config", None)]
    found = [candidate for candidate in candidates if candidate is not None]
    if len(found) != 1:
        raise ValueError(
            f"initialize needs one config and got {len(found)}: pass config=<dict or path>, or an argument "
            "--deepspeed_config, not both"
        )
    return found[0]


def _topology(
    group: dist.ProcessGroup | None, mesh: DeviceMesh | None, mpu: Any, topology: Topology | None
) -> Topology:
    given = {"process_group": group, "mesh": mesh, "mpu": mpu, "topology": topology}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} say the same thing twice: pass one of them")
    if mesh is not None:
        return Topology.from_mesh(mesh)
    if mpu is not None:
        return Topology.from_mpu(mpu)
    return topology if topology is not None else Topology(data=group)


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


def _place_among_data(topology: Topology) -> tuple[int, int]:
    """(this rank, how many) among the ranks that train on different data."""
    shard, copies = topology.shard, topology.replicate
    if shard is not None and copies is not None:
        return copies.rank() * shard.size() + shard.rank(), copies.size() * shard.size()
    group = topology.data if topology.data is not None else _world()
    return (group.rank(), group.size()) if group is not None else (0, 1)


def _device(model: nn.Module) -> torch.device:
    """The model's, if it is on an accelerator already; else this rank's accelerator, if it can talk there."""
    real = (p.device for p in model.parameters() if has_values(p))
    here = next(real, torch.device("cpu"))
    if here.type != "cpu" or not torch.accelerator.is_available():
        return here
    if dist.is_initialized() and dist.get_backend() in ("gloo", "cpu:gloo"):
        return here
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, int(os.environ.get("LOCAL_RANK", "0")))


def settings_of(config: Config) -> Settings:
    """What the config says about sharding."""
    zero, fp16, bf16 = config.zero_optimization, config.fp16, config.bf16
    parameter = torch.float16 if fp16.enabled else torch.bfloat16 if bf16.enabled else None
    dtypes = Dtypes(
        parameter,
        reduce=_dtype(config.communication_data_type),
        accumulate=_dtype(config.data_types.grad_accum_dtype),
        buffer=_dtype(config.data_types.buffer_dtype),
        low_master=fp16.fp16_master_weights_and_grads or bf16.bf16_master_weights_and_grads,
        low_state=bf16.bf16_optimizer_states,
    )
    overlap = bool(zero.overlap_comm)
    return Settings(
        stage=zero.stage,
        dtypes=dtypes,
        bucket_numel=zero.reduce_bucket_size,
        overlap=overlap,
        gather_beside_forward=overlap and torch.accelerator.is_available(),
        copy_on_arrival=zero.contiguous_gradients,
        round_robin=zero.round_robin_gradients,
        reduce_scatter=zero.reduce_scatter,
        prescale=config.prescale_gradients,
        predivide=config.gradient_predivide_factor,
        average=config.gradient_allreduce_op == "mean",
        clip=config.gradient_clipping,
        check_overflow=_checks_overflow(config),
        refuse_unused=not zero.ignore_unused_parameters,
        gathering=Gathering(
            prefetch_numel=zero.stage3_prefetch_bucket_size,
            max_live=zero.stage3_max_live_parameters,
            max_reuse=zero.stage3_max_reuse_distance,
            keep_numel=zero.stage3_param_persistence_threshold,
            keep_total=zero.stage3_model_persistence_threshold,
            node_ranks=zero.zero_hpz_partition_size,
            quantized_weights=zero.zero_quantized_weights,
            quantized_gradients=zero.zero_quantized_gradients,
            wrap=partial(_is_leaf, zero.leaf_module),
        ),
        sub_group_numel=zero.sub_group_size,
    )


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else NAMES[name]


def _is_leaf(leaf: LeafModuleConfig, name: str, module: nn.Module) -> bool:
    """Whether the config makes this module a unit: by class, by name or by the end of the name."""
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__]
    classes = {*kinds, *(kind.rpartition(".")[2] for kind in kinds)}
    by_class = not classes.isdisjoint(leaf.classes)
    return by_class or name in leaf.names or name.endswith(tuple(leaf.name_suffixes))


def _checks_overflow(config: Config) -> bool:
    """In fp32 the check comes with clipping, which has the norm anyway."""
    if config.bf16.enabled:
        return config.bf16.check_grad_overflow
    return config.fp16.enabled or config.gradient_clipping > 0


def _scaler(config: Config) -> StaticScale:
    fp16 = config.fp16
    if not fp16.enabled:
        return StaticScale(1.0)
    if fp16.loss_scale > 0:
        return StaticScale(fp16.loss_scale)
    return DynamicScale(
        2.0**fp16.initial_scale_power,
        fp16.loss_scale_window,
        fp16.min_loss_scale,
        fp16.hysteresis,
        fp16.consecutive_hysteresis,
    )


def _optimizer(
    config: Config, model: nn.Module, given: Any, parameters: Iterable[Any] | None
) -> torch.optim.Optimizer:
    if isinstance(given, torch.optim.Optimizer):
        return given
    everything: list[Any] = list(parameters) if parameters is not None else list(model.parameters())
    if everything and isinstance(everything[0], dict):
        groups: list[dict[str, Any]] = everything
    else:
        groups = [{"params": [p for p in everything if p.requires_grad]}]
    if not any(p.requires_grad for group in groups for p in _as_list(group["params"])):
        raise ValueError("there is nothing to train: no parameter requires gradients")
    if given is not None:
        made: torch.optim.Optimizer = given(groups)
        return made
    if config.optimizer is None:
        raise ValueError('no optimizer: pass one to initialize, or add "optimizer" to the config')
    return build_optimizer(config.optimizer.type, config.optimizer.params, groups)


def _as_list(params: Any) -> Sequence[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _schedule(config: Config, base: torch.optim.Optimizer, given: Any) -> Any:
    if given is not None:
        return given(base) if callable(given) and not hasattr(given, "step") else given
    if config.scheduler is None:
        return None
    return build_scheduler(config.scheduler.type, config.scheduler.params, base)


def _shard(
    model: nn.Module,
    base: torch.optim.Optimizer,
    topology: Topology,
    config: Config,
    settings: Settings,
    deferred: Deferred,
) -> ZeroOptimizer:
    device = deferred.device
    timeout = config.debug.timeout_s if config.debug.check_collectives else None
    separate = settings.overlap and device.type == "cpu"
    groups = connect(topology, settings, Connection(device, Traffic(), separate, timeout))
    if groups.dense.shard.size > 1 or (groups.expert is not None and groups.expert.shard.size > 1):
        check_elementwise(base, config.zero_allow_untested_optimizer)
    deferred.refuse_strangers(base.param_groups)
    deferred.agree(groups.dense.shard, groups.dense.across)
    if groups.expert is not None and deferred.parameters:
        raise ValueError("experts are initialised differently on each rank: construct them without Init")
    parts = Dealer(base.param_groups, topology, groups, settings, deferred.parameters).deal(model)
    deferred.fill(parts.fill)
    settle_the_rest(model, parts, topology, groups, settings)
    optimizer = ZeroOptimizer(base, model, parts, groups, settings, _scaler(config))
    optimizer.guards = guard(model) if parts.sites else []
    for path in deferred.weights:
        load_weights(model, optimizer, path)
    return optimizer


def _announce(engine: Engine) -> None:
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    for warning in engine.resolved.warnings:
        log.warning("%s", warning)
    model_dtype = next((p.dtype for p in engine.module.parameters()), torch.float32)
    dtypes = engine.optimizer.settings.dtypes.table(model_dtype)
    rows = [(f"dtype of {kind}", dtype, "derived") for kind, dtype in dtypes.items()]
    log.info("zero_full configuration\n%s", engine.resolved.table(rows))
