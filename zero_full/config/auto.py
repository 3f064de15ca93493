"""The value "auto", by which a file leaves a key to Hugging Face's Trainer or to Accelerate.

Both replace "auto" before they call `initialize`, which raises on it: zero_full does not guess such values.
"""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_full.config.json_parser import NotJsonError, parse, text_of
from zero_full.errors import ConfigError
from zero_full.formatting import listed

TRAINER, BOTH = "Hugging Face's Trainer", "Hugging Face's Trainer and Accelerate"
ZERO, OPTIMIZER, SCHEDULER = "zero_optimization", "optimizer.params", "scheduler.params"
# The keys in which they replace "auto" (transformers 5.23, accelerate 1.15), and the values that stand in for
# theirs in a plan and a dry run. null: no value.
STAND_INS: dict[str, Any] = {
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": None,
    "gradient_accumulation_steps": None,
    "gradient_clipping": 1.0,
    "fp16.enabled": False,
    "bf16.enabled": False,
    f"{ZERO}.stage": 2,
    f"{ZERO}.reduce_bucket_size": 500_000_000,
    f"{ZERO}.stage3_prefetch_bucket_size": 50_000_000,
    f"{ZERO}.stage3_param_persistence_threshold": 100_000,
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save": False,
    f"{ZERO}.offload_optimizer.device": "none",
    f"{ZERO}.offload_optimizer.nvme_path": None,
    f"{ZERO}.offload_param.device": "none",
    f"{ZERO}.offload_param.nvme_path": None,
    f"{OPTIMIZER}.lr": 1e-4,
    f"{OPTIMIZER}.betas": [0.9, 0.999],
    f"{OPTIMIZER}.eps": 1e-8,
    f"{OPTIMIZER}.weight_decay": 0.0,
    f"{SCHEDULER}.warmup_min_lr": 0.0,
    f"{SCHEDULER}.warmup_max_lr": 1e-4,
    f"{SCHEDULER}.warmup_num_steps": 1,
    f"{SCHEDULER}.total_num_steps": 100,
}
BY_TRAINER = (f"{OPTIMIZER}.betas", f"{OPTIMIZER}.eps")  # Accelerate leaves these
FILLERS = {key: TRAINER if key in BY_TRAINER else BOTH for key in STAND_INS}
MEANT = ("keep_in_fp32_modules",)  # "auto" is an ordinary value of these keys


def is_auto(value: object) -> bool:
    """Return whether the value is "auto"."""
    return isinstance(value, str) and value == "auto"


def auto_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys whose value is "auto", in the order of the configuration."""
    return [".".join(route) for route in _auto_routes(config)]


def _auto_routes(section: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _auto_routes(value, (*above, str(name)))
        elif is_auto(value) and name not in MEANT:
            yield (*above, str(name))


def fill_auto(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration in which values, by dotted key, have replaced "auto".

    Raises ConfigError if a key is not "auto" in the configuration.
    """
    _check_are_auto(values, config)
    return _filled(config, values, "")


def _filled(section: Mapping[str, Any], values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        name: _filled(value, values, f"{prefix}{name}.")
        if isinstance(value, Mapping)
        else values.get(f"{prefix}{name}", value)
        for name, value in section.items()
    }


def drop_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration without the keys that are "auto", so that they have their defaults.

    DeepSpeed treats an "auto" that was not filled in like this.
    """
    return {
        name: drop_auto(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if not is_auto(value) or name in MEANT
    }


def fill_text(text: str, values: Mapping[str, Any]) -> str:
    """Return a JSON text in which values have replaced "auto". Comments and layout stay.

    Raises ConfigError as `fill_auto` does, and NotJsonError.
    """
    if not values:
        return text
    parsed = parse(text)
    _check_are_auto(values, parsed.value if isinstance(parsed.value, Mapping) else {})
    for route in sorted(_auto_routes(parsed.value), key=lambda each: parsed.spans[each], reverse=True):
        key = ".".join(route)
        if key in values:
            start, stop = parsed.spans[route]
            text = f"{text[:start]}{json.dumps(values[key])}{text[stop:]}"
    return text


def parse_fills(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values of `--fill KEY=VALUE` arguments. A value that is not JSON is a string."""
    values: dict[str, Any] = {}
    for each in arguments:
        key, sign, text = (part.strip() for part in each.partition("="))
        if not key or not sign:
            raise ConfigError(f"--fill {each}: write KEY=VALUE, as in bf16.enabled=true")
        if key in values:
            raise ConfigError(f"--fill {each}: {key} is given twice")
        try:
            values[key] = parse(text).value
        except NotJsonError:
            values[key] = text
    return values


def read_filled(path: Path, arguments: Sequence[str]) -> str:
    """Return a file's text after these `--fill` arguments. Raises ConfigError if a value has no place."""
    values, text = parse_fills(arguments), text_of(path)
    try:
        return fill_text(text, values)
    except NotJsonError:
        return text  # the caller reports the mistake
    except ConfigError as error:
        raise ConfigError(f"--fill {error}") from None


def _check_are_auto(keys: Iterable[str], config: Mapping[str, Any]) -> None:
    known = auto_keys(config)
    for key in keys:
        if key in known:
            continue
        if not known:
            raise ConfigError(f'{key}: no key of the configuration is "auto"')
        found: Any = config
        for name in key.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is not None:
            raise ConfigError(f'{key} is {json.dumps(found, default=repr)} in the configuration, not "auto"')
        near = [each for each in known if each.endswith(f".{key}")] or difflib.get_close_matches(
            key, known, 1
        )
        hint = f"did you mean {near[0]}?" if near else f'"auto" is in {listed(known, 20)}'
        raise ConfigError(f"{key}: the configuration has no such key; {hint}")
