"""Save and restore one rank's part of the optimizer: its ranges of parameters and state, and the facts.

The facts are values that are no tensors and are equal on every rank: options of the groups, loss scale, state
of the update rule.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from zero_full._compat import clean_name
from zero_full.optim.one_bit import MASK
from zero_full.precision.scaler import StaticScale
from zero_full.shard.contents.state import Contents, as_dict

# Options of a parameter group that a load does not change: implementation choices, and Adam versus AdamW.
OF_THIS_RUN = {"params", "fused", "foreach", "capturable", "differentiable", "decoupled_weight_decay", MASK}
ALIKE = frozenset(("Adam", "AdamW", "FusedAdam"))  # optimizers with the same state


def rank_part(contents: Contents, scaler: StaticScale) -> dict[str, Any]:
    """Return this rank's ranges of parameters and state, and the facts."""
    stepper = contents.stepper
    tensors = as_dict(chain(contents.masters(), contents.state()))
    alone = {**stepper.own_tensors(), **stepper.cut_tensors()}
    own = {name: tensor.clone() for name, tensor in alone.items()}
    place = _place_of(contents)
    mine = {"tensors": tensors, "own": own, "cut": list(stepper.cut_tensors()), "place": place}
    return {**mine, "numbers": contents.numbers(every=True), **facts_of(contents, scaler)}


def _place_of(contents: Contents) -> list[int]:
    """Return this rank's index among the replicas of its state, and their number."""
    replicas = contents.communicators.dense.replica_comm
    return [replicas.rank, replicas.size]


def check_same_rank(contents: Contents, saved: Mapping[str, Any]) -> None:
    """Raise ValueError if the saved state has compression errors, local steps or parts of another rank."""
    if saved.get("cut", []) and not contents.stepper.cut_tensors():
        raise ValueError(
            "this state was saved at stage 1, where each rank has a part of the variance. Load it at stage "
            "1, or use save_checkpoint and load_checkpoint, which work at any stage"
        )
    if not saved.get("own", {}):
        return
    here, there = _place_of(contents), list(saved["place"])
    if there != here:
        raise ValueError(
            "this state has compression errors and local steps of rank {} of {}, which rank {} of {} cannot "
            "use. Load it on the same rank of the same world size, or use save_checkpoint, and "
            "load_checkpoint with drop_errors=True".format(*there, *here)
        )
    contents.stepper.check_own_tensors(saved["stepper"])


def facts_of(contents: Contents, scaler: StaticScale) -> dict[str, Any]:
    """Return the facts: values that are no tensors and are equal on every rank."""
    asleep = [group for group in contents.sharded.trained if group.asleep]
    groups = contents.base.param_groups
    return {
        "optimizer": type(contents.base).__name__,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in groups],
        "asleep": [clean_name(member.name) for group in asleep for member in group.members],
        "scaler": scaler.state_dict(),
        "stepper": contents.stepper.state_dict(),
    }


def check_facts(contents: Contents, facts: Mapping[str, Any]) -> None:
    """Raise ValueError if these facts are those of another optimizer."""
    saved, here = facts["groups"], contents.base.param_groups
    without = "To load parameters only, use load_checkpoint with load_optimizer_states=False"
    kind = type(contents.base).__name__
    other = facts.get("optimizer", kind)
    if other != kind and not ALIKE.issuperset((other, kind)):
        raise ValueError(f"the state was saved by the optimizer {other}, and {kind} cannot use it. {without}")
    if len(saved) != len(here):
        raise ValueError(
            f"{len(saved)} parameter groups were saved, but the optimizer has {len(here)}. {without}"
        )
    for number, (before, now) in enumerate(zip(saved, here, strict=True) if kind in ALIKE else ()):
        corrected, corrects = (bool(group.get("bias_correction", True)) for group in (before, now))
        if corrected != corrects:
            raise ValueError(
                f"group {number} was saved with bias_correction {corrected}, but {kind} would step it "
                f"with bias_correction {corrects}: the same moments would mean other steps. Set "
                f"optimizer.params.bias_correction to {str(corrected).lower()}, or pass such an optimizer. "
                f"{without}"
            )
    contents.stepper.check_state(facts.get("stepper", {}))


def load_facts(contents: Contents, scaler: StaticScale, facts: Mapping[str, Any]) -> None:
    """Restore the facts that `facts_of` has returned. Some may be missing."""
    if "scaler" in facts:
        scaler.load_state_dict(facts["scaler"])
    if "stepper" in facts:
        contents.stepper.load_state_dict(facts["stepper"])
    for group, options in zip(contents.base.param_groups, facts["groups"], strict=True):
        group.update({k: v for k, v in options.items() if k in group.keys() - OF_THIS_RUN})
