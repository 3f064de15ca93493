"""What `initialize` would say of a configuration that only torch and a run can tell, tried on a tiny model.

Names and arguments of optimizers and schedules are known to torch, and what can be done with which optimizer
to the runtime, so `zero_full.config` cannot judge them. The run is a plan: on tensors without values.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from zero_full.config import Config
from zero_full.config.read import Route
from zero_full.config.together import TRAIN
from zero_full.optim import build_optimizer, build_scheduler
from zero_full.plan import plan

MANY = 32  # ranks, more than which are not tried
NODE = 8  # ranks of the groups in their place

log = logging.getLogger("zero_full")


def faults(config: Config) -> Iterator[tuple[Route, str]]:
    """(key, message) for each mistake in the sections "optimizer" and "scheduler"."""
    optimizer, schedule, model = config.optimizer, config.scheduler, _model()
    base: Any = None
    if optimizer is not None:
        groups = [{"params": list(model.parameters())}]
        make = partial(build_optimizer, optimizer.type, groups=groups, model=model)
        base, found = _tried(make, "optimizer", optimizer.params)
        yield from found
    if schedule is not None:
        base = torch.optim.AdamW(model.parameters()) if base is None else base  # the script's may be any
        _, found = _tried(
            partial(build_scheduler, schedule.type, optimizer=base), "scheduler", schedule.params
        )
        yield from found


def fault_of_run(config: Config, world: int) -> str:
    """Why a run with a configuration in which nothing else is wrong would not start; empty if it would."""
    try:
        with _silence():
            plan(_model(), *_with_few(config, world))
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:  # torch's steps raise all of them
        return str(error) or repr(error)
    return ""


def for_ranks(config: Config, world: int, ranks: int) -> Config:
    """What does on each of `ranks` ranks as much as `config` does on each of `world`."""
    train = config.train_batch_size // world * ranks
    return config.model_copy(update={TRAIN: train} if train else {})


def _with_few(config: Config, world: int) -> tuple[Config, int]:
    """The same with few ranks, and as many kinds of groups: many take long and say nothing else."""
    if world <= MANY:
        return config, world
    zero, sizes = config.zero_optimization, dict[str, int]()
    shared = zero.mics_shard_size if zero.mics_shard_size > 0 else world
    node = zero.zero_hpz_partition_size if zero.stage == 3 else 1
    few = sizes["zero_hpz_partition_size"] = min(node, NODE)
    few *= min(shared // node, 2)
    if zero.mics_shard_size > 0:
        sizes["mics_shard_size"] = few
    few *= min(world // shared, 2)
    update = {"zero_optimization": zero.model_copy(update=sizes)}
    return for_ranks(config, world, few).model_copy(update=update), few


@contextmanager
def _silence() -> Iterator[None]:
    """What the log says is about the tiny model."""
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))


def _tried(
    make: Callable[..., Any], section: str, given: Mapping[str, Any]
) -> tuple[Any, list[tuple[Route, str]]]:
    """What is made without the arguments that are refused, if that can be; and what is said of these."""
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
    """The key that a message begins with, as far as there is one."""
    found = re.match(rf"(?:{section}\.params\.)?(\w+)", message)
    if found is not None and found[1] in params:
        return (section, "params", found[1])
    return (section, "params") if message.startswith(f"{section}.params") else (section, "type")
