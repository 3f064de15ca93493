"""Save everything that a run goes on from: each rank its share, in one folder that appears when all is there.

[Note: a save] The ranks meet three times: to see that they mean the same save, to say that their files are on
the disk, and to hear that it is published. A failure of one rank ends the save on all of them; what was there
before stays.
"""

import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_full.checkpoint import disk, randomness
from zero_full.checkpoint.failure import Attempt, CheckpointError
from zero_full.checkpoint.folder import (
    FORMAT,
    VERSION,
    check_tag,
    discard,
    partial_folder,
    publish,
    refuse_strange,
    retain,
    write_manifest,
)
from zero_full.checkpoint.rank_file import Payload, write
from zero_full.comm.topology import this_rank
from zero_full.shard.checksum import digest
from zero_full.shard.contents import BUFFERS, PARAMETERS, Chunk, plain
from zero_full.shard.gathered import names_and_values
from zero_full.shard.optimizer import ZeroOptimizer
from zero_full.shard.own_part import facts_of
from zero_full.wording import ranks_listed

log = logging.getLogger("zero_full")
CALL = "save_checkpoint"
Rows = Mapping[str, Mapping[str, int]]  # what a manifest says of files


@dataclass(frozen=True)
class Extras:
    """What a run has beside a module and its optimizer. All of it is plain data, or has a `state_dict`."""

    lr_scheduler: Any = None
    counters: Mapping[str, Any] = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)  # objects with `state_dict`, each rank its own


@dataclass(frozen=True)
class SaveOptions:
    """How a checkpoint is saved; the same on every rank."""

    save_latest: bool = True  # `load_checkpoint` finds this one without a tag
    exclude_frozen_parameters: bool = False  # leave out what has requires_grad=False
    keep_last: int | None = None  # of this model in this folder; older ones are removed, and cut-off saves


@dataclass(frozen=True)
class CheckpointSave:
    """One save, as one rank takes part in it."""

    directory: Path
    tag: str
    nonce: str
    payload: Payload
    about: Mapping[str, Any]
    is_first: bool  # the rank that makes the folder, and publishes it
    options: SaveOptions

    @property
    def folder(self) -> Path:
        """Where files are until all are there."""
        return partial_folder(self.directory, self.tag, self.nonce)

    def write(self) -> Rows:
        """This rank's files."""
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder} is not there, but rank 0 has made it: save into a folder that all hosts share"
            )
        return write(self.folder, self.payload)

    def commit(self, rows: Mapping[int, Rows]) -> None:
        """All ranks' files are there: the folder becomes a checkpoint."""
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "saved_at": time.time(),
            "ranks": sorted(rows),
            "files": {name: dict(row) for each in rows.values() for name, row in each.items()},
            "about": {**self.about, "tag": self.tag},
        }
        write_manifest(self.folder, manifest)
        publish(self.folder, self.tag, self.nonce, self.options.save_latest)
        if self.options.keep_last is not None:
            try:
                retain(self.directory, self.options.keep_last, self.tag, self.nonce)
            except (OSError, CheckpointError) as error:  # this one is saved all the same
                log.warning("older checkpoints in %s could not be removed: %s", self.directory, error)

    def discard(self) -> None:
        """What was written goes."""
        if self.is_first:
            discard(self.folder)


@torch.no_grad()
def save_checkpoint(
    module: nn.Module,
    optimizer: ZeroOptimizer,
    directory: str | PathLike[str],
    tag: str,
    client_state: Mapping[str, Any] | None = None,
    extras: Extras | None = None,
    options: SaveOptions | None = None,
) -> Path:
    """Save a run between two steps; returns the folder. Every rank must call this.

    client_state  plain data of yours, which `load_checkpoint` returns: rank 0's
    extras        the schedule, counters and other objects of the loop

    CheckpointError, on every rank, if it fails; what was there before stays then.
    """
    attempt, place = Attempt(optimizer, CALL), (Path(directory).absolute(), tag)
    told = dict(client_state or {}), extras or Extras()
    save = prepare(attempt, module, optimizer, place, told, options or SaveOptions())
    finish(save, Attempt(optimizer, CALL))
    return Path(directory) / tag


def finish(save: CheckpointSave, attempt: Attempt) -> None:
    """Write, agree, publish. See [Note: a save]."""
    rows: dict[str, Any] = {}
    try:
        attempt(lambda: rows.update(save.write()))
        everyones = attempt.agree(rows)
        if save.is_first:
            attempt(partial(save.commit, everyones))
        attempt.agree()
    except BaseException:
        save.discard()
        raise


def prepare(
    attempt: Attempt,
    module: nn.Module,
    optimizer: ZeroOptimizer,
    place: tuple[Path, str],
    told: tuple[Mapping[str, Any], Extras],
    options: SaveOptions,
) -> CheckpointSave:
    """What this rank saves, and that all ranks mean the same save: its folder is there.

    place  the folder, and the tag
    told   the client state, and the rest
    """
    (directory, tag), (client_state, extras) = place, told
    is_first = all(group.rank == 0 for group in optimizer.groups.everyone)
    taken: list[_Taken] = []
    attempt(lambda: taken.append(_Taken(module, optimizer, options.exclude_frozen_parameters)))
    attempt(lambda: _check(tag, options.keep_last))
    buffers = taken[0].buffers() if taken else {}
    same = {"directory": str(directory), "tag": tag, **asdict(options)}
    digests = {key: digest(chunk.values) for key, chunk in buffers.items()}
    everyones = attempt.agree({"same": same, "nonce": secrets.token_hex(4), "buffers": digests})
    _refuse_others({rank: told["same"] for rank, told in everyones.items()})
    nonce, firsts = everyones[min(everyones)]["nonce"], everyones[min(everyones)]["buffers"]
    own = {key: chunk.values for key, chunk in buffers.items() if firsts.get(key) != digests[key]}
    private = {"random": randomness.states(), "buffers": own}
    made: list[CheckpointSave] = []

    def make() -> None:
        private["kept"] = {name: each.state_dict() for name, each in extras.kept.items()}
        shared = taken[0].shared(extras, client_state) if is_first else {}
        numbers = optimizer.contents.numbers(every=False)
        payload = Payload(
            this_rank(),
            taken[0].shares(is_first),
            {"numbers": numbers, "private": private, "shared": shared},
        )
        payload.encoded()  # what cannot be saved is told before anything is written
        about = about_of(module, optimizer, len(everyones), extras.counters)
        made.append(CheckpointSave(directory, tag, nonce, payload, about, is_first, options))
        if is_first:
            disk.make_folders(directory)
            refuse_strange(directory, tag, about["model"])
            disk.make_folder(made[0].folder)

    attempt(make)
    try:
        attempt.agree()
    except BaseException:
        for save in made:
            save.discard()
        raise
    return made[0]


