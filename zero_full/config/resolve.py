"""From what the user gave to a checked configuration in which every value is filled in.

All mistakes are collected and reported together, so that a file is not mended one error a run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from . import report
from .read import read, refuse_nests, repeated
from .report import Origin
from .schema import Config, ConfigError, OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig

TRAIN, MICRO, STEPS = BATCH = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
OFFLOAD, OLD_OFFLOAD, OLD_PIN = "offload_optimizer", "cpu_offload", "cpu_offload_use_pin_memory"
DEVICE = f"zero_optimization.{OFFLOAD}.device"
ONLY_NVME = {  # read only where the device of the section is "nvme"
    "offload_optimizer": ("nvme_path",),
    "offload_param": ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
}
ABSENT = object()  # null is a value that a user can give


@dataclass(frozen=True)
class Resolved:
    """A configuration that can be run, where each value came from, and what the user should know.

    `origins` has a dotted key for every value: "zero_optimization.stage", "optimizer.params.lr".
    """

    config: Config
    origins: dict[str, Origin]
    warnings: tuple[str, ...]

    def table(self, extra_rows: Sequence[tuple[str, str, str]] = ()) -> str:
        """Every value that matters with its origin, for a log; `extra_rows` are (key, value, origin)."""
        return report.table(self.config, self.origins, extra_rows)

    def assumed(self) -> Iterator[str]:
        """A line for each default in which versions of DeepSpeed differ, where the user has not chosen."""
        if self.origins["gradient_clipping"] == "default":
            yield (
                "gradient_clipping is not in the configuration: gradients are clipped to a norm of "
                f"{self.config.gradient_clipping}, as by DeepSpeed since 0.19.3, which did not clip before; "
                "write the number that you mean, or 0 for no clipping"
            )


def _given(config: object) -> tuple[Mapping[str, Any], str]:
    """What the user gave, as a mapping, and its name for messages."""
    name = "the configuration"
    if isinstance(config, Config):
        return config.model_dump(exclude_unset=True), name
    if isinstance(config, str | Path):
        name = str(config)
        config = read(Path(config))
    if not isinstance(config, Mapping):
        raise ConfigError(
            f'{name} must be an object of keys and values such as {{"train_batch_size": 8}}, '
            f"a path to a JSON file of one or a Config; got {report.shown(config)}"
        )
    return config, name


def _copied(given: Mapping[Any, Any]) -> dict[Any, Any]:
    """A copy of the levels that are edited here, so that what the user owns stays as it is."""
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in given.items()}


def _renamed(raw: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Move values from DeepSpeed's second names to the first, in place; return the moves and the clashes."""
    zero = raw.get("zero_optimization")
    moves = [(raw, "bfloat16", "bf16", "")]
    if isinstance(zero, dict):
        fields = ZeroConfig.model_fields
        short = [key for key in zero if key not in fields and f"stage3_{key}" in fields]
        moves += [(zero, key, f"stage3_{key}", "zero_optimization.") for key in short]
    spelled, problems = {}, []
    for level, old, new, prefix in moves:
        if old not in level:
            continue
        value = level.pop(old)
        if new in level:
            problems.append(f"{prefix}{old}: the same key as {prefix}{new}, and both are given; keep one")
            continue
        level[new] = value
        spelled[prefix + new] = prefix + old
    if isinstance(zero, dict) and isinstance(asked := zero.get(OLD_OFFLOAD), int) and asked == 1:
        problems += _offload_as_it_was(zero)
        spelled[DEVICE] = f"zero_optimization.{OLD_OFFLOAD}"
    return spelled, problems


def _offload_as_it_was(zero: dict[str, Any]) -> list[str]:
    """In place: a true cpu_offload becomes the section that has come after it."""
    if zero.get(OFFLOAD) is not None:
        return [f"zero_optimization.{OLD_OFFLOAD}: deprecated, and {OFFLOAD} is given as well; remove it"]
    del zero[OLD_OFFLOAD]
    pins = {"pin_memory": zero.pop(OLD_PIN)} if zero.get(OLD_PIN) is not None else {}
    zero[OFFLOAD] = {"device": "cpu", **pins}
    return []


