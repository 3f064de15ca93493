"""Validate the user's configuration and fill in all values.

All mistakes are collected and reported in one error.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from zero_full.config import messages
from zero_full.config.auto import is_auto
from zero_full.config.json_parser import Parsed, Position, Route, check_nesting, read
from zero_full.config.messages import Notice, Origin
from zero_full.config.rules import (
    MICRO,
    STAGE,
    STEPS,
    TRAIN,
    Rule,
    assumed_defaults,
    conflicts,
    ineffective_keys,
)
from zero_full.config.schema import Config, ZeroConfig
from zero_full.errors import ConfigError

BATCH = (TRAIN, MICRO, STEPS)
ZERO, OFFLOAD = "zero_optimization", "offload_optimizer"
OLD_OFFLOAD, OLD_PIN = "cpu_offload", "cpu_offload_use_pin_memory"
# Elements of a gradient bucket on CPUs. With DeepSpeed's default of 5e8 most models are one bucket.
OVERLAPPED_BUCKET = 2**20  # where messages overlap with backward
# At stages 2 and 3, where every backward pass frees its buffers: 16 MB in fp32. glibc returns blocks of over
# 32 MiB to the system, and free memory of over 64 MiB, and then the next pass takes new pages.
FREED_BUCKET = 4_000_000

# How ranks reach each other. The last three are of CPU ranks, which send messages over the last two.
Transport = Literal["accelerator", "shared memory", "loopback", "network"]


@dataclass(frozen=True)
class Resolved:
    """A complete, valid configuration, with the origin of each value and the warnings.

    `origins` has a dotted key for every value: "zero_optimization.stage", "optimizer.params.lr". `assumed`
    has a line for each unset key whose default differs between versions of DeepSpeed.
    """

    config: Config
    origins: dict[str, Origin]
    warnings: tuple[str, ...]
    assumed: tuple[str, ...]
    transport: Transport

    def table(self, extra_rows: Sequence[tuple[str, str, str]] = ()) -> str:
        """Return the relevant values with their origins as text. `extra_rows` are (key, value, origin)."""
        return messages.table(self.config, self.origins, extra_rows)


@dataclass(frozen=True)
class Examined:
    """The user's configuration after its checks. In `config`, defaults replace invalid values."""

    config: Config
    spelled: Mapping[Route, Route]  # a key's canonical name -> the alias that the user wrote
    bad: frozenset[str]  # dotted keys with invalid values
    notices: tuple[Notice, ...]


def _is_known(key: str, bad: Iterable[str]) -> bool:
    """Return whether this key and the sections around it have valid values."""
    return not any(key == each or key.startswith(f"{each}.") for each in bad)


def known_rules(rules: Iterable[Rule], bad: Iterable[str]) -> Iterator[Rule]:
    """Filter out rules that depend on an invalid value."""
    return (rule for rule in rules if all(_is_known(key, bad) for key in (rule.key, *rule.read)))


def _as_mapping(config: object) -> tuple[Mapping[str, Any], str, Parsed | None]:
    """Return the user's configuration as a mapping, its name for messages, and its parse if it is a file."""
    name, parsed = "the configuration", None
    if isinstance(config, Config):
        config = config.model_dump(exclude_unset=True)
    if isinstance(config, str | Path):
        name, parsed = str(config), read(Path(config))
        config = parsed.value
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"{name} must be an object of keys and values, a path to a JSON file with one, or a Config; got "
            f"{messages.shown(config)}"
        )
    return config, name, parsed


def _copy_of(given: Mapping[Any, Any]) -> dict[Any, Any]:
    """Copy the nested mappings, as they are edited later and belong to the user."""
    return {key: _copy_of(value) if isinstance(value, Mapping) else value for key, value in given.items()}