def about_of(
    module: nn.Module, optimizer: ZeroOptimizer, ranks: int, counters: Mapping[str, Any]
) -> dict[str, Any]:
    """What a person wants to know of a checkpoint, and whose it is."""
    shapes = sorted((plain(name), tuple(p.shape)) for name, p in module.named_parameters())
    dtypes = sorted({str(flat.dtype).removeprefix("torch.") for flat in optimizer.flats()})
    return {
        "world_size": ranks,
        "stage": optimizer.settings.stage,
        "step": counters.get("global_steps"),
        "parameters_in": dtypes,
        "optimizer": type(optimizer.base).__name__,
        "torch": torch.__version__,
        "model": blake2b(repr(shapes).encode(), digest_size=8).hexdigest(),
    }


def group_members(optimizer: ZeroOptimizer) -> list[list[str]]:
    """The names of the parameters in each group of the optimizer."""
    places = optimizer.parts.places
    return [
        [plain(places[p][1].name) for p in group["params"] if p in places] for group in optimizer.param_groups
    ]


def _check(tag: str, keep_last: int | None) -> None:
    check_tag(tag)
    if keep_last is not None and keep_last < 1:
        raise CheckpointError(f"keep_last is {keep_last}: at least this one must be kept")


def _refuse_others(same: Mapping[int, Mapping[str, Any]]) -> None:
    """CheckpointError if ranks mean different saves."""
    for key in next(iter(same.values())):
        by_value: dict[Any, list[int]] = {}
        for rank, told in same.items():
            by_value.setdefault(told[key], []).append(rank)
        if len(by_value) > 1:
            each = "; ".join(f"{value!r} on {ranks_listed(ranks)}" for value, ranks in by_value.items())
            raise CheckpointError(
                f"ranks would save with another {key}: {each}. Every rank must save the same (a time of day "
                "in a name is another one on each rank)"
            )


class _Taken:
    """What this rank has, looked at between two steps."""

    def __init__(self, module: nn.Module, optimizer: ZeroOptimizer, exclude_frozen: bool) -> None:
        optimizer.refuse_unfinished("save_checkpoint")
        optimizer.catch_up()
        self.optimizer = optimizer
        self.named = names_and_values(module)
        self.frozen = [plain(n) for n, p in module.named_parameters() if not p.requires_grad]
        self.excluded = self.frozen if exclude_frozen else []
        first: dict[Tensor, str] = {}
        for param, (_, member) in optimizer.parts.places.items():
            first[param] = member.name
        for name, value in self.named.items():
            if isinstance(value, Tensor):
                first.setdefault(value, name)
        self.first = first
        contents = optimizer.contents
        whole = contents.whole({name: tensor for tensor, name in first.items()})
        self.chunks = [*contents.masters(), *contents.state(), *contents.frozen(), *whole]

    def buffers(self) -> dict[str, Chunk]:
        """What ranks may have different values of."""
        return {c.key: c for c in self.chunks if c.key.startswith(BUFFERS)}

    def shares(self, is_first: bool) -> list[Chunk]:
        """What this rank writes. The first one writes buffers, which may have other values on each rank."""
        left_out = set(self.excluded)
        shares = []
        for chunk in self.chunks:
            kind, _, name = chunk.key.partition("/")
            if kind.startswith(BUFFERS):
                shares += [chunk] if is_first else []
            elif not (kind.startswith(PARAMETERS) and name in left_out):
                shares.append(chunk.share())
        return shares + (self._empty() if is_first else [])

    def _empty(self) -> list[Chunk]:
        """Tensors without elements, of which no rank has a range."""
        empty = [(t, name) for t, name in self.first.items() if not t.numel()]
        keys = [(self.optimizer.contents.key_of(t, name), t) for t, name in empty]
        return [Chunk(key, tuple(t.shape), 0, t.new_empty(0)) for key, t in keys]

    def shared(self, extras: Extras, client_state: Mapping[str, Any]) -> dict[str, Any]:
        """What is no range of a tensor, and the same for all ranks."""
        others = {name: value for name, value in self.named.items() if not isinstance(value, Tensor)}
        names = {name: self.first[v] for name, v in self.named.items() if isinstance(v, Tensor)}
        scheduler = extras.lr_scheduler
        return {
            **facts_of(self.optimizer),
            "counters": dict(extras.counters),
            "members": group_members(self.optimizer),
            "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
            **({} if scheduler is None else {"schedule": type(scheduler).__name__}),
            "client_state": dict(client_state),
            "frozen": self.frozen,
            "excluded": self.excluded,
            "aliases": {plain(name): plain(first) for name, first in names.items() if name != first},
            "others": others,
        }
