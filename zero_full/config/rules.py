"""Rules between several keys of a configuration: conflicting values, and values without effect.

All rules about more than one key are in this module. Its functions use a subset of Python that
`site/hooks/rules_in_js.py` translates, so the website's configuration checker runs the same rules. Other
syntax (an unknown call, a comprehension) stops the build of the site.
"""

from collections.abc import Iterator
from typing import NamedTuple

from zero_full.config.schema import Config

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
BF16_MASTERS = "bf16.bf16_master_weights_and_grads"
STAGE = "zero_optimization.stage"
STATE = "zero_optimization.offload_optimizer"
PARAMETERS = "zero_optimization.offload_param"


class Rule(NamedTuple):
    """A violated rule, with its key. The caller drops rules that `read` an invalid value."""

    key: str
    why: str
    remedy: str  # empty: a warning that the key has no effect
    read: tuple[str, ...] = ()  # other keys that the rule depends on


def conflicts(config: Config, world_size: int) -> Iterator[Rule]:
    """Yield conflicts between values that are valid individually."""
    yield from precision_conflicts(config)
    zero, stage = config.zero_optimization, config.zero_optimization.stage
    mics, hpz = zero.mics_shard_size, zero.zero_hpz_partition_size
    if mics == 0 or (mics > 0 and world_size % mics != 0):
        yield Rule(
            "zero_optimization.mics_shard_size",
            f"{mics} does not divide the world size {world_size}",
            "set it to a divisor, or to -1 to shard over all ranks",
        )
    sharing = mics if mics > 0 else world_size
    if stage == 3 and sharing % hpz != 0:
        yield Rule(
            "zero_optimization.zero_hpz_partition_size",
            f"{hpz} does not divide the {sharing} ranks of a shard group",
            "set it to the number of ranks on a node, or to 1 for no secondary shards",
            (STAGE, "zero_optimization.mics_shard_size"),
        )
    yield from offload_conflicts(config)
    yield from delay_conflicts(config)
    yield from argument_conflicts(config)
    yield from batch_conflicts(config, world_size)


def precision_conflicts(config: Config) -> Iterator[Rule]:
    """Yield conflicts of fp16 and bf16."""
    fp16, bf16 = config.fp16, config.bf16
    if fp16.enabled and bf16.enabled:
        yield Rule(
            "fp16.enabled", "bf16.enabled is true as well", "enable only one of them", ("bf16.enabled",)
        )
    if bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        yield Rule(
            "bf16.bf16_optimizer_states", f"requires {BF16_MASTERS}", "set that to true", (BF16_MASTERS,)
        )
    if bf16.stochastic_rounding and not bf16.bf16_master_weights_and_grads:
        yield Rule(
            "bf16.stochastic_rounding",
            f"requires {BF16_MASTERS}: fp32 master weights lose no small updates",
            "set that to true, or remove this key",
            (BF16_MASTERS,),
        )
    is_muon = config.optimizer is not None and config.optimizer.type.lower() == "muon"
    if bf16.bf16_optimizer_states and is_muon:
        yield Rule("bf16.bf16_optimizer_states", "Muon keeps its momentum in fp32", "remove it")
    first, least = 2**fp16.initial_scale_power, fp16.min_loss_scale
    if fp16.enabled and fp16.loss_scale == 0 and least > first:
        yield Rule(
            "fp16.min_loss_scale",
            f"{least} is above the initial loss scale {first}, which is 2 to the power of "
            f"fp16.initial_scale_power {fp16.initial_scale_power}",
            "change one of them",
            ("fp16.loss_scale", "fp16.initial_scale_power"),
        )


