"""Ranks whose parameters differ for a while: what would then be lost, or be one rank's only, is refused."""

from collections.abc import Iterable, Sequence
from typing import Any

from zero_full.formatting import listed
from zero_full.optim.step import Stepper
from zero_full.shard.group.parameters import Member
from zero_full.shard.guards.model_watch import ParameterWrites

Optimizer = Any  # a `ZeroOptimizer`, which imports this module


def refuse_writes(stepper: Stepper, writes: ParameterWrites, masters: Iterable[str]) -> None:
    """RuntimeError if somebody has written to parameters, or to the `masters` of these."""
    if stepper.is_apart and (written := dict.fromkeys([*writes.names(), *masters])):
        raise RuntimeError(
            f"{listed(list(written))} was written while each rank has parameters of its own, so all ranks "
            "would lose it when they meet: call meet() of the engine's optimizer on every rank first, and "
            "write then. What is written already can only be given up, by loading a checkpoint"
        )


def refuse_frozen(optimizer: Optimizer) -> None:
    """RuntimeError if a parameter was frozen that the rule would go on moving."""
    stepper = optimizer.contents.stepper
    if not stepper.moves_without_gradient:
        return
    frozen = [
        member.name
        for owned in optimizer.owned
        for member, piece in owned.pieces.items()
        if not member.param.requires_grad and optimizer.base.state.get(piece.master)
    ]
    if frozen:
        raise RuntimeError(
            f"{listed(frozen)} was frozen after it was trained, and {type(optimizer.base).__name__} would go "
            "on moving it by its momentum: there a parameter without a gradient counts as one whose gradient "
            "is zero. Unfreeze it; or save a checkpoint, and load it with drop_errors=True in a new run, in "
            "which it is frozen and the optimizer is not given it"
        )


def refuse_thawed(optimizer: Optimizer, thawed: Sequence[Member]) -> None:
    """RuntimeError if the rule cannot begin to train what was frozen until now."""
    if problem := optimizer.contents.stepper.closed_to_newcomers():
        raise RuntimeError(
            f"{listed([member.name for member in thawed])} was frozen until now, and {problem}. Or freeze it "
            "again: nothing has changed yet"
        )


def refuse_apart(optimizer: Optimizer, call: str) -> None:
    """RuntimeError in an interval of steps that ranks take alone, and after a step that was cut short."""
    optimizer.unfinished.refuse_values(call)
    if optimizer.contents.stepper.is_apart:
        raise RuntimeError(
            f"{call} while each rank has parameters of its own: call meet() of the engine's optimizer on "
            "every rank first, which ends the interval (save_checkpoint needs no meeting)"
        )


def meet(optimizer: Optimizer) -> None:
    """All ranks have the same parameters again. Every rank must call this."""
    optimizer.refuse_unfinished("meet")
    optimizer.catch_up()
    refuse_writes(optimizer.contents.stepper, optimizer.writes, ())
    optimizer.contents.stepper.meet()
    optimizer.publish()
    optimizer.writes.forget()