def _rename_aliases(raw: dict[str, Any]) -> tuple[dict[Route, Route], list[Notice]]:
    """Rename DeepSpeed's aliases to canonical keys, in place. Returns the renamings and the conflicts."""
    zero = raw.get(ZERO)
    moves: list[tuple[dict[str, Any], str, str, Route]] = [(raw, "bfloat16", "bf16", ())]
    if isinstance(zero, dict):
        fields = ZeroConfig.model_fields
        short = [key for key in zero if key not in fields and f"stage3_{key}" in fields]
        moves += [(zero, key, f"stage3_{key}", (ZERO,)) for key in short]
    spelled: dict[Route, Route] = {}
    notices = []
    for level, old, new, above in moves:
        if old not in level:
            continue
        value = level.pop(old)
        if new in level:
            why = f"an alias of {messages.dotted((*above, new))}, which is set as well"
            notices.append(Notice((*above, old), "refused", why, "remove one of them"))
            continue
        level[new] = value
        spelled |= {(*above, new): (*above, old)}
    if isinstance(zero, dict) and isinstance(asked := zero.get(OLD_OFFLOAD), int) and asked == 1:
        notices += _convert_cpu_offload(zero, spelled)
    return spelled, notices


def _convert_cpu_offload(zero: dict[str, Any], spelled: dict[Route, Route]) -> list[Notice]:
    """Replace a true cpu_offload by an offload_optimizer section, in place."""
    if zero.get(OFFLOAD) is not None:
        why = f"deprecated, and {OFFLOAD} is set as well"
        return [Notice((ZERO, OLD_OFFLOAD), "refused", why, "remove it")]
    del zero[OLD_OFFLOAD]
    zero[OFFLOAD] = {"device": "cpu"}
    spelled[(ZERO, OFFLOAD, "device")] = (ZERO, OLD_OFFLOAD)
    if (pin := zero.pop(OLD_PIN, None)) is not None:
        zero[OFFLOAD]["pin_memory"] = pin
        spelled[(ZERO, OFFLOAD, "pin_memory")] = (ZERO, OLD_PIN)
    return []


def _with_original_value(raw: Mapping[str, Any], fault: ErrorDetails) -> ErrorDetails:
    """Return the fault with the original value in place of the converted one (in lower case, for example)."""
    value: Any = raw
    try:
        for name in fault["loc"]:
            value = value[name]
    except (KeyError, TypeError):  # the key is missing or no string
        return fault
    return {**fault, "input": value}


def _remove_invalid(raw: dict[Any, Any], fault: ErrorDetails) -> None:
    """Remove an invalid value, or the section of a missing one, so that the rest can be checked."""
    path = fault["loc"][:-1] if fault["type"] == "missing" else fault["loc"]
    level = raw
    for name in path[:-1]:
        if not isinstance(level.get(name), dict):  # the fault is inside a list
            level.pop(name, None)
            return
        level = level[name]
    level.pop(path[-1], None)


def _validate(
    raw: dict[str, Any], spelled: Mapping[Route, Route]
) -> tuple[Config, list[Notice], frozenset[str]]:
    """Return the configuration without invalid values, the notices about these, and their keys."""
    faults: list[ErrorDetails] = []
    config = Config()
    for _ in range(3):  # removing a value can make another one invalid in the next pass
        try:
            config = Config.model_validate(raw)
            break
        except ValidationError as error:
            faults = faults or [_with_original_value(raw, fault) for fault in error.errors()]
            for fault in error.errors():
                _remove_invalid(raw, fault)
    bad = frozenset(messages.dotted(fault["loc"]) for fault in faults)
    return config, [messages.explain(fault, spelled) for fault in faults], bad


def _batch_sizes(config: Config, world_size: int) -> dict[str, int]:
    """Compute the three batch sizes from one or two of them, after `batch_conflicts` has found no errors."""
    train, micro, steps = (getattr(config, name) for name in BATCH)
    if train and micro:
        steps = steps or train // (micro * world_size)
    elif train:
        steps = steps or 1
        micro = train // (steps * world_size)
    else:
        steps = steps or 1
        train = micro * steps * world_size  # 0 if unknown: only the data loader needs them
    return dict(zip(BATCH, (train, micro, steps), strict=True))