def _without(raw: dict[Any, Any], path: Sequence[int | str]) -> None:
    """Take the value at fault out, so that the rest can still be checked."""
    holder, last, level = raw, path[0], raw
    for name in path:
        if not isinstance(level, dict) or name not in level:
            break
        holder, last, level = level, name, level[name]
    holder.pop(last, None)


def _validated(raw: dict[str, Any], spelled: Mapping[str, str]) -> tuple[Config, list[str], set[str]]:
    """The configuration without its bad values, one line for each of those, and their keys."""
    faults: list[ErrorDetails] = []
    config = Config()
    for _ in range(3):  # taking out a bad value can leave a hole that the next pass stumbles over
        try:
            config = Config.model_validate(raw)
            break
        except ValidationError as error:
            faults = faults or error.errors()
            for fault in error.errors():
                _without(raw, fault["loc"])
    bad = {report.dotted(fault["loc"]) for fault in faults}
    return config, [report.explain(fault, spelled) for fault in faults], bad


def _solved(config: Config, world_size: int) -> dict[str, int]:
    """The three batch sizes from one or two of them, or the same three if they fit together."""
    train, micro, steps = (getattr(config, name) for name in BATCH)
    rule = f"{TRAIN} = {MICRO} * {STEPS} * world size"
    if not train and not micro:
        return dict(zip(BATCH, (0, 0, steps or 1), strict=True))  # nobody needs them but the data loader
    if not train:
        steps = steps or 1
        train = micro * steps * world_size
    elif not (micro and steps):
        known, name = (micro, MICRO) if micro else (steps or 1, STEPS)
        unit = known * world_size
        if train % unit:
            raise ConfigError(
                f"{TRAIN} {train} cannot be divided by {name} {known} * world size {world_size} = {unit} "
                f"({rule}); {_neighbours(train, unit)}"
            )
        micro, steps = (micro, train // unit) if micro else (train // unit, known)
    if train != micro * steps * world_size:
        raise ConfigError(
            f"{TRAIN} {train} is not {MICRO} {micro} * {STEPS} {steps} * world size {world_size} "
            f"= {micro * steps * world_size}; change one of them or leave one out"
        )
    return dict(zip(BATCH, (train, micro, steps), strict=True))


def _neighbours(train: int, unit: int) -> str:
    below = train // unit * unit
    if not below:
        return f"the smallest that can is {unit}"
    return f"the nearest that can are {below} and {below + unit}"


def _clashes(config: Config, world_size: int, spelled: Mapping[str, str]) -> Iterator[str]:
    """A line for each value that is fine by itself and cannot be had beside another one."""
    if config.fp16.enabled and config.bf16.enabled:
        yield "fp16.enabled and bf16.enabled: only one of them can be true"
    if config.bf16.bf16_optimizer_states and not config.bf16.bf16_master_weights_and_grads:
        yield "bf16.bf16_optimizer_states: needs bf16.bf16_master_weights_and_grads true as well"
    if config.bf16.stochastic_rounding and not config.bf16.bf16_master_weights_and_grads:
        yield (
            "bf16.stochastic_rounding: needs bf16.bf16_master_weights_and_grads true as well: masters in "
            "fp32 lose no small updates"
        )
    is_muon = config.optimizer is not None and config.optimizer.type.lower() == "muon"
    if config.bf16.bf16_optimizer_states and is_muon:
        yield "bf16.bf16_optimizer_states: Muon keeps what it remembers in fp32; remove it"
    first, least = 2**config.fp16.initial_scale_power, config.fp16.min_loss_scale
    if config.fp16.enabled and config.fp16.loss_scale == 0 and least > first:
        yield (
            f"fp16.min_loss_scale: {least} is above the first scale, {first}, which is 2 to the power of "
            f"fp16.initial_scale_power {config.fp16.initial_scale_power}; change one of them"
        )
    mics = config.zero_optimization.mics_shard_size
    if mics == 0 or (mics > 0 and world_size % mics):
        yield (
            f"zero_optimization.mics_shard_size: {mics} does not divide the world size {world_size}; "
            "give a divisor of it, or -1 to shard over all ranks"
        )
    hpz, stage = config.zero_optimization.zero_hpz_partition_size, config.zero_optimization.stage
    sharing = mics if mics > 0 else world_size
    if stage == 3 and (hpz < 1 or sharing % hpz):
        yield (
            f"zero_optimization.zero_hpz_partition_size: {hpz} does not divide the {sharing} ranks that "
            "share the parameters; give the number of ranks on a node, or 1 for no second partition"
        )
    yield from _offload_clashes(config.zero_optimization, spelled)
    for section, part in (("optimizer", config.optimizer), ("scheduler", config.scheduler)):
        for name, value in part.params.items() if part else ():
            if report.is_auto(value):
                yield report.unfilled(f"{section}.params.{name}", "a number")
    if config.optimizer and "max_grad_norm" in config.optimizer.params:
        yield "optimizer.params.max_grad_norm: the engine clips; give the number as gradient_clipping instead"


def _offload_clashes(zero: ZeroConfig, spelled: Mapping[str, str]) -> Iterator[str]:
    state, parameters = zero.offload_optimizer, zero.offload_param
    sections = (("offload_optimizer", state, "state is"), ("offload_param", parameters, "parameters are"))
    for name, section, what in sections:
        if section is not None and section.device == "nvme" and not section.nvme_path:
            yield (
                f"zero_optimization.{name}.nvme_path: give the directory of a fast disk in which {what} to "
                'wait, or use the device "cpu"'
            )
    if state is not None and state.super_offload and state.device == "nvme":
        yield (
            "zero_optimization.offload_optimizer.super_offload: steps beside backward need state in memory "
            'twice; use the device "cpu", or leave it out'
        )
    if state is not None and state.device == "nvme" and state.ratio != 1:
        yield (
            "zero_optimization.offload_optimizer.ratio: in a file waits all of the optimizer's state; use 1, "
            'or the device "cpu"'
        )
    if state is not None and state.device != "none" and zero.stage == 0:
        yield (
            f"{report.as_written(DEVICE, spelled)}: stage 0 keeps the optimizer's state beside the "
            "parameters; use stage 1, 2 or 3, or no offloading"
        )
    if parameters is not None and parameters.device != "none" and zero.stage < 3:
        yield (
            f"zero_optimization.offload_param.device: stage {zero.stage} keeps whole parameters on the "
            'device; use stage 3, or the device "none"'
        )
    if state is not None and state.delay_update_after is not None:
        yield from _delays(state, parameters)


def _delays(offload: OffloadOptimizerConfig, parameters: OffloadParamConfig | None) -> Iterator[str]:
    key = "zero_optimization.offload_optimizer.delay_update_after"
    if offload.device == "none":
        yield f'{key}: without offloading there is nothing to delay; use the device "cpu", or leave it out'
    if offload.device == "nvme":
        yield f'{key}: state in a file is in memory for a step only; use the device "cpu", or leave it out'
    if offload.super_offload:
        yield f"{key}: super_offload steps beside backward, this one after it; leave one of them out"
    if parameters is not None and parameters.device != "none":
        yield f"{key}: offload_param brings parameters up to date within a step; leave one of them out"
    if offload.ratio != 1:
        yield (
            f"{key}: the part of the state that a ratio leaves on the device would be updated at another "
            "time than the rest; use ratio 1"
        )


def _switches(config: Config) -> Iterator[str]:
    """A line for each switch of a section that is neither true nor false."""
    for entry in report.entries(config):
        if entry.remark and entry.remark.switch:
            value = entry.value.get(entry.remark.switch, False)
            if not isinstance(value, int):
                kind = "a whole number" if entry.remark.when else "true or false"
                yield f"{entry.key}.{entry.remark.switch}: got {report.shown(value)}, expected {kind}"


def _idle_together(config: Config) -> Iterator[str]:
    """A line for each key that has no effect because of another one."""
    if config.prescale_gradients and config.gradient_predivide_factor != 1.0:
        yield (
            f"gradient_predivide_factor = {config.gradient_predivide_factor} has no effect: "
            "prescale_gradients divides by the world size before the reduction"
        )
    zero = config.zero_optimization
    offload = zero.offload_optimizer
    if offload is not None and offload.device == "none":
        asked = {"ratio": offload.ratio} if offload.ratio != 1 else {}
        asked |= {"super_offload": True} if offload.super_offload else {}
        for key, value in asked.items():
            yield (
                f"zero_optimization.offload_optimizer.{key} = {report.shown(value)} has no effect: "
                'the device is "none", and nothing is offloaded'
            )
    if "nvme" not in [getattr(s, "device", "") for s in (zero.offload_optimizer, zero.offload_param)]:
        for key in ("block_size", "intra_op_parallelism"):
            value = getattr(config.aio, key)
            if value != type(config.aio).model_fields[key].default:
                yield f'aio.{key} = {value} has no effect: nothing waits in a file (device "nvme")'
    for section, keys in ONLY_NVME.items():
        offload = getattr(zero, section)
        for key in keys if offload is not None and offload.device != "nvme" else ():
            value = getattr(offload, key)
            if value != type(offload).model_fields[key].default:
                yield (
                    f"zero_optimization.{section}.{key} = {report.shown(value)} has no effect: the device is "
                    f'"{offload.device}"'
                )
    if zero.stage == 0 and zero.mics_shard_size > 0:
        yield (
            f"zero_optimization.mics_shard_size = {zero.mics_shard_size} has no effect: "
            "nothing is sharded at stage 0"
        )


def _remarks(config: Config, spelled: Mapping[str, str], refuses: bool) -> Iterator[str]:
    """One line for each value that the schema has a remark about."""
    verdict = "is not supported" if refuses else "has no effect"
    for entry in report.entries(config):
        remark = entry.remark
        if remark is None or remark.refuses != refuses or not remark.applies(entry.value, entry.default):
            continue
        if config.zero_optimization.stage >= remark.below_stage:
            continue
        key, value = report.as_written(entry.key, spelled), entry.value
        if remark.switch:
            key, value = f"{key}.{remark.switch}", value[remark.switch]
        yield f"{key} = {report.shown(value)} {verdict}: {remark.text}"


def _filled(config: Config, batch: Mapping[str, int]) -> tuple[Config, set[str]]:
    """The configuration with what follows from the rest, and the keys that were not the user's choice."""
    derived = {name for name in batch if name not in config.model_fields_set}
    zero = config.zero_optimization
    if zero.overlap_comm is None:
        derived.add("zero_optimization.overlap_comm")
        zero = zero.model_copy(update={"overlap_comm": zero.stage == 3})
    return config.model_copy(update={**batch, "zero_optimization": zero}), derived


def _origins(config: Config, raw: Mapping[str, Any], derived: set[str]) -> dict[str, Origin]:
    origins: dict[str, Origin] = {}
    for entry in report.entries(config):
        level: Any = raw
        for name in entry.key.split("."):
            level = level.get(name, ABSENT) if isinstance(level, Mapping) else ABSENT
        chosen: Origin = "default" if level is ABSENT else "user"
        origins[entry.key] = "derived" if entry.key in derived else chosen
        if isinstance(entry.value, dict):
            origins.update({f"{entry.key}.{name}": chosen for name in entry.value})
    return origins


def resolve(config: dict[str, Any] | str | Path | Config, world_size: int) -> Resolved:
    """Check a configuration for this many data-parallel ranks and fill in every value.

    Takes a dict, the path of a JSON file or a Config. Raises ConfigError with all that is wrong.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ConfigError(
            f"world_size: got {report.shown(world_size)}, expected a whole number of at least 1"
        )
    given, name = _given(config)
    refuse_nests(given)
    problems = list(repeated(given))
    raw = _copied(given)
    for key in BATCH:
        if raw.get(key, 0) is None:  # null is how a launcher leaves one out
            del raw[key]
    spelled, clashing = _renamed(raw)
    checked, faults, bad = _validated(raw, spelled)
    problems += [
        *clashing,
        *faults,
        *_switches(checked),
        *_remarks(checked, spelled, refuses=True),
        *_clashes(checked, world_size, spelled),
    ]
    batch: dict[str, int] = {}
    if not bad & set(BATCH):
        try:
            batch = _solved(checked, world_size)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n  ".join([f"{name} cannot be used:", *problems]))
    filled, derived = _filled(checked, batch)
    warnings = (*_remarks(filled, spelled, refuses=False), *_idle_together(filled))
    return Resolved(filled, _origins(filled, raw, derived), warnings)
