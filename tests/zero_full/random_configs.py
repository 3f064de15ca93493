"""Configurations by chance, as texts: right ones, wrong ones, and some that are no JSON."""

import json
import random
from collections.abc import Iterator
from typing import Any

from zero_full.config.messages import Entry, entries, known_keys
from zero_full.config.schema import Config, OffloadOptimizerConfig, OffloadParamConfig

ODD = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        8,
        64,
        10**9,
        2**63,
        10**30,
        0.5,
        1.0,
        5e8,
        1e-7,
        1e-320,
        1e30,
        123.456,
    ),
    *("", "auto", "true", "cpu", "nvme", "none", "Fp16", "torch.bfloat16", "é\u2028\U0001f600", "a" * 80),
    *(
        [],
        ["a", 3],
        ["x"],
        {},
        {"enabled": True},
        {"enabled": "no", "a": [1, {"b": None}]},
        {"autotp_size": 2, "tp": {"tp_size": 4}},
    ),
    *(float("inf"), float("nan")),
]
SECOND_NAMES = [
    *("bfloat16.enabled", "zero_optimization.max_live_parameters", "zero_optimization.prefetch_bucket_size"),
    *("zero_optimization.cpu_offload", "zero_optimization.cpu_offload_use_pin_memory", "a.b", "constructor"),
]
LIKELY = {  # so that rules about several keys meet what they are about
    "train_batch_size": [64, 63, 16],
    "train_micro_batch_size_per_gpu": [1, 2, 4],
    "gradient_accumulation_steps": [1, 2, 3],
    "fp16.enabled": [True, False],
    "fp16.loss_scale": [0, 128],
    "fp16.min_loss_scale": [2**20],
    "prescale_gradients": [True],
    "gradient_predivide_factor": [2],
    "bf16.enabled": [True, False],
    "bf16.bf16_optimizer_states": [True],
    "bf16.stochastic_rounding": [True],
    "torch_autocast.enabled": [True],
    "torch_autocast.dtype": ["fp16", "bf16"],
    "optimizer.type": ["Muon", "AdamW"],
    "optimizer.params": [{"lr": 1e-3}, {"max_grad_norm": 1.0}, {"lr": "auto"}],
    "zero_optimization.stage": [0, 1, 2, 3],
    "zero_optimization.mics_shard_size": [2, 3, -1, 0],
    "zero_optimization.zero_hpz_partition_size": [2, 3],
    "zero_optimization.offload_optimizer.device": ["cpu", "nvme", "none"],
    "zero_optimization.offload_optimizer.ratio": [0.5, 1],
    "zero_optimization.offload_optimizer.super_offload": [True],
    "zero_optimization.offload_optimizer.delay_update_after": [3],
    "zero_optimization.offload_param.device": ["cpu", "nvme", "none"],
}


def texts(seed: int, count: int) -> Iterator[str]:
    """So many configurations, always the same ones."""
    generator = random.Random(seed)
    offloads = {"offload_optimizer": OffloadOptimizerConfig(), "offload_param": OffloadParamConfig()}
    whole = Config()
    zero = whole.zero_optimization.model_copy(update=offloads)
    known = {e.key: e for e in entries(whole.model_copy(update={"zero_optimization": zero}))}
    for _ in range(count):
        made: dict[str, Any] = {}
        likely = generator.sample(sorted(LIKELY), generator.randrange(len(LIKELY)))
        for key in [*likely, *generator.choices([*known_keys(), *SECOND_NAMES], k=generator.randrange(9))]:
            _put(made, _misspelled(generator, key).split("."), _value(generator, key, known))
        yield _written(generator, made)


def _value(generator: random.Random, key: str, known: dict[str, Entry]) -> Any:
    if key in LIKELY and generator.random() < 0.9:
        return generator.choice(LIKELY[key])
    if key in known and isinstance(known[key].default, bool) and generator.random() < 0.7:
        return generator.choice([True, False, 0, 1])
    if key in known and generator.random() < 0.3:
        return known[key].default
    return generator.choice(ODD)


def _misspelled(generator: random.Random, key: str) -> str:
    if generator.random() > 0.1:
        return key
    at = generator.randrange(len(key))
    return generator.choice([key[:at] + key[at + 1 :], key[:at] + "x" + key[at:], key.rpartition(".")[2]])


def _put(level: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        level = level.setdefault(name, {}) if isinstance(level.get(name, {}), dict) else {}
    level[path[-1]] = value


def _written(generator: random.Random, config: dict[str, Any]) -> str:
    """With what people do to JSON by hand."""
    text = json.dumps(config, indent=generator.choice([None, 2]), ensure_ascii=generator.random() < 0.5)
    if generator.random() < 0.3:
        text = text.replace(", ", ", /* , } */ ", 1).replace("}", ",}" if config else "}", 1)
    if generator.random() < 0.2:
        text = text.replace('"zero_optimization"', '"fp16": {"enabled": false}, "zero_optimization"')
    if generator.random() < 0.1:
        at = generator.randrange(len(text))
        text = text[:at] + generator.choice(['"', ",", "]", "True", "'", "\\", "//", "\t"]) + text[at + 1 :]
    return text