def offload_conflicts(config: Config) -> Iterator[Rule]:
    """Yield conflicts of offloading."""
    stage = config.zero_optimization.stage
    state, parameters = config.zero_optimization.offload_optimizer, config.zero_optimization.offload_param
    for key, section in ((STATE, state), (PARAMETERS, parameters)):
        if section is not None and section.device == "nvme" and not section.nvme_path:
            yield Rule(
                f"{key}.nvme_path",
                'required by the device "nvme"',
                'set it to a directory on a fast local disk, or use the device "cpu"',
            )
    if state is not None and state.device == "nvme" and state.ratio != 1:
        yield Rule(
            f"{STATE}.ratio",
            "NVMe offload always takes the whole optimizer state",
            'use 1, or the device "cpu"',
        )
    if state is not None and state.device != "none" and stage == 0:
        yield Rule(
            f"{STATE}.device",
            "stage 0 keeps the optimizer state on the device",
            "use stage 1, 2 or 3, or no offloading",
            (STAGE,),
        )
    if parameters is not None and parameters.device != "none" and stage < 3:
        yield Rule(
            f"{PARAMETERS}.device",
            f"stage {stage} keeps unsharded parameters on the device",
            'use stage 3, or the device "none"',
            (STAGE,),
        )


def delay_conflicts(config: Config) -> Iterator[Rule]:
    """Yield conflicts of delayed updates."""
    state, parameters = config.zero_optimization.offload_optimizer, config.zero_optimization.offload_param
    if state is not None and state.delay_update_after is not None:
        key, device = f"{STATE}.delay_update_after", f"{STATE}.device"
        instead = 'use the device "cpu", or remove it'
        if state.device == "none":
            yield Rule(key, "without offload there is no update to delay", instead, (device,))
        if state.device == "nvme":
            yield Rule(key, "NVMe offload keeps most state in memory only during a step", instead, (device,))
        if parameters is not None and parameters.device != "none":
            yield Rule(key, "offload_param updates parameters within the step", "remove one of them")
        if state.ratio != 1:
            yield Rule(
                key,
                "the state that a ratio below 1 leaves on the device would be updated earlier than the rest",
                "use ratio 1",
            )


def argument_conflicts(config: Config) -> Iterator[Rule]:
    """Yield optimizer arguments that the engine handles itself."""
    if config.optimizer is not None and "max_grad_norm" in config.optimizer.params:
        yield Rule(
            "optimizer.params.max_grad_norm",
            "the engine clips the gradients",
            "set gradient_clipping instead",
        )


def batch_conflicts(config: Config, world_size: int) -> Iterator[Rule]:
    """Yield conflicts of the three batch sizes: contradictions, and a third one that is no whole number."""
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    steps = config.gradient_accumulation_steps
    product = micro * steps * world_size
    known, name = (micro, MICRO) if micro else (steps or 1, STEPS)
    unit = known * world_size
    below = train // unit * unit
    if train and micro and steps and train != product:
        yield Rule(
            TRAIN,
            f"{train} is not {MICRO} {micro} * {STEPS} {steps} * world size {world_size} = {product}",
            "change or remove one of them",
            (MICRO, STEPS),
        )
    elif train and not (micro and steps) and train % unit != 0:
        yield Rule(
            TRAIN,
            f"{train} is not a multiple of {name} {known} * world size {world_size} = {unit} "
            f"({TRAIN} = {MICRO} * {STEPS} * world size)",
            f"the nearest multiples are {below} and {below + unit}" if below else f"the smallest is {unit}",
            (MICRO, STEPS),
        )


def ineffective_keys(config: Config) -> Iterator[Rule]:
    """Yield keys without effect because of another one. The caller drops keys with default values."""
    if config.prescale_gradients:
        why = "prescale_gradients divides by the world size before the reduction"
        yield Rule("gradient_predivide_factor", why, "")
    state, parameters = config.zero_optimization.offload_optimizer, config.zero_optimization.offload_param
    if state is not None and state.device == "none":
        why = 'the device is "none": nothing is offloaded'
        yield Rule(f"{STATE}.ratio", why, "", (f"{STATE}.device",))
    if not (state is not None and state.device == "nvme") and not (
        parameters is not None and parameters.device == "nvme"
    ):
        for key in ("block_size", "intra_op_parallelism"):
            why = 'nothing is offloaded to the device "nvme"'
            yield Rule(f"aio.{key}", why, "", (f"{STATE}.device", f"{PARAMETERS}.device"))
    if state is not None and state.device != "nvme":
        why = f'the device is "{state.device}"'
        for key in ("nvme_path", "max_in_cpu"):
            yield Rule(f"{STATE}.{key}", why, "", (f"{STATE}.device",))
    if parameters is not None and parameters.device != "nvme":
        for key in ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"):
            why = f'the device is "{parameters.device}"'
            yield Rule(f"{PARAMETERS}.{key}", why, "", (f"{PARAMETERS}.device",))
    if config.zero_optimization.stage == 0 and config.zero_optimization.mics_shard_size > 0:
        yield Rule("zero_optimization.mics_shard_size", "nothing is sharded at stage 0", "", (STAGE,))


