"""CheckpointLoad what a run goes on from: at any number of ranks, stage and precision, all of it or nothing.

[Note: a load] First everything is compared and every byte that this rank needs is verified; only when all
ranks are content, anything is changed. Each rank reads its own ranges.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_full.checkpoint import randomness
from zero_full.checkpoint.background import background_of
from zero_full.checkpoint.failure import Attempt, CheckpointError
from zero_full.checkpoint.reading import holds_latest, open_checkpoint
from zero_full.checkpoint.resharding import fill
from zero_full.checkpoint.save import Extras
from zero_full.checkpoint.source import Source, StoredTensor
from zero_full.comm.topology import this_rank
from zero_full.precision.scaler import DynamicScale
from zero_full.shard.base import NoOptimizer
from zero_full.shard.contents import BUFFERS, PARAMETERS, Chunk, NewState, entry_of, plain, state_key
from zero_full.shard.flat import GatherState
from zero_full.shard.gathered import load_others, names_and_values
from zero_full.shard.optimizer import ZeroOptimizer
from zero_full.shard.own_part import refuse_other_facts, take_facts, wake_all_but
from zero_full.wording import listed

log = logging.getLogger("zero_full")


@dataclass(frozen=True)
class LoadOptions:
    """What of a checkpoint is to be loaded."""

    strict: bool = True  # every parameter and buffer must be there, and none besides
    optimizer_states: bool = True  # and with them what else a run goes on from, such as random numbers
    lr_scheduler_states: bool = True
    module_only: bool = False


@dataclass(frozen=True)
class Resumed:
    """What a load has found."""

    path: Path
    client_state: dict[str, Any]
    counters: dict[str, Any] = field(default_factory=dict)


@torch.no_grad()
def load_checkpoint(
    module: nn.Module,
    optimizer: ZeroOptimizer,
    directory: str | PathLike[str],
    tag: str | None = None,
    wanted: LoadOptions = LoadOptions(),
    extras: Extras = Extras(),  # noqa: B008
) -> Resumed | None:
    """Go on from a checkpoint. Every rank must call this.

    tag     None: the one that the folder's file `latest` names; if there is no such file, nothing is loaded
            and the answer is None
    extras  the schedule and other objects that were saved, which are given their state

    CheckpointError if anything is wrong, on every rank; nothing is changed then.
    """
    background_of(optimizer).wait()
    attempt, load = Attempt(optimizer), list[CheckpointLoad]()

    def open_and_check() -> None:
        optimizer.catch_up()
        if tag is not None or holds_latest(Path(directory)):
            source = open_checkpoint(Path(directory), tag)
            load.append(CheckpointLoad(module, optimizer, source, wanted, extras))
            load[0].check()

    attempt(open_and_check)
    try:
        found = attempt.agree(str(load[0].source.path) if load else None)
        if len(set(found.values())) > 1:
            raise CheckpointError(f"ranks find different folders: {found}. Nothing was loaded")
        if not load:
            return None
        attempt(load[0].take_schedule)
        attempt.agree()
        attempt(load[0].fill)
        attempt.agree()
        load[0].finish()
        attempt.agree()
    finally:
        for each in load:
            each.source.close()
    shared = load[0].source.shared
    counters = {} if wanted.module_only else shared.get("counters", {})
    return Resumed(load[0].source.path, shared.get("client_state", {}), counters)


class CheckpointLoad:
    """One load, as one rank takes part in it."""

    def __init__(
        self, module: nn.Module, optimizer: ZeroOptimizer, source: Source, wanted: LoadOptions, extras: Extras
    ) -> None:
        self.module, self.optimizer, self.source = module, optimizer, source
        self.wanted, self.extras = wanted, extras
        self.named = names_and_values(module)
        trains = not isinstance(optimizer.base, NoOptimizer)
        self.with_state = wanted.optimizer_states and not wanted.module_only and trains
        self.values = SourceValues(source)

    # Before anything changes ---------------------------------------------------------------------

    def check(self) -> None:
        """CheckpointError unless everything fits and can be read."""
        self._match()
        if self.with_state:
            self._check_state()
        self.values.check(self._chunks())

    def _match(self) -> None:
        """Find every tensor of the module in the source."""
        contents, shared = self.optimizer.contents, self.source.shared
        names: dict[Tensor, list[str]] = {
            param: [plain(member.name)] for param, (_, member) in self.optimizer.parts.places.items()
        }
        for name, value in self.named.items():
            if isinstance(value, Tensor):
                names.setdefault(value, []).append(plain(name))
        keys = {tensor: contents.key_of(tensor, known[0]) for tensor, known in names.items()}
        missing, wrong, used = list[str](), list[str](), set[str]()
        for tensor, known in names.items():
            stored = self._find(keys[tensor].partition("/")[0], known)
            if stored is None:
                missing += [known[0]] if known[0] not in shared.get("excluded", ()) else []
                continue
            used.add(stored)
            self.values.place[keys[tensor]] = stored
            wrong += _differences(known[0], tensor, self.source.tensors[stored])
        mine = {key.partition("/")[0].partition("@")[2] for key in keys.values()}
        unexpected = [key for key in self.source.tensors if _is_of(key, mine) and key not in used]
        where = self.source.path
        if missing and self.wanted.strict:
            wrong.append(f"{where} lacks {listed(sorted(missing))}")
        if unexpected and self.wanted.strict:
            extra = sorted(key.partition("/")[2] for key in unexpected)
            wrong.append(f"{where} has {listed(extra)}, which the model lacks")
        if wrong:
            raise CheckpointError("; ".join(wrong) + ". Nothing was loaded")

    def _find(self, kind: str, names: Sequence[str]) -> str | None:
        """The key under which a tensor with these names is stored."""
        part = kind.partition("@")[1] + kind.partition("@")[2]
        for name in names:
            for each in (name, self.source.aliases.get(name)):
                for kind in (PARAMETERS, BUFFERS):
                    if each is not None and f"{kind}{part}/{each}" in self.source.tensors:
                        return f"{kind}{part}/{each}"
        return None

    def _check_state(self) -> None:
        shared = self.source.shared
        if "groups" not in shared:
            raise CheckpointError(
                f"{self.source.path} has no state of an optimizer: load without it "
                "(load_optimizer_states=False). Nothing was loaded"
            )
        refuse_other_facts(self.optimizer, shared)
        if self._takes_schedule() and shared.get("lr_scheduler") is None:
            raise CheckpointError(
                f"{self.source.path} has no state of a schedule: load without it "
                "(load_lr_scheduler_states=False). Nothing was loaded"
            )
        self._kept()

    def _takes_schedule(self) -> bool:
        wanted = self.wanted.lr_scheduler_states and not self.wanted.module_only
        return wanted and self.extras.lr_scheduler is not None

    def _kept(self) -> dict[str, Any]:
        """The saved states of the objects that are to go on: this rank's, or what all ranks had alike."""
        if not self.extras.kept:
            return {}
        about = self.source.shared["about"]
        everyones = [self.source.private(rank).get("kept", {}) for rank in range(about["world_size"])]
        same_ranks = about["world_size"] == self._ranks()
        found = {}
        for name in self.extras.kept:
            states = [each[name] for each in everyones if name in each]
            if len(states) < len(everyones):
                raise CheckpointError(f"{self.source.path} has no state of {name}. Nothing was loaded")
            if not same_ranks and any(repr(state) != repr(states[0]) for state in states):
                raise CheckpointError(
                    f"{name} was saved by {len(states)} ranks, each its own state, and here are "
                    f"{self._ranks()}: nobody can say which is whose. Let its state_dict be the same on all "
                    "ranks. Nothing was loaded"
                )
            found[name] = states[this_rank()] if same_ranks else states[0]
        return found

    def _ranks(self) -> int:
        groups = self.optimizer.groups
        model = 1 if groups.model is None else groups.model.size
        return groups.dense.shard.size * groups.dense.across.size * model

    def _chunks(self) -> list[Chunk]:
        """Where values go; with room for the optimizer's state."""
        contents = self.optimizer.contents
        first: dict[Tensor, str] = {}
        for name, value in self.named.items():
            if isinstance(value, Tensor):
                first.setdefault(value, name)
        whole = contents.whole({name: tensor for tensor, name in first.items()})
        chunks = [*contents.masters(), *contents.frozen(), *whole]
        chunks = [chunk for chunk in chunks if chunk.key in self.values.place]
        self.state = NewState(contents, self.values) if self.with_state else None
        return chunks if self.state is None else [*chunks, *self.state.chunks()]

    # Changes -------------------------------------------------------------------------------------

    def take_schedule(self) -> None:
        """Give the schedule its state; it keeps its own if that fails."""
        if not self._takes_schedule():
            return
        schedule = self.extras.lr_scheduler
        before = schedule.state_dict()
        try:
            schedule.load_state_dict(self.source.shared["lr_scheduler"])
        except Exception as error:
            schedule.load_state_dict(before)
            raise CheckpointError(
                f"the schedule cannot take the state in {self.source.path}: {error!r}. Nothing was loaded"
            ) from error

    def fill(self) -> None:
        """Read this rank's ranges. Parameters follow when all ranks are done."""
        shared = self.source.shared
        if "asleep" in shared:
            wake_all_but(self.optimizer, shared["asleep"])
        try:
            self.values.read(self._chunks())
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"{error}. Some parameters are changed already: load again") from error
        if self.state is not None:
            self.state.install()
            take_facts(self.optimizer, self._facts())
        self.optimizer.zero_grad()
        load_others(self.module, {k: v for k, v in shared.get("others", {}).items() if k in self.named})
        if shared["about"].get("world_size") == self._ranks():
            self._take_own_buffers()

    def _facts(self) -> dict[str, Any]:
        """Those that mean something here: a static loss scale is what the configuration says."""
        facts, scaler = dict(self.source.shared), self.optimizer.scaler
        known = facts.get("scaler", {}).keys() == scaler.state_dict().keys()
        if not (known and isinstance(scaler, DynamicScale)):
            facts.pop("scaler", None)
        return facts

    def _take_own_buffers(self) -> None:
        own = self.source.private(this_rank()).get("buffers", {})
        targets = {chunk.key: chunk for chunk in self._chunks() if chunk.key.startswith(BUFFERS)}
        for key, values in own.items():
            if key in targets:
                targets[key].values.copy_(values)

    def finish(self) -> None:
        """Parameters follow their masters, on all ranks; the loop's own objects go on."""
        optimizer = self.optimizer
        optimizer.publish()
        for flat in optimizer.frozen:
            flat.node_copy = None
            if flat.state is GatherState.WHOLE:
                flat.collect()
        if not self.with_state:
            return
        for name, state in self._kept().items():
            self.extras.kept[name].load_state_dict(state)
        private = self.source.private(this_rank())
        if self.source.shared["about"].get("world_size") == self._ranks() and "random" in private:
            randomness.restore(private["random"])
        elif this_rank() == 0:
            log.warning(
                "%s: random numbers do not go on where they were: their states were saved by another number "
                "of ranks, or not at all",
                self.source.path,
            )


