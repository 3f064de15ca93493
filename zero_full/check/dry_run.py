"""Dry run of a configuration on a tiny model, to find errors that only torch or a run can detect.

Only torch knows the names and arguments of optimizers and LR schedulers, and only the runtime knows which
features work with which optimizer. So `zero_full.config` cannot check them. The dry run is a memory plan, on
meta tensors.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from zero_full.config import Config, auto_keys, fill_auto
from zero_full.config.auto import STAND_INS
from zero_full.config.json_parser import Route
from zero_full.config.rules import TRAIN
from zero_full.optim import build_optimizer, build_scheduler
from zero_full.plan import plan

MAX_RANKS = 32  # largest number of ranks to simulate
MAX_NODE_RANKS = 8  # largest secondary partition (zero_hpz_partition_size) to simulate beyond that


def without_auto(config: Config) -> Config:
    """Return a configuration in which stand-ins have replaced "auto", where the schema accepts any text."""
    given = config.model_dump(exclude_unset=True)
    return Config(**fill_auto(given, {key: STAND_INS[key] for key in auto_keys(given) if key in STAND_INS}))


def errors_of_sections(config: Config) -> Iterator[tuple[Route, str]]:
    """Yield (key, message) for each mistake in the sections "optimizer" and "scheduler"."""
    optimizer, schedule, model = config.optimizer, config.scheduler, _model()
    base: Any = None
    if optimizer is not None:
        groups = [{"params": list(model.parameters())}]
        make = partial(build_optimizer, optimizer.type, groups=groups, model=model)
        base, found = _try_to_build(make, "optimizer", optimizer.params)
        yield from found
    if schedule is not None:
        base = torch.optim.AdamW(model.parameters()) if base is None else base  # the script's is unknown
        _, found = _try_to_build(
            partial(build_scheduler, schedule.type, optimizer=base), "scheduler", schedule.params
        )
        yield from found


def error_of_run(config: Config, world: int) -> str:
    """Return the error of a run with an otherwise valid configuration, or an empty string."""
    try:
        plan(_model(), *_on_fewer_ranks(config, world))
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:  # torch's optimizers raise these
        return str(error) or repr(error)
    return ""


def for_ranks(config: Config, world: int, ranks: int) -> Config:
    """Scale the train batch size from `world` to `ranks` ranks, with equal work per rank."""
    train = config.train_batch_size // world * ranks
    return config.model_copy(update={TRAIN: train} if train else {})


def _on_fewer_ranks(config: Config, world: int) -> tuple[Config, int]:
    """Reduce a large world size, and keep the kinds of groups: the same errors are found in less time."""
    if world <= MAX_RANKS:
        return config, world
    zero, sizes = config.zero_optimization, dict[str, int]()
    shared = zero.mics_shard_size if zero.mics_shard_size > 0 else world
    node = zero.zero_hpz_partition_size if zero.stage == 3 else 1
    few = sizes["zero_hpz_partition_size"] = min(node, MAX_NODE_RANKS)
    few *= min(shared // node, 2)
    if zero.mics_shard_size > 0:
        sizes["mics_shard_size"] = few
    few *= min(world // shared, 2)
    update = {"zero_optimization": zero.model_copy(update=sizes)}
    return for_ranks(config, world, few).model_copy(update=update), few


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))


def _try_to_build(
    make: Callable[..., Any], section: str, given: Mapping[str, Any]
) -> tuple[Any, list[tuple[Route, str]]]:
    """Call `make`, removing arguments that it rejects. Returns the result or None, and the errors."""
    params, found = dict(given), list[tuple[Route, str]]()
    while True:
        try:
            return make(params=params), found
        except (TypeError, ValueError) as error:
            key = _key_of(str(error), section, params)
            found.append((key, str(error)))
        if len(key) < 3:
            return None, found
        del params[str(key[2])]


def _key_of(message: str, section: str, params: Mapping[str, Any]) -> Route:
    """Return the key at the beginning of a message, or else the key of the section's `type` or `params`."""
    found = re.match(rf"(?:{section}\.params\.)?(\w+)", message)
    if found is not None and found[1] in params:
        return (section, "params", found[1])
    return (section, "params") if message.startswith(f"{section}.params") else (section, "type")
