"""What `initialize` would say of a configuration's optimizer and schedule, tried on a stand-in for the model.

Their names and arguments are known to torch only, so `zero_full.config` cannot judge them.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from zero_full.comm.pretend import PretendedGroup
from zero_full.comm.topology import Topology
from zero_full.config import Config
from zero_full.config.read import Route
from zero_full.optim import build_optimizer, build_scheduler
from zero_full.shard.served import served
from zero_full.translate import settings_of, shard_ranks_of


def faults(config: Config, world: int) -> Iterator[tuple[Route, str]]:
    """(key, message) for each mistake in the sections "optimizer" and "scheduler"."""
    optimizer, schedule = config.optimizer, config.scheduler
    base: Any = None
    if optimizer is not None:
        make = partial(build_optimizer, optimizer.type, groups=_parameters())
        base, found = _tried(make, "optimizer", optimizer.params)
        yield from found
        try:
            served(base, settings_of(config), _topology(config, world))
        except ValueError as error:
            yield ("optimizer", "type"), str(error)
    if schedule is not None:
        base = torch.optim.AdamW(_parameters()) if base is None else base  # the script's may be any
        _, found = _tried(
            partial(build_scheduler, schedule.type, optimizer=base), "scheduler", schedule.params
        )
        yield from found


def _parameters() -> list[dict[str, Any]]:
    return [{"params": [nn.Parameter(torch.ones(2, 2))]}]


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


def _topology(config: Config, world: int) -> Topology:
    """As `initialize` would make it, of ranks that are not there."""
    whole, shard_ranks = Topology(data=PretendedGroup(range(world), 0)), shard_ranks_of(config, world)
    return whole if shard_ranks is None else whole.with_sub_groups(shard_ranks)
