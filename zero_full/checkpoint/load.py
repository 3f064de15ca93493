"""Load a checkpoint at any world size, stage and precision, either completely or not at all.

[Note: a load] Each rank first compares names, shapes and options, and verifies every byte that it needs.
Values change only if all ranks succeed. The LR scheduler and other objects load their states first
(`object_state.py`). If one raises, all get their previous states back, and nothing has changed. Then each
rank reads its own ranges.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from zero_full._compat import clean_name
from zero_full.checkpoint.async_save import async_saves_of
from zero_full.checkpoint.failure import Attempt
from zero_full.checkpoint.folder import local_path
from zero_full.checkpoint.object_state import (
    ObjectStates,
    saved_extra_state,
    set_learning_rates,
)
from zero_full.checkpoint.reading import holds_latest, open_checkpoint
from zero_full.checkpoint.rng_state import check_rng_states, restore_rng_states
from zero_full.checkpoint.save import Extras, group_members
from zero_full.checkpoint.source import Source, SourceValues, StoredTensor
from zero_full.checkpoint.weights import describe_unmatched, publish_loaded
from zero_full.comm.topology import this_rank
from zero_full.errors import CheckpointError
from zero_full.formatting import listed
from zero_full.precision.scaler import DynamicScale
from zero_full.shard.access.gathered_parameters import load_others, own_and_made
from zero_full.shard.contents.keys import BUFFERS, OWN, PARAMETERS
from zero_full.shard.contents.rank_state import OF_THIS_RUN, check_facts, load_facts
from zero_full.shard.contents.state import Chunk, NewState, copy_back
from zero_full.shard.step.optimizer import ZeroOptimizer
from zero_full.shard.step.wrapped_optimizer import NoOptimizer

log = logging.getLogger("zero_full")
BY_SCHEDULE = ("lr", "initial_lr", "betas", "momentum")  # parameter group options that LR schedulers change
LIMITS = ("max_", "min_", "base_")  # prefixes of options that LR schedulers add to parameter groups


@dataclass(frozen=True)
class LoadOptions:
    """Selection of the parts of a checkpoint to load."""

    strict: bool = True  # raise on missing or unexpected parameters and buffers
    optimizer_states: bool = True  # includes random number states and kept objects
    lr_scheduler_states: bool = True
    module_only: bool = False
    drop_errors: bool = False  # discard optimizer state of single ranks; required if the world size changes


@dataclass(frozen=True)
class Resumed:
    """The result of a load."""

    path: Path
    client_state: dict[str, Any]
    counters: dict[str, Any] = field(default_factory=dict)


@torch.inference_mode(False)
@torch.no_grad()
def load_checkpoint(
    module: nn.Module,
    optimizer: ZeroOptimizer,
    directory: str | PathLike[str],
    tag: str | None = None,
    wanted: LoadOptions = LoadOptions(),
    extras: Extras = Extras(),  # noqa: B008
) -> Resumed | None:
    """Load a checkpoint to resume training. Every rank must call this.

    tag     None: the checkpoint that the folder's file `latest` names; without any checkpoint, load nothing
            and return None
    extras  the LR scheduler and other saved objects, which load their states

    A failure raises CheckpointError on every rank, and nothing is changed.
    """
    optimizer.unfinished.check_load("load_checkpoint")
    attempt, load = Attempt(optimizer, "load_checkpoint"), list[CheckpointLoad]()
    attempt(async_saves_of(optimizer).wait)
    optimizer.finish_update()
    elsewhere = set[str]()  # names of other pipeline stages
    if optimizer.communicators.pipe is not None:
        everyones = attempt.agree([clean_name(name) for part in own_and_made(module) for name in part])
        elsewhere.update(*everyones.values())

    def open_and_check() -> None:
        optimizer.catch_up()
        folder = local_path(directory)
        if tag is None and not holds_latest(folder):
            return
        source = open_checkpoint(folder, tag)
        load.append(CheckpointLoad(module, optimizer, source, wanted, extras, elsewhere))
        try:
            load[0].check()
        except CheckpointError:
            raise
        except Exception as error:
            reason = str(error) if isinstance(error, (ValueError, RuntimeError)) else repr(error)
            raise CheckpointError(f"{source.path}: {reason}. Nothing was loaded") from error

    attempt(open_and_check)
    try:
        found = attempt.agree([(str(each.source.path), each.source.identity) for each in load])
        _check_same_checkpoint(found)
        if not load:
            return None
        if checks := list(load[0].source.further_checks()):  # they read everything, so ranks divide them
            mine = checks[[*found].index(this_rank()) :: len(found)]
            attempt(lambda: [check() for check in mine])
            attempt.agree()
        load[0].change(attempt)
    finally:
        for each in load:
            each.source.close()
    shared = load[0].source.shared
    counters = {} if wanted.module_only else shared.get("counters", {})
    return Resumed(load[0].source.path, shared.get("client_state", {}), counters)


def _check_same_checkpoint(found: Mapping[int, list[tuple[str, str]]]) -> None:
    """Raise CheckpointError unless all ranks have found the same checkpoint, or none."""
    if len({str(each) for each in found.values()}) > 1:
        folders = {rank: each[0][0] if each else "none" for rank, each in found.items()}
        raise CheckpointError(
            f"ranks found different checkpoints: {folders}. If the paths are equal, a save has just replaced "
            "the checkpoint: load again. Nothing was loaded"
        )


class CheckpointLoad:
    """One rank's part of a load."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: ZeroOptimizer,
        source: Source,
        wanted: LoadOptions,
        extras: Extras,
        elsewhere: Collection[str] = (),
    ) -> None:
        """Collect this rank's tensors to load. `elsewhere`: names that other pipeline stages load."""
        self.elsewhere = elsewhere
        self.module, self.optimizer, self.source = module, optimizer, source
        self.wanted, self.extras = wanted, extras
        self.own_tensors, self.made = own_and_made(module)
        self.named = {**self.own_tensors, **self.made}
        self.keys: dict[str, str] = {}  # keys of the module's tensors, by name
        communicators = optimizer.communicators
        self.ranks = prod(each.size for each in communicators.everyone)
        # Whether the world size is that of the save, so that ranks can load their private data.
        self.same_ranks = len(source.savers) == self.ranks and this_rank() in source.savers
        pipe, about = (
            1 if communicators.pipe is None else communicators.pipe.size,
            source.shared.get("about", {}),
        )
        self.same_ranks = self.same_ranks and about.get("pipeline_ranks", 1) == pipe
        self.is_pipeline = communicators.pipe is not None or "pipeline_ranks" in about
        self.shared: Mapping[str, Any] = source.shared
        tensor = 1 if communicators.tensor is None else communicators.tensor.size
        self.same_ranks = self.same_ranks and about.get("tensor_ranks", 1) == tensor
        trains = not isinstance(optimizer.base, NoOptimizer)
        self.with_state = wanted.optimizer_states and not wanted.module_only and trains
        self.values = SourceValues(source)
        # Optimizer state of this rank alone: see [Note: a rank's own state] in `optim/step.py`.
        self.own_keys: list[str] = []
        self.own: dict[str, Chunk] = {}  # by name, once tensors are allocated

    # Before anything changes ---------------------------------------------------------------------

    def check(self) -> None:
        """Raise unless the checkpoint matches the model and can be read."""
        if self.wanted.module_only:  # a full load resets the accumulation, so only this one must check
            self.optimizer.check_between_steps("load_checkpoint(load_module_only=True)")
        if not self.with_state:
            self.optimizer.check_ranks_equal("loading parameters without the optimizer's state")
        self._match()
        if self.with_state:
            self._check_state()
        self.values.check(self._chunks())
        trained = {clean_name(member.name) for _, member in self.optimizer.sharded.places.values()}
        keys = {name: key for name, key in self.keys.items() if clean_name(name) not in trained}
        known = self.values.source_keys
        place = {name: known[key] for name, key in keys.items() if key in known}
        self.extra_state = saved_extra_state(self.source, self.made, place)
        self.objects, wanted = ObjectStates(self.source), self.wanted
        if wanted.lr_scheduler_states and not wanted.module_only:
            self._add_scheduler(self.extras.lr_scheduler)
        self.objects.add_extra_state(self.module, self.extra_state)
        if self.with_state:
            self.objects.add_kept(self.extras, self.same_ranks, self.ranks)

    def _add_scheduler(self, scheduler: Any) -> None:
        """Add the LR scheduler, whose state has to fit the parameter groups of this run."""
        members = group_members(self.optimizer) if self.is_pipeline else None
        self.objects.add_scheduler(scheduler, self.with_state, members)
        keeps_rates = isinstance(scheduler, LRScheduler)  # torch's keep one for each group, by position
        loads_alone = self.objects.has_scheduler and not self.with_state
        if keeps_rates and loads_alone and not self.is_pipeline:
            self._check_groups(self.shared.get("members", ()))

    def _match(self) -> None:
        """Match every tensor of the module with one of the source."""
        contents, excluded = self.optimizer.contents, set(self.source.shared.get("excluded", ()))
        names: dict[Tensor, list[str]] = {
            param: [clean_name(member.name)] for param, (_, member) in self.optimizer.sharded.places.items()
        }
        for name, value in self.named.items():
            if isinstance(value, Tensor):
                names.setdefault(value, []).append(clean_name(name))
        keys = {tensor: contents.key_of(tensor, known[0]) for tensor, known in names.items()}
        self.keys = {name: keys[v] for name, v in self.named.items() if isinstance(v, Tensor)}
        missing, wrong, used = list[str](), list[str](), set[str]()
        for tensor, known in names.items():
            stored = self._find(keys[tensor].partition("/")[0], known)
            if stored is None:
                missing += [known[0]] if known[0] not in excluded else []
                continue
            used.add(stored)
            self.values.source_keys[keys[tensor]] = stored
            wrong += _differences(known[0], tensor, self.source.tensors[stored])
        mine = {key.partition("/")[0].partition("@")[2] for key in keys.values()}
        unexpected = []
        for key in self.source.tensors.keys() - used:
            kind, _, name = key.partition("/")
            is_wanted = kind.partition("@")[0] in (PARAMETERS, BUFFERS) and kind.partition("@")[2] in mine
            if is_wanted and name not in self.elsewhere:
                unexpected.append(name)
        if self.source.savers:  # other formats do not separate extra state from tensors
            saved = self.source.shared["others"].keys()
            made = {clean_name(name) for name, value in self.made.items() if not isinstance(value, Tensor)}
            missing, unexpected = (
                [*missing, *(made - saved)],
                [*unexpected, *(saved - made - {*self.elsewhere})],
            )
        self._check_names(wrong, sorted(missing), sorted(unexpected))

    def _check_names(self, wrong: list[str], missing: Sequence[str], unexpected: Sequence[str]) -> None:
        """Raise CheckpointError if the checkpoint's tensors are not those of the model.

        `wrong` are messages about shapes and dtypes. Without `strict`, missing and unexpected names are
        only a warning.
        """
        where = self.source.path
        warnings = list(describe_unmatched(where, missing, unexpected))
        if self.wanted.strict:
            wrong, warnings = wrong + warnings, []
        if wrong:
            raise CheckpointError("; ".join(wrong) + ". Nothing was loaded")
        if excluded := self.source.shared.get("excluded"):
            warnings.append(f"{where} was saved without {listed(excluded)}, which keep their values")
        if warnings and this_rank() == 0:
            log.warning("; ".join(warnings))

    def _find(self, kind: str, names: Sequence[str]) -> str | None:
        """Return the key in the source of a tensor with these names, or None."""
        part = kind.partition("@")[1] + kind.partition("@")[2]
        for name in names:
            for each in (name, self.source.aliases.get(name)):
                for kind in (PARAMETERS, BUFFERS):
                    if each is not None and f"{kind}{part}/{each}" in self.source.tensors:
                        return f"{kind}{part}/{each}"
        return None

    def _check_state(self) -> None:
        shared = self.shared
        if "groups" not in shared:
            raise CheckpointError(
                f"{self.source.path} has no optimizer state. Load without it (load_optimizer_states=False). "
                "Nothing was loaded"
            )
        if self.is_pipeline:
            self.shared = shared = {**shared, **self._groups_by_name()}
        check_facts(self.optimizer.contents, shared)
        if this_rank() == 0:
            self._warn_of_changed_options()
        if not self.wanted.drop_errors:
            self._find_own_state()
        self._check_groups(shared.get("members", ()))
        check_rng_states(self.source.private(this_rank()).get("random"))

    def _find_own_state(self) -> None:
        """Find the compression errors and local steps that this rank saved.

        Raises CheckpointError if the number of ranks has changed, as no other rank can use them.
        """
        saved = [key for key in self.source.tensors if key.startswith(f"{OWN}/")]
        if saved and not self.same_ranks:
            raise CheckpointError(
                f"{self.source.path} holds the 1-bit compression errors and local steps of "
                f"{len(self.source.savers)} ranks, which {self.ranks} ranks cannot use. Load with "
                "drop_errors=True (or checkpoint.drop_errors in the configuration), which discards them. "
                "Nothing was loaded"
            )
        if saved:
            self.optimizer.contents.stepper.check_own_tensors(self.source.shared["stepper"])
        self.own_keys = [key for key in saved if key.startswith(f"{OWN}/{this_rank()}/")]
        self.values.source_keys.update({key: key for key in self.own_keys})

    def _warn_of_changed_options(self) -> None:
        """Warn about saved optimizer options that replace other values of this run."""
        is_loaded = self.wanted.lr_scheduler_states and self.extras.lr_scheduler is not None
        by_schedule = BY_SCHEDULE if is_loaded else ()
        pairs = zip(self.optimizer.param_groups, self.shared["groups"], strict=True)
        for number, (here, saved) in enumerate(pairs):
            skipped = {*OF_THIS_RUN, *by_schedule}
            both = [key for key in saved if key in here.keys() - skipped and not key.startswith(LIMITS)]
            values = {key: (_shown(saved[key]), _shown(here[key])) for key in both}
            if changed := [f"{key} {was}, not {now}" for key, (was, now) in values.items() if was != now]:
                log.warning(
                    "%s: parameter group %d uses the saved options in place of this run's: %s",
                    self.source.path,
                    number,
                    "; ".join(changed),
                )

    @property
    def _remedy(self) -> str:
        """What to load without, if the saved parameter groups are not those of this run."""
        if self.with_state:
            return "Or load without optimizer state (load_optimizer_states=False)."
        return "Or load without the LR scheduler (load_lr_scheduler_states=False)."

    def _groups_by_name(self) -> dict[str, Any]:
        """Find the saved options of each parameter group by its members. Stages may have other groups.

        Raises CheckpointError if the members of a group were saved with different options.
        """
        options, members = self.source.shared["groups"], self.source.shared.get("members", ())
        saved = {name: number for number, names in enumerate(members) for name in names}
        groups, facts = list[Any](), self.optimizer.facts()["groups"]
        for number, names in enumerate(group_members(self.optimizer)):
            found = {repr(options[saved[name]]): name for name in names if name in saved}
            if len(found) > 1:
                one, other, *_ = found.values()
                raise CheckpointError(
                    f"{one} and {other} are in the optimizer's parameter group {number}, but were saved in "
                    f"groups with different options. Pass the groups as they are in {self.source.path}. "
                    f"{self._remedy} Nothing was loaded"
                )
            known = next(iter(found.values()), None)
            groups.append(facts[number] if known is None else options[saved[known]])
        return {"groups": groups, "members": group_members(self.optimizer)}

    def _check_groups(self, members: Iterable[Sequence[str]]) -> None:
        """Raise CheckpointError if a parameter has moved to another parameter group since the save."""
        saved = {name: number for number, names in enumerate(members) for name in names}
        for number, names in enumerate(group_members(self.optimizer)):
            for name in names:
                if saved.get(name, number) != number:
                    raise CheckpointError(
                        f"{name} is in the optimizer's parameter group {number}, but was saved in group "
                        f"{saved[name]}, so it would get another group's options. Pass the groups in the "
                        f"order of {self.source.path}. {self._remedy} Nothing was loaded"
                    )

    def _chunks(self) -> list[Chunk]:
        """Return the chunks to read, including new tensors for the optimizer state."""
        contents, device = self.optimizer.contents, self.optimizer.communicators.device
        first: dict[Tensor, str] = {}
        for name, tensor in self.own_tensors.items():
            first.setdefault(tensor, name)
        whole = contents.whole({name: tensor for tensor, name in first.items()})
        chunks = [*contents.masters(), *contents.frozen(), *whole]
        chunks = [chunk for chunk in chunks if chunk.key in self.values.source_keys]
        self.state = NewState(contents, self.values) if self.with_state else None
        if self.state is None:
            return chunks
        for key in self.own_keys:
            stored = self.source.tensors[key]
            values = torch.empty(stored.numel, dtype=stored.dtype, device=device)
            self.own[key.split("/", 2)[2]] = Chunk(key, stored.shape, 0, values)
        return [*chunks, *self.state.chunks(), *self.own.values()]

    # Changes -------------------------------------------------------------------------------------

    def change(self, attempt: Attempt) -> None:
        """Write the checkpoint's values to the model, the optimizer and the other objects.

        Every rank must call this, after `check` has succeeded on all ranks.
        """
        attempt(self._load_objects)
        try:
            attempt.agree()
        except BaseException:
            self.objects.roll_back()
            raise
        attempt(self.fill)
        try:
            attempt.agree()
            publish_loaded(self.optimizer)
            if self.with_state:
                self.optimizer.start_over()
            attempt(self._restore_rng)
            attempt.agree()
        except Exception as error:
            message = (
                f"{error}. Some parameters are changed already and others are not. Load a checkpoint again"
            )
            if not isinstance(error, CheckpointError):
                raise CheckpointError(message) from error
            error.args = (message,)  # the error itself, which is marked to be printed by one rank only
            raise

    def _load_objects(self) -> None:
        """Load the states of the objects. Raises CheckpointError if a schedule is of other groups."""
        self.objects.load()
        if self.with_state or not self.objects.has_scheduler:
            return
        rates, groups = self.extras.lr_scheduler.get_last_lr(), self.optimizer.param_groups
        if len(rates) != len(groups):
            raise CheckpointError(
                f"the LR scheduler in {self.source.path} has the learning rates of {len(rates)} parameter "
                f"groups, but the optimizer has {len(groups)}. {self._remedy} Nothing was loaded"
            )

    def fill(self) -> None:
        """Read this rank's ranges of master weights, shards and optimizer state."""
        shared, stepper = self.source.shared, self.optimizer.contents.stepper
        if self.with_state:
            stepper.load_own_tensors({})
        if "asleep" in shared:
            self.optimizer.wake_all_but(shared["asleep"])
        chunks = self._chunks()
        self.values.read(chunks)
        copy_back(chunks)
        if self.state is not None:
            self.state.install()
            load_facts(self.optimizer.contents, self.optimizer.scaler, self._facts())
            stepper.load_own_tensors({name: chunk.values for name, chunk in self.own.items()})
        elif self.objects.has_scheduler:
            set_learning_rates(self.optimizer.param_groups, self.extras.lr_scheduler.get_last_lr())
        self.optimizer.zero_grad()
        if self.same_ranks:
            self._load_private_buffers()
        load_others(self.module, self.extra_state)  # again, as hooks may compute from the new parameters

    def _facts(self) -> dict[str, Any]:
        """Return the saved facts that apply here. A static loss scale is that of the configuration."""
        facts, scaler = dict(self.shared), self.optimizer.scaler
        is_alike = facts.get("scaler", {}).keys() == scaler.state_dict().keys()
        if not (is_alike and isinstance(scaler, DynamicScale)):
            facts.pop("scaler", None)
        return facts

    def _load_private_buffers(self) -> None:
        """Restore buffers that differed between ranks."""
        own = self.source.private(this_rank()).get("buffers", {})
        targets = {chunk.key: chunk for chunk in self._chunks() if chunk.key.startswith(BUFFERS)}
        for key, values in own.items():
            if key in targets:
                targets[key].values.copy_(values)
        copy_back(targets.values())

    def _restore_rng(self) -> None:
        """Restore the random number generators, if the world size is unchanged."""
        if not self.with_state:
            return
        private = self.source.private(this_rank())
        if self.same_ranks and "random" in private:
            restore_rng_states(private["random"])
        elif this_rank() == 0:
            log.warning(
                "%s: random number generators were not restored: their states were saved at another world "
                "size, or not at all",
                self.source.path,
            )


def _differences(name: str, tensor: Tensor, stored: StoredTensor) -> Iterator[str]:
    """Yield a message for each mismatch, in shape or dtype, of a tensor and its stored counterpart."""
    if tuple(tensor.shape) != stored.shape:
        yield f"{name} has shape {tuple(tensor.shape)}, but {stored.shape} in the checkpoint"
    if tensor.dtype != stored.dtype and not (tensor.is_floating_point() and stored.dtype.is_floating_point):
        yield f"{name} is {tensor.dtype}, but {stored.dtype} in the checkpoint"


def _shown(option: Any) -> str:
    return repr(tuple(option) if isinstance(option, list) else option)