def _is_of(key: str, parts: Iterable[str]) -> bool:
    """Whether it is a parameter or a buffer that concerns a rank with these parts of the model."""
    kind, _, part = key.partition("/")[0].partition("@")
    return kind in (PARAMETERS, BUFFERS) and part in parts


def _differences(name: str, tensor: Tensor, stored: StoredTensor) -> Iterator[str]:
    if tuple(tensor.shape) != stored.shape:
        yield f"{name} has shape {tuple(tensor.shape)}, but {stored.shape} in the checkpoint"
    if tensor.is_floating_point() != stored.dtype.is_floating_point:
        yield f"{name} is {tensor.dtype}, but {stored.dtype} in the checkpoint"


class SourceValues:
    """A source as `Values`: under the names that the model has, which may be others of tied parameters.

    `place` must be complete before anything is asked for.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.place: dict[str, str] = {}  # of each tensor of the model, by key: its key in the source

    def _entries(self) -> Iterator[tuple[str, str]]:
        """Each entry of the optimizer's state: its key here, and there."""
        reverse: dict[str, list[str]] = {}
        for mine, theirs in self.place.items():
            reverse.setdefault(theirs, []).append(mine)
        for key in self.source.tensors:
            if found := entry_of(key):
                for mine in reverse.get(found[0], ()):
                    yield state_key(mine, found[1]), key

    @cached_property
    def places(self) -> dict[str, str]:
        """Of everything that can be read, by its key here."""
        return {**self.place, **dict(self._entries())}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of each tensor."""
        return {mine: self.source.tensors[theirs].shape for mine, theirs in self.places.items()}

    @cached_property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """In which they are stored."""
        return {mine: self.source.tensors[theirs].dtype for mine, theirs in self.places.items()}

    @cached_property
    def numbers(self) -> Mapping[str, Mapping[str, Any]]:
        """What the optimizer keeps of each parameter as a whole."""
        return {mine: self.source.numbers.get(theirs, {}) for mine, theirs in self.place.items()}

    def check(self, chunks: Sequence[Chunk]) -> None:
        """CheckpointError unless all of it is there, as it was written."""
        places = self.places
        for chunk in chunks:
            stored = places[chunk.key]
            assert prod(chunk.shape) == self.source.tensors[stored].numel, chunk
            for start, stop in self.source.parts(stored, chunk.start, chunk.stop):
                self.source.verify(stored, start, stop)

    def read(self, chunks: Sequence[Chunk]) -> None:
        """Put values into the chunks, converted to their types."""
        places = self.places
        fill(
            self.source,
            [Chunk(places[c.key], c.shape, c.start, c.values, c.holder) for c in chunks],
        )
