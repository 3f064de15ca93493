"""Load objects that have a `load_state_dict`: the LR scheduler, extra state of modules, and kept objects.

Only the objects themselves know which states they accept. So they load their states before anything else
changes. If one of them raises on any rank, all get their previous states back.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from zero_full._compat import BY_GROUP, SCHEDULE_PARTS, clean_name
from zero_full.checkpoint.json_values import fingerprint
from zero_full.checkpoint.save import Extras
from zero_full.checkpoint.source import Source
from zero_full.comm.topology import this_rank
from zero_full.errors import CheckpointError
from zero_full.formatting import listed
from zero_full.shard.access.gathered_parameters import copied, load_others, own_and_made

log = logging.getLogger("zero_full")


@dataclass(frozen=True)
class StateToLoad:
    """An object with the state that it is to load."""

    name: str
    target: Any
    state: Any


@dataclass(frozen=True)
class StageSchedule:
    """An LR scheduler's state on one pipeline stage."""

    members: Sequence[Sequence[str]]  # the parameter names of each parameter group
    state: Mapping[str, Any]


class ExtraState:
    """State dict entries that a module makes itself: extra state, and tensors from state dict hooks."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the current entries."""
        _, made = own_and_made(self.module)
        return {name: copied(value) for name, value in made.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the entries that the module still has."""
        load_others(self.module, state)


class ObjectStates:
    """The objects that load state of their own, in order, with their previous states for a rollback."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.states: list[StateToLoad] = []
        self.previous: list[StateToLoad] = []
        self.has_scheduler = False

    def add_scheduler(
        self, scheduler: Any, with_state: bool, members: Sequence[Sequence[str]] | None = None
    ) -> None:
        """Add this run's LR scheduler, which may be None.

        with_state  the options of the optimizer's parameter groups, including the learning rate, are loaded
                    as well
        members     with pipeline stages, which may have other groups than those that were saved: the
                    parameter names of each group

        Raises CheckpointError if the saved scheduler is of another class.
        """
        state, kind = self.source.shared.get("lr_scheduler"), type(scheduler).__name__
        if scheduler is None:
            if state is not None and this_rank() == 0:
                stays = "as it was saved" if with_state else "as it is"
                log.warning(
                    "%s has the state of an LR scheduler, but this run has none: the learning rate stays %s. "
                    "Pass the scheduler to initialize before loading",
                    self.source.path,
                    stays,
                )
            return
        saved = self.source.shared.get("schedule", kind)
        # DeepSpeed saves no class, and torch's schedules load any dict, also one that has nothing of theirs.
        if isinstance(scheduler, LRScheduler) and state and state.keys().isdisjoint(scheduler.state_dict()):
            saved = f"schedule with {listed(sorted(state))}"
        if state is None or saved != kind:
            found = "no LR scheduler state" if state is None else f"the state of a {saved}, not of a {kind}"
            raise CheckpointError(
                f"{self.source.path} has {found}. Load without it (load_lr_scheduler_states=False). "
                "Nothing was loaded"
            )
        if not with_state and not hasattr(scheduler, "get_last_lr"):
            raise CheckpointError(
                f"{kind} has no get_last_lr, so its current learning rate is unknown. Load it with the "
                "optimizer state, or load neither (load_lr_scheduler_states=False). Nothing was loaded"
            )
        if members is not None and (stages := self._saved_stages(state)):
            try:
                state = divided_anew(stages, members, scheduler.state_dict())
            except ValueError as error:
                raise CheckpointError(
                    f"the LR scheduler in {self.source.path} cannot be divided among the parameter groups of "
                    f"this run: {error}. Load without it (load_lr_scheduler_states=False), or at the saved "
                    "pipeline stages. Nothing was loaded"
                ) from error
        self.states.append(StateToLoad("the LR scheduler", scheduler, state))
        self.has_scheduler = True

    def _saved_stages(self, state: Mapping[str, Any]) -> list["StageSchedule"]:
        """Return the LR scheduler's state on each saved pipeline stage; none if no groups were saved."""
        found = [self.source.private(rank).get("lr_scheduler") for rank in self.source.savers]
        stages = {repr(each["members"]): StageSchedule(**each) for each in found if each is not None}
        if not stages and (members := self.source.shared.get("members")):  # it was no pipeline
            return [StageSchedule(members, state)]
        return [*stages.values()]

    def add_extra_state(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Add the entries that the module itself has made for its state dict."""
        if state:
            name = f"the module's own {listed(sorted(state))}"
            self.states.append(StateToLoad(name, ExtraState(module), state))

    def add_kept(self, extras: Extras, same_ranks: bool, ranks: int) -> None:
        """Add the objects of `extras.kept`.

        Each loads this rank's saved state. If the number of ranks has changed, the state must be equal on all
        saved ranks.
        """
        if not self.source.savers:  # not written by zero_full
            if extras.kept and this_rank() == 0:
                log.warning("%s has no states of %s", self.source.path, listed(sorted(extras.kept)))
            return
        everyones = {rank: self.source.private(rank).get("kept", {}) for rank in self.source.savers}
        unclaimed = sorted({name for each in everyones.values() for name in each} - extras.kept.keys())
        if unclaimed and this_rank() == 0:
            log.warning(
                "%s has states of %s, which this run does not load: name them in keep_in_checkpoint "
                "(or Extras.kept) before loading",
                self.source.path,
                listed(unclaimed),
            )
        for name, each in extras.kept.items():
            states = {rank: kept[name] for rank, kept in everyones.items() if name in kept}
            if len(states) < len(everyones):
                raise CheckpointError(
                    f"{self.source.path} has no state of {name}. Name it in keep_in_checkpoint (or "
                    "Extras.kept) only after the load. For training_dataloader, which initialize has made, "
                    "set engine.training_dataloader = None before the load. Nothing was loaded"
                )
            if not same_ranks and len({fingerprint(state) for state in states.values()}) > 1:
                raise CheckpointError(
                    f"{name} was saved with a different state on each of {len(states)} ranks, which {ranks} "
                    "ranks cannot divide. Make its state_dict equal on all ranks. Nothing was loaded"
                )
            self.states.append(StateToLoad(name, each, states[this_rank() if same_ranks else min(states)]))

    def load(self) -> None:
        """Load the state of each object, and keep its previous state for `roll_back`."""
        for each in self.states:
            self.previous.append(replace(each, state=copied(each.target.state_dict())))
            try:
                each.target.load_state_dict(each.state)
            except Exception as error:
                raise CheckpointError(
                    f"{each.name} cannot load the state in {self.source.path}: {error!r}. Nothing was loaded"
                ) from error

    def roll_back(self) -> None:
        """Load the previous state of each object again."""
        for each in self.previous:
            with suppress(Exception):  # an object that accepts no state; the load's error reports it
                each.target.load_state_dict(each.state)


def saved_extra_state(source: Source, made: Mapping[str, Any], place: Mapping[str, str]) -> dict[str, Any]:
    """Return the saved values of the entries that a module itself makes for its state dict.

    made   the module's current entries, by name
    place  the key in the source of each entry that is a tensor, by name
    """
    others, found = source.shared.get("others", {}), dict[str, Any]()
    for name, value in made.items():
        if isinstance(value, Tensor):
            if name in place:
                stored = source.tensors[place[name]]
                for start, stop in source.parts(place[name], 0, stored.numel):
                    source.verify(place[name], start, stop)
                found[name] = source.read_across(place[name], 0, stored.numel).view(stored.shape)
        elif clean_name(name) in others:
            found[name] = others[clean_name(name)]
    return found


def divided_anew(
    stages: Sequence[StageSchedule], members: Sequence[Sequence[str]], own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return an LR scheduler's state for these parameter groups, from its states on pipeline stages.

    A list with a value for each group gets the values that were saved with the groups' parameters.

    members  the parameter names of each group of this run
    own      the state that this run's scheduler has now, for groups of which no parameter was saved

    Raises ValueError for parameters of one group with different values, and for other values that differ
    between stages.
    """
    made = dict[str, Any]()
    for key, value in stages[0].state.items():
        if key == SCHEDULE_PARTS:
            for number, part in enumerate(own[key]):
                of_part = [StageSchedule(each.members, each.state[key][number]) for each in stages]
                made.setdefault(key, []).append(divided_anew(of_part, members, part))
        elif _is_by_group(key, [*stages, StageSchedule(members, own)]):
            saved = {
                name: each.state[key][number]
                for each in stages
                for number, names in enumerate(each.members)
                for name in names
            }
            made[key] = [_value_of_group(key, n, names, saved, own) for n, names in enumerate(members)]
        elif len({fingerprint(each.state.get(key)) for each in stages}) > 1:
            raise ValueError(f"its {key} differs between pipeline stages")
        else:
            made[key] = value
    return made


def _is_by_group(key: str, stages: Sequence[StageSchedule]) -> bool:
    """Return whether this is a list with a value for each parameter group.

    It is one of torch's, or its length is the number of groups, which differs between stages.
    """
    lists = [each.state.get(key) for each in stages]
    if not all(
        isinstance(each, list) and len(each) == len(stage.members)
        for each, stage in zip(lists, stages, strict=True)
    ):
        return False
    return key in BY_GROUP or len({len(stage.members) for stage in stages}) > 1


def _value_of_group(
    key: str, number: int, names: Sequence[str], saved: Mapping[str, Any], own: Mapping[str, Any]
) -> Any:
    """Return the saved value of the group of these parameters; ValueError if they were saved with several."""
    found = {fingerprint(saved[name]): name for name in names if name in saved}
    if len(found) > 1:
        one, other, *_ = found.values()
        raise ValueError(f"its {key} of {one} and of {other}, which are in parameter group {number}, differ")
    return next((saved[name] for name in found.values()), own[key][number])


def set_learning_rates(groups: Sequence[dict[str, Any]], rates: Sequence[float]) -> None:
    """Set the learning rate of each parameter group."""
    for group, rate in zip(groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = float(rate)
