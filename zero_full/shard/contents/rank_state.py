"""What one rank has kept of an optimizer, and how it goes on from there."""

from collections.abc import Container, Mapping, Sequence
from itertools import chain
from typing import Any

from zero_full._compat import plain
from zero_full.optim.one_bit import MASK
from zero_full.shard.contents.state import NewState, OwnPart, kept

Optimizer = Any  # a `ZeroOptimizer`, which imports this module
# Of the options of a parameter group: how it computes, where and what; and whether an Adam is an AdamW.
OF_THIS_RUN = {"params", "fused", "foreach", "capturable", "differentiable", "decoupled_weight_decay", MASK}
ALIKE = frozenset(("Adam", "AdamW"))  # optimizers that keep the same


def own_part(optimizer: Optimizer) -> dict[str, Any]:
    """This rank's ranges of parameters and state, and the facts."""
    contents = optimizer.contents
    tensors = kept(chain(contents.masters(), contents.state()))
    alone = {**contents.stepper.own_tensors(), **contents.stepper.cut_tensors()}
    own = {name: tensor.clone() for name, tensor in alone.items()}
    numbers = contents.numbers(every=True)
    place = _place_of(optimizer)
    mine = {"tensors": tensors, "own": own, "cut": list(contents.stepper.cut_tensors()), "place": place}
    return {**mine, "numbers": numbers, **facts_of(optimizer)}


def _place_of(optimizer: Optimizer) -> list[int]:
    """Which rank it is, of how many that have the same."""
    across = optimizer.groups.dense.across
    return [across.rank, across.size]


def _refuse_other_place(optimizer: Optimizer, saved: Sequence[int]) -> None:
    here = _place_of(optimizer)
    if list(saved) != here:
        raise ValueError(
            "what a rank had not said yet, and where it has gone alone, was saved by rank {} of {} and means "
            "nothing to rank {} of {}: load what the same rank has saved; or use save_checkpoint, and "
            "load_checkpoint with drop_errors=True".format(*saved, *here)
        )


def load_own_part(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore what `own_part` of the same rank has returned. Every rank must call this."""
    optimizer.unfinished.refuse_load("load_state_dict")
    optimizer.finish_update()
    if "tensors" not in saved:
        raise ValueError(
            "this is not what the state_dict of zero_full's optimizer has returned: load a plain optimizer's "
            "state into it before initialize, which keeps it"
        )
    part, contents = OwnPart(saved["tensors"], saved["numbers"]), optimizer.contents
    refuse_other_facts(optimizer, saved)
    part.check([*contents.masters(), *NewState(contents, part).chunks()])
    own = saved.get("own", {})
    if saved.get("cut", []) and not contents.stepper.cut_tensors():
        raise ValueError(
            "this was saved at stage 1, of whose variance each rank has a part: load it at stage 1; or use "
            "save_checkpoint and load_checkpoint, which do not ask for that"
        )
    if own:
        _refuse_other_place(optimizer, saved["place"])
        contents.stepper.refuse_own(saved["stepper"])
    contents.stepper.load_own({})
    wake_all_but(optimizer, saved["asleep"])
    state = NewState(contents, part)
    part.read([*contents.masters(), *state.chunks()])
    state.install()
    take_facts(optimizer, saved)
    contents.stepper.load_own(own)
    optimizer.publish()
    optimizer.start_over()


def facts_of(optimizer: Optimizer) -> dict[str, Any]:
    """What is no tensor, and the same on every rank."""
    return {
        "optimizer": type(optimizer.base).__name__,
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "asleep": [plain(m.name) for bucket in optimizer.buckets if bucket.asleep for m in bucket.members],
        "scaler": optimizer.scaler.state_dict(),
        "stepper": optimizer.contents.stepper.state_dict(),
    }


def refuse_other_facts(optimizer: Optimizer, facts: Mapping[str, Any]) -> None:
    """ValueError if these are the facts of another optimizer."""
    saved, here = facts["groups"], optimizer.param_groups
    without = "(load_checkpoint has load_optimizer_states=False)"
    kind = type(optimizer.base).__name__
    other = facts.get("optimizer", kind)
    if other != kind and not ALIKE.issuperset((other, kind)):
        raise ValueError(
            f"the optimizer's state is {other}'s, but the optimizer is {kind}: what one keeps means nothing "
            f"to the other {without}"
        )
    if len(saved) != len(here):
        raise ValueError(
            f"{len(saved)} parameter groups were saved, but the optimizer has {len(here)} {without}"
        )
    optimizer.contents.stepper.refuse_state(facts.get("stepper", {}))


def take_facts(optimizer: Optimizer, facts: Mapping[str, Any]) -> None:
    """Restore what `facts_of` has returned, as far as it is there; let go of gradients."""
    if "scaler" in facts:
        optimizer.scaler.load_state_dict(facts["scaler"])
    if "stepper" in facts:
        optimizer.contents.stepper.load_state_dict(facts["stepper"])
    for group, options in zip(optimizer.param_groups, facts["groups"], strict=True):
        group.update({k: v for k, v in options.items() if k in group.keys() - OF_THIS_RUN})
    optimizer.zero_grad()


def wake_all_but(optimizer: Optimizer, asleep: Container[str]) -> None:
    """Parameters that are still to be trained here, and were trained there, get masters of their own."""
    for bucket in optimizer.buckets:
        if bucket.asleep and any(plain(member.name) not in asleep for member in bucket.members):
            optimizer.reducer.wake(bucket)