def _switches(config: Config) -> Iterator[Notice]:
    """Yield a notice for each switch of a section with a value of the wrong type."""
    for entry in messages.entries(config):
        for route, value in entry.remark.switched(entry.value) if entry.remark else ():
            if not isinstance(value, int):
                kind = "a whole number" if entry.remark and entry.remark.when else "true or false"
                path = (*entry.key.split("."), *route)
                yield Notice(path, "refused", f"got {messages.shown(value)}, expected {kind}")


def _remarks(config: Config, spelled: Mapping[Route, Route], bad: frozenset[str]) -> Iterator[Notice]:
    """Yield a notice for each value that causes a remark of the schema."""
    stage = config.zero_optimization.stage
    for entry in messages.entries(config):
        remark = entry.remark
        if remark is None:
            continue
        if remark.below_stage < 99 and (stage >= remark.below_stage or not _is_known(STAGE, bad)):
            continue
        path = messages.as_written(tuple(entry.key.split(".")), spelled)
        kind: messages.Kind = "refused" if remark.refuses else "no effect"
        for route, value in remark.asking(entry.value, entry.default):
            yield Notice((*path, *route), kind, remark.text, remark.remedy, messages.shown(value))


def _violations(
    config: Config, rules: Iterable[Rule], spelled: Mapping[Route, Route], bad: frozenset[str]
) -> Iterator[Notice]:
    """Yield a notice for each rule between several keys, if all of their values are valid."""
    entries = {entry.key: entry for entry in messages.entries(config)}
    for rule in known_rules(rules, bad):
        path = messages.as_written(tuple(rule.key.split(".")), spelled)
        if rule.remedy:
            yield Notice(path, "refused", rule.why, rule.remedy)
        elif entries[rule.key].value != entries[rule.key].default:
            yield Notice(path, "no effect", rule.why, value=messages.shown(entries[rule.key].value))


def _assumptions(config: Config, bad: frozenset[str]) -> Iterator[Notice]:
    is_set = {entry.key: entry.is_set for entry in messages.entries(config)}
    for rule in known_rules(assumed_defaults(config), bad):
        if not is_set[rule.key]:
            yield Notice(tuple(rule.key.split(".")), "assumed", rule.why, rule.remedy)


