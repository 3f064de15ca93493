"""Convert a DeepSpeed configuration to `Settings`, a loss scaler and shard groups. Builds nothing."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from zero_full.config import Config, LeafModuleConfig
from zero_full.config.messages import entries
from zero_full.config.schema import AioConfig, OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig
from zero_full.offload import BlockTier, DeviceTier, HostTier, Tier
from zero_full.precision import Dtypes, DynamicScale, StaticScale
from zero_full.precision.dtypes import NAMES
from zero_full.settings import Gathering, Settings
from zero_full.shard.passes.backward import Accumulation

PARTS_IN_MEMORY = 8  # of the state on a disk: so many are read and written without waiting for each other
MONITORS = ("jsonl_monitor", "csv_monitor", "tensorboard")  # that have a folder
MAY_DIFFER = {  # between ranks
    *("steps_per_print", "wall_clock_breakdown", "debug.record"),
    # Only the first rank writes there. A job_name with the time in it may differ.
    *(f"{monitor}.{key}" for monitor in MONITORS for key in ("output_path", "job_name")),
    *(f"wandb.{key}" for key in ("group", "team", "project")),
}


def settings_of(config: Config) -> Settings:
    """Return the runtime's settings of a configuration."""
    zero, fp16, bf16 = config.zero_optimization, config.fp16, config.bf16
    parameter = torch.float16 if fp16.enabled else torch.bfloat16 if bf16.enabled else None
    dtypes = Dtypes(
        parameter,
        reduce=_dtype(config.communication_data_type),
        accumulate=_dtype(config.data_types.grad_accum_dtype),
        buffer=_dtype(config.data_types.buffer_dtype),
        low_master=fp16.fp16_master_weights_and_grads or bf16.bf16_master_weights_and_grads,
        low_state=bf16.bf16_optimizer_states,
        rounding_seed=bf16.stochastic_rounding_seed if bf16.stochastic_rounding else None,
    )
    return Settings(
        stage=zero.stage,
        dtypes=dtypes,
        bucket_numel=zero.reduce_bucket_size,
        overlap=bool(zero.overlap_comm),
        copy_on_arrival=zero.contiguous_gradients,
        round_robin=zero.round_robin_gradients,
        reduce_scatter=zero.reduce_scatter,
        prescale=config.prescale_gradients,
        predivide=config.gradient_predivide_factor,
        average=config.gradient_allreduce_op == "mean",
        plain_divisor=None if config.plain_backward_divides else 1,
        clip=config.gradient_clipping,
        check_overflow=_checks_overflow(config),
        require_all_used=not zero.ignore_unused_parameters,
        gathering=Gathering(
            prefetch_numel=zero.stage3_prefetch_bucket_size,
            max_live=zero.stage3_max_live_parameters,
            max_reuse=zero.stage3_max_reuse_distance,
            keep_numel=zero.stage3_param_persistence_threshold,
            keep_total=zero.stage3_model_persistence_threshold,
            node_ranks=zero.zero_hpz_partition_size,
            quantized_weights=zero.zero_quantized_weights,
            quantized_gradients=zero.zero_quantized_gradients,
            wrap=partial(is_leaf, zero.leaf_module),
        ),
        sub_group_numel=zero.sub_group_size,
        tier=_tier(zero, config.aio),
        param_tier=_param_tier(zero, config.aio),
        shared_memory=config.shared_memory,
        check_timeout_s=config.debug.timeout_s if config.debug.check_collectives else None,
        allow_untested=config.zero_allow_untested_optimizer,
    )


def shard_ranks_of(config: Config, data_ranks: int) -> int | None:
    """Return how many consecutive ranks share one copy of the state (`mics_shard_size`); None: all."""
    zero = config.zero_optimization
    return zero.mics_shard_size if zero.mics_shard_size > 0 and zero.stage > 0 and data_ranks > 1 else None


def _tier(zero: ZeroConfig, aio: AioConfig) -> Tier:
    """Return the tier of master weights and optimizer state. At stage 0 (of a plan) it is the device."""
    offload = zero.offload_optimizer
    if offload is None or offload.device == "none" or zero.stage == 0:
        return DeviceTier()
    if offload.device == "cpu" or offload.nvme_path is None:
        return HostTier(offload.pin_memory, offload.ratio, delay_after=offload.delay_update_after)
    made = _blocks(offload, offload.nvme_path, aio)
    part = max(1, min(made.part_numel, offload.max_in_cpu // PARTS_IN_MEMORY))
    return replace(made, state_numel=offload.max_in_cpu, part_numel=part)


def _param_tier(zero: ZeroConfig, aio: AioConfig) -> Tier:
    """Return the tier of parameter shards. Below stage 3 (of a plan) parameters stay on the device."""
    offload = zero.offload_param
    if offload is None or offload.device == "none" or zero.stage < 3:
        return DeviceTier()
    if offload.device == "cpu" or offload.nvme_path is None:
        return HostTier(offload.pin_memory)
    buffers = offload.buffer_count * offload.buffer_size
    made = _blocks(offload, offload.nvme_path, aio)
    return replace(made, buffer_numel=buffers, memory_numel=offload.max_in_cpu)


def _blocks(offload: OffloadParamConfig | OffloadOptimizerConfig, path: str, aio: AioConfig) -> BlockTier:
    made = BlockTier(offload.pin_memory, path=path, block_bytes=aio.block_size)
    return made if aio.intra_op_parallelism is None else replace(made, threads=aio.intra_op_parallelism)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else NAMES[name]


def is_leaf(leaf: LeafModuleConfig, name: str, module: nn.Module) -> bool:
    """Return whether the configuration gathers this module as a whole: by class, name or end of the name."""
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__]
    classes = {*kinds, *(kind.rpartition(".")[2] for kind in kinds)}
    by_class = not classes.isdisjoint(leaf.classes)
    return by_class or name in leaf.names or name.endswith(tuple(leaf.name_suffixes))


def _checks_overflow(config: Config) -> bool:
    """Return whether a step checks for overflow; in fp32 only with clipping, which has the norm anyway."""
    if config.bf16.enabled:
        return config.bf16.check_grad_overflow
    return scales(config) or config.gradient_clipping > 0


def scales(config: Config) -> bool:
    """Return whether backward runs in fp16, so that small gradients need a loss scale."""
    autocast = config.torch_autocast
    return config.fp16.enabled or (autocast.enabled and autocast.dtype == "fp16")


def accumulation_of(config: Config) -> Accumulation:
    """Return the gradient accumulation of a configuration."""
    divides = config.plain_backward_divides
    return Accumulation(
        config.gradient_accumulation_steps,
        config.managed_gradient_accumulation,
        plain_divisor=None if divides else 1.0,
        is_decided=divides is not None,
    )


def scaler_of(config: Config) -> StaticScale:
    """Return the loss scaler of a configuration."""
    fp16 = config.fp16
    if not scales(config):
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


def facts_of_config(config: Config) -> dict[str, Any]:
    """Return the keys and values that must be equal on all ranks."""
    keys = (entry for entry in entries(config) if entry.remark is None and entry.key not in MAY_DIFFER)
    return {
        **{entry.key: entry.value for entry in keys},
        "debug.record": "no path" if config.debug.record is None else "a path",  # either on all ranks
    }