def assumed_defaults(config: Config) -> Iterator[Rule]:
    """Yield a remark for each key whose default DeepSpeed has changed. Callers skip keys that are set."""
    yield Rule(
        "gradient_clipping",
        f"by default gradients are clipped to a norm of {config.gradient_clipping}, as in DeepSpeed since "
        "0.19.3; earlier versions did not clip",
        "set the norm, or 0 for no clipping",
    )


def unread_keys(config: Config) -> Iterator[Rule]:
    """Yield keys that are not read because of another one, as users expect, so without a warning."""
    fp16, autocast, enabled = config.fp16, config.torch_autocast, ("fp16.enabled", "torch_autocast.enabled")
    scales = fp16.enabled or (autocast.enabled and autocast.dtype == "fp16")
    if not scales:
        for key in ("loss_scale", "min_loss_scale"):
            yield Rule(f"fp16.{key}", "only fp16 has a loss scale", "", enabled)
    for key in ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis"):
        if not scales:
            yield Rule(f"fp16.{key}", "only fp16 has a loss scale", "", enabled)
        elif fp16.loss_scale > 0:
            yield Rule(f"fp16.{key}", "fp16.loss_scale is static", "", ("fp16.loss_scale",))
    if scales and fp16.loss_scale > 0:
        yield Rule("fp16.min_loss_scale", "fp16.loss_scale is static", "", ("fp16.loss_scale",))
    if not config.bf16.enabled:
        yield Rule("bf16.check_grad_overflow", "bf16.enabled is false", "", ("bf16.enabled",))
    if not config.bf16.stochastic_rounding:
        rounding = "bf16.stochastic_rounding"
        yield Rule("bf16.stochastic_rounding_seed", f"{rounding} is false", "", (rounding,))
    if not autocast.enabled:
        yield Rule("torch_autocast.dtype", "torch_autocast.enabled is false", "", ("torch_autocast.enabled",))
    for section, is_on in (
        ("jsonl_monitor", config.jsonl_monitor.enabled),
        ("csv_monitor", config.csv_monitor.enabled),
        ("tensorboard", config.tensorboard.enabled),
    ):
        for key in ("output_path", "job_name"):
            if not is_on:
                yield Rule(f"{section}.{key}", f"{section}.enabled is false", "", (f"{section}.enabled",))
    for key in ("group", "team", "project"):
        if not config.wandb.enabled:
            yield Rule(f"wandb.{key}", "wandb.enabled is false", "", ("wandb.enabled",))
    if not config.hybrid_engine.enabled:
        for key in ("release_inference_cache", "pin_parameters"):
            why = "hybrid_engine.enabled is false"
            yield Rule(f"hybrid_engine.{key}", why, "", ("hybrid_engine.enabled",))
    if not config.debug.check_collectives:
        collectives = "debug.check_collectives"
        yield Rule("debug.timeout_s", f"{collectives} is false", "", (collectives,))
    state, parameters = config.zero_optimization.offload_optimizer, config.zero_optimization.offload_param
    for section, offload in ((STATE, state), (PARAMETERS, parameters)):
        if offload is not None and offload.device == "none":
            yield Rule(f"{section}.pin_memory", 'the device is "none"', "", (f"{section}.device",))