def _unfilled_texts(config: Config) -> Iterator[Notice]:
    """Yield a notice for each "auto" where the schema accepts any text."""
    for section, part in (("optimizer", config.optimizer), ("scheduler", config.scheduler)):
        for name, value in part.params.items() if part else ():
            if is_auto(value):
                expectation = "two numbers" if name == "betas" else "a number"
                yield messages.unfilled((section, "params", name), f"{section}.params.{name}", expectation)
    zero = config.zero_optimization
    for section, offload in ((OFFLOAD, zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if offload is not None and is_auto(offload.nvme_path):
            key = f"{ZERO}.{section}.nvme_path"
            yield messages.unfilled(tuple(key.split(".")), key, "a directory")


def _filled(config: Config, batch: Mapping[str, int], transport: Transport) -> tuple[Config, set[str]]:
    """Return the configuration with derived values, and the keys of these."""
    derived = {name for name in batch if name not in config.model_fields_set}
    zero = config.zero_optimization
    given = {name: getattr(zero, name) for name in zero.model_fields_set if getattr(zero, name) is not None}
    found = {
        name: value
        for name, value in communication_values(zero.stage, transport, given).items()
        if value != getattr(zero, name)
    }
    derived |= {f"{ZERO}.{name}" for name in found}
    zero = zero.model_copy(update=found)
    return config.model_copy(update={**batch, "zero_optimization": zero}), derived


def communication_values(stage: int, transport: Transport, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `overlap_comm` and `reduce_bucket_size`: those of `given`, the others derived.

    CPU ranks of one host pass each other shards by the cores that forward and backward use. So an overlap
    gains nothing, except where messages of stage 3 would be waited for one by one.
    """
    by_default = transport == "network" or (stage == 3 and transport != "shared memory")
    overlaps = given.get("overlap_comm", by_default)
    bucket = ZeroConfig().reduce_bucket_size
    if transport in ("loopback", "network") and overlaps:
        bucket = OVERLAPPED_BUCKET
    elif transport != "accelerator" and stage >= 2:
        bucket = FREED_BUCKET
    return {"overlap_comm": overlaps, "reduce_bucket_size": given.get("reduce_bucket_size", bucket)}


def _origins(config: Config, derived: set[str]) -> dict[str, Origin]:
    origins: dict[str, Origin] = {}
    for entry in messages.entries(config):
        chosen: Origin = "user" if entry.is_set else "default"
        origins[entry.key] = "derived" if entry.key in derived else chosen
        if isinstance(entry.value, dict):
            origins.update({f"{entry.key}.{name}": chosen for name in entry.value})
    return origins


def examine(given: Mapping[str, Any], world_size: int) -> Examined:
    """Check the user's configuration and collect all notices, errors first."""
    raw = _copy_of(given)
    for key in BATCH:
        if raw.get(key, 0) is None:  # launchers write null for a missing batch size
            del raw[key]
    spelled, clashing = _rename_aliases(raw)
    config, faults, bad = _validate(raw, spelled)
    unfilled = list(_unfilled_texts(config))
    bad |= {messages.dotted(notice.path) for notice in unfilled}
    notices = [
        *clashing,
        *faults,
        *_switches(config),
        *_remarks(config, spelled, bad),
        *_violations(config, conflicts(config, world_size), spelled, bad),
        *unfilled,
        *_violations(config, ineffective_keys(config), spelled, bad),
        *_assumptions(config, bad),
    ]
    notices.sort(key=lambda notice: notice.kind not in messages.ERRORS)
    return Examined(config, spelled, bad, tuple(notices))


def check_world_size(world_size: object) -> None:
    """Raise ConfigError unless this number of ranks is valid."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ConfigError(
            f"world_size: got {messages.shown(world_size)}, expected a whole number of at least 1"
        )


def _check_transport(transport: object) -> None:
    if transport not in get_args(Transport):
        raise ConfigError(
            f"transport: got {messages.shown(transport)}, expected one of {', '.join(get_args(Transport))}"
        )


def resolve(
    config: dict[str, Any] | str | Path | Config,
    world_size: int,
    transport: Transport = "accelerator",
) -> Resolved:
    """Validate a configuration for this many data-parallel ranks and fill in every value.

    Takes a dict, the path of a JSON file or a Config. Raises ConfigError with all mistakes.
    `transport` decides values that are not set. With `shared_memory: false`, "shared memory" is "loopback".
    """
    check_world_size(world_size)
    _check_transport(transport)
    given, name, parsed = _as_mapping(config)
    check_nesting(given)
    examined = examine(given, world_size)
    if parsed is None:
        mistakes = [each.line for each in examined.notices if each.kind in messages.ERRORS]
    else:
        placed = [(place, each) for place, each in in_file(parsed, examined) if each.kind in messages.ERRORS]
        mistakes = [f"{place}: {each.line}" for place, each in placed]
    if mistakes:
        raise ConfigError("\n  ".join([f"{name} cannot be used:", *mistakes]))
    if transport == "shared memory" and not examined.config.shared_memory:
        transport = "loopback"
    filled, derived = _filled(examined.config, _batch_sizes(examined.config, world_size), transport)
    warnings, assumptions = (
        tuple(each.line for each in examined.notices if each.kind == kind)
        for kind in ("no effect", "assumed")
    )
    return Resolved(filled, _origins(filled, derived), warnings, assumptions, transport)


def in_file(parsed: Parsed, examined: Examined) -> list[tuple[Position, Notice]]:
    """Return all notices about a file with their positions, in the order of the file."""
    duplicate = partial(Notice, kind="refused", why="duplicate key", remedy="remove one of them")
    placed = [(place, duplicate(path)) for path, place in parsed.repeated]
    placed += [(parsed.position_of(notice.path), notice) for notice in examined.notices]
    return sorted(placed, key=lambda each: each[0])
