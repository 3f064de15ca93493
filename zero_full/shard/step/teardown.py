"""How an optimizer leaves its model: collectives come to their end, hooks go, groups are closed."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from zero_full.comm.topology import this_rank
from zero_full.errors import CommunicationError
from zero_full.shard.group.parameters import FlatParameter, GatherState
from zero_full.shard.group.registry import unregister

log = logging.getLogger("zero_full")


def leave_model(optimizer: Any, gather: bool) -> None:
    """Take a `ZeroOptimizer` off its model, which keeps its parameters; with `gather` they become whole.

    Every rank must call this. What is under way and fails was told already.
    """
    if optimizer.contents.stepper.is_apart and not gather and this_rank() == 0:
        log.warning(
            "the ranks leave the model with parameters of their own each: call meet() of the engine's "
            "optimizer before destroy, or destroy(gather=True)"
        )
    for finish in (optimizer.reducer.close, optimizer.zero_grad):
        with suppress(CommunicationError):
            finish()
    for hook in optimizer.hooks:
        hook.remove()
    flats = optimizer.flats()
    try:
        if optimizer.gatherer is not None:
            optimizer.gatherer.close()
            for flat in flats if gather else ():
                optimizer.gatherer.gather(flat)
    finally:  # a gather that has failed is told, and nothing stays open for that
        _let_go(optimizer, flats)


def _let_go(optimizer: Any, flats: Sequence[FlatParameter]) -> None:
    if optimizer.gatherer is not None:
        optimizer.gatherer.lane.close()
    optimizer.lane.close()
    optimizer.steppers.early.close()
    optimizer.delayed.close()
    if optimizer.parts.flow is not None:
        optimizer.parts.flow.close()
    optimizer.waiting.close()
    _let_go_of_state(optimizer)
    if all(flat.state is GatherState.WHOLE for flat in flats):
        for guard in optimizer.guards:
            guard.remove()
    unregister(optimizer.watch.names)
    unregister(m.param for flat in flats for m in flat.members)
    optimizer.groups.close()


def _let_go_of_state(optimizer: Any) -> None:
    """What was in a tier's memory goes with it, whoever holds this optimizer."""
    away = [owned for owned in optimizer.owned if owned.tier.lost]
    optimizer.own_state.forget({member.param for owned in away for member in owned.pieces})
    for owned in away:
        owned.leave()
