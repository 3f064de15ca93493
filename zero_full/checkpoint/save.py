"""Save a checkpoint: each rank writes its share, and the folder is published once all files are complete.

[Note: a save] The ranks synchronize four times: to check that their arguments agree, before writing, when
their files are on the disk, and when the checkpoint is published. A failure of one rank ends the save on all
ranks, and earlier checkpoints stay unchanged. An asynchronous save returns after the second synchronization:
see [Note: asynchronous saves] in `async_save.py`.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_full._compat import clean_name
from zero_full.checkpoint import disk
from zero_full.checkpoint.async_save import AsyncSave, async_saves_of
from zero_full.checkpoint.failure import Attempt, check_same_arguments
from zero_full.checkpoint.folder import (
    CheckpointSave,
    SaveOptions,
    check_replaceable,
    check_tag,
    local_path,
)
from zero_full.checkpoint.rank_file import payload_of
from zero_full.checkpoint.rng_state import rng_states
from zero_full.comm.store_messages import longest_timeout
from zero_full.comm.topology import this_rank
from zero_full.errors import CheckpointError
from zero_full.shard.access.gathered_parameters import names_and_values
from zero_full.shard.contents.keys import BUFFERS, PARAMETERS, STATE
from zero_full.shard.contents.state import Chunk
from zero_full.shard.group.checksum import digest
from zero_full.shard.step.optimizer import ZeroOptimizer

CALL = "save_checkpoint"


@dataclass(frozen=True)
class Extras:
    """State of a training run beyond module and optimizer: plain data, or objects with a `state_dict`."""

    lr_scheduler: Any = None
    counters: Mapping[str, Any] = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)  # objects with `state_dict`, saved for each rank


@torch.no_grad()
def save_checkpoint(
    module: nn.Module,
    optimizer: ZeroOptimizer,
    directory: str | PathLike[str],
    tag: str,
    client_state: Mapping[str, Any] | None = None,
    extras: Extras = Extras(),
    options: SaveOptions = SaveOptions(),  # noqa: B008
) -> Path:
    """Save a checkpoint between two steps, and return its folder. Every rank must call this.

    client_state  plain data of the caller, which `load_checkpoint` returns; rank 0's is saved
    extras        the LR scheduler, counters and other objects of the training loop

    A failure raises CheckpointError on every rank, and earlier checkpoints stay unchanged. An asynchronous
    save raises it from the next step, save or load, or from `wait_for_checkpoint`.
    """
    attempt, saves = Attempt(optimizer, CALL), async_saves_of(optimizer)
    attempt(saves.wait)
    optimizer.finish_update()
    place = Path(directory).absolute()

    def collect() -> SaveContents:
        local_path(directory)
        check_tag(tag)
        if options.keep_last is not None and options.keep_last < 1:
            raise CheckpointError(f"keep_last is {options.keep_last}, but must be at least 1")
        optimizer.check_between_steps(CALL)
        optimizer.catch_up()
        return SaveContents(module, optimizer, options.exclude_frozen_parameters)

    contents = attempt(collect)
    buffers = {} if contents is None else contents.buffers()
    same = {"directory": str(place), "tag": tag, **asdict(options)}
    digests = {key: digest(chunk.values) for key, chunk in buffers.items()}
    mine = {"same": same, "nonce": secrets.token_hex(4), "buffers": digests}
    communicators = optimizer.communicators
    if (
        communicators.pipe is not None
        and contents is not None
        and communicators.dense.shard_comm.rank == communicators.dense.replica_comm.rank == 0
    ):
        mine["names"] = contents.names()  # of this rank's pipeline stages
    everyones = attempt.agree(mine)
    names = merged_names([each["names"] for each in everyones.values() if "names" in each])
    check_same_arguments({rank: each["same"] for rank, each in everyones.items()})
    is_first, nonce = this_rank() == min(everyones), everyones[min(everyones)]["nonce"]
    firsts = {k: v for _, each in sorted(everyones.items(), reverse=True) for k, v in each["buffers"].items()}
    own = {key: chunk.values for key, chunk in buffers.items() if firsts[key] != digests[key]}

    def begin() -> CheckpointSave:
        assert contents is not None  # else `agree` has raised
        kept = {name: each.state_dict() for name, each in extras.kept.items()}
        schedule = {} if communicators.pipe is None else stage_schedule(optimizer, extras.lr_scheduler)
        plain = {
            "numbers": optimizer.contents.numbers(every=False),
            "private": {"random": rng_states(), "buffers": own, "kept": kept, **schedule},
            "shared": contents.shared(extras, client_state or {}, names) if is_first else {},
        }
        payload = payload_of(this_rank(), contents.shares(), plain)
        if options.asynchronous:
            payload = saves.staging.copy(payload)
        about = about_of(module, optimizer, len(everyones), extras.counters, names)
        save = CheckpointSave(place, tag, nonce, payload, about, tuple(everyones), options)
        if is_first:
            disk.make_folders(place)
            check_replaceable(place, tag, about["model"])
            disk.make_folder(save.folder)
        return save

    save = attempt(begin)
    try:
        attempt.agree()
        assert save is not None
        if options.asynchronous:
            saves.running = AsyncSave(save, longest_timeout(optimizer.communicators.everyone))
            return Path(directory) / tag
        attempt = Attempt(optimizer, CALL)
        rows = attempt.agree(attempt(save.write))
        if is_first:
            attempt(partial(save.commit, rows))
        attempt.agree()
    except BaseException:
        if save is not None:
            save.discard()
        raise
    return Path(directory) / tag


def about_of(
    module: nn.Module,
    optimizer: ZeroOptimizer,
    ranks: int,
    counters: Mapping[str, Any],
    names: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the checkpoint's summary for people, with a hash that identifies the model.

    names  of all pipeline stages, see `merged_names`; None: the module is the whole model
    """
    shapes = shapes_of(module) if names is None else sorted(names["shapes"])
    pipe, tensor = optimizer.communicators.pipe, optimizer.communicators.tensor
    stages = {"pipeline_ranks": pipe.size} if pipe is not None else {}
    if tensor is not None:
        stages["tensor_ranks"] = tensor.size
    dtypes = sorted({str(flat.dtype).removeprefix("torch.") for flat in optimizer.sharded.flats})
    return {
        "world_size": ranks,
        "stage": optimizer.settings.stage,
        "step": counters.get("global_steps"),
        "parameters_in": dtypes,
        **stages,
        "optimizer": type(optimizer.base).__name__,
        "torch": torch.__version__,
        "model": blake2b(repr(shapes).encode(), digest_size=8).hexdigest(),
    }


def shapes_of(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of the module's parameters, sorted."""
    return sorted((clean_name(name), tuple(p.shape)) for name, p in module.named_parameters())


def merged_names(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return `SaveContents.names` of all pipeline stages together; None without a pipeline."""
    if not parts:
        return None
    merged = merged_groups(parts)
    for key, value in parts[0].items():
        values = [part[key] for part in parts]
        if key in merged:
            continue
        if isinstance(value, dict):
            merged[key] = {name: each for part in values for name, each in part.items()}
        else:
            merged[key] = list(dict.fromkeys(name for part in values for name in part))
    return merged


def merged_groups(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the parameter groups of all pipeline stages, with their members.

    Groups of one number and with equal options are one group. Stages may have other groups, for example with
    a learning rate for each layer.
    """
    found = dict[tuple[int, str], tuple[Any, dict[str, None]]]()
    for part in parts:
        for number, (options, names) in enumerate(zip(part["groups"], part["members"], strict=True)):
            _, members = found.setdefault((number, repr(options)), (options, {}))
            members.update(dict.fromkeys(names))
    ordered = [each for _, each in sorted(found.items(), key=lambda pair: pair[0][0])]
    return {"groups": [options for options, _ in ordered], "members": [[*names] for _, names in ordered]}


def stage_schedule(optimizer: ZeroOptimizer, scheduler: Any) -> dict[str, Any]:
    """Return the LR scheduler's state on a pipeline rank, with the members of its parameter groups.

    A schedule may keep values for each group, such as rates, and stages may have other groups.
    """
    if scheduler is None:
        return {}
    return {"lr_scheduler": {"members": group_members(optimizer), "state": scheduler.state_dict()}}


def group_members(optimizer: ZeroOptimizer) -> list[list[str]]:
    """Return the parameter names of each parameter group of the optimizer."""
    places = optimizer.sharded.places
    return [
        [clean_name(places[p][1].name) for p in group["params"] if p in places]
        for group in optimizer.param_groups
    ]


def share_of(chunk: Chunk) -> Chunk:
    """Return the part of a chunk that this rank writes.

    A buffer's values may differ between ranks: those of the first rank are written.
    """
    if not chunk.key.startswith(BUFFERS):
        return chunk.share()
    return chunk if chunk.holder[0] == 0 else replace(chunk, values=chunk.values[:0])


class SaveContents:
    """This rank's state to save, between two steps."""

    def __init__(self, module: nn.Module, optimizer: ZeroOptimizer, exclude_frozen: bool) -> None:
        self.module, self.optimizer = module, optimizer
        self.named = names_and_values(module)
        self.frozen = [clean_name(n) for n, p in module.named_parameters() if not p.requires_grad]
        self.excluded = self.frozen if exclude_frozen else []
        self.first: dict[Tensor, str] = {
            param: member.name for param, (_, member) in optimizer.sharded.places.items()
        }
        own = set(module.parameters())
        for param, name in self.first.items():
            shown = self.named.get(name)
            if param not in own and isinstance(shown, Tensor) and shown in own:
                raise CheckpointError(
                    f"{name} is not the parameter that it was at initialize: it was tied or replaced. "
                    "Two would be saved under one name. Tie weights and replace modules before initialize"
                )
        for name, value in self.named.items():
            if isinstance(value, Tensor):
                self.first.setdefault(value, name)
        contents = optimizer.contents
        self.whole = list(contents.whole({name: tensor for tensor, name in self.first.items()}))  # replicated
        self.cut = [*contents.masters(), *contents.state(), *contents.frozen()]
        self.own = [*contents.own(this_rank()), *contents.cut_state()]

    def buffers(self) -> dict[str, Chunk]:
        """Return the chunks of buffers, whose values may differ between ranks, by key."""
        return {c.key: c for c in self.whole if c.key.startswith(BUFFERS)}

    def shares(self) -> list[Chunk]:
        """Return the chunks that this rank writes."""
        # No rank owns a range of a tensor without elements.
        empty = [
            Chunk(self.optimizer.contents.key_of(tensor, name), tuple(tensor.shape), 0, tensor.new_empty(0))
            for tensor, name in self.first.items()
            if not tensor.numel()
        ]
        left_out = set(self.excluded)
        kinds = ((chunk, *chunk.key.partition("/")[::2]) for chunk in (*self.cut, *self.own, *self.whole))
        return empty + [
            share_of(chunk)
            for chunk, kind, name in kinds
            if not (kind.startswith(PARAMETERS) and name in left_out) and not self.is_copy(chunk)
        ]

    def is_copy(self, chunk: Chunk) -> bool:
        """Return whether another pipeline rank saves this chunk."""
        kind, _, name = chunk.key.partition("/")
        return self.optimizer.communicators.is_copy(
            name.partition("/")[2] if kind.startswith(STATE) else name
        )

    def names(self) -> dict[str, Any]:
        """Return the names and plain data that are saved of this rank's parameters and buffers."""
        others = {clean_name(name): v for name, v in self.named.items() if not isinstance(v, Tensor)}
        names = {name: self.first[v] for name, v in self.named.items() if isinstance(v, Tensor)}
        facts = self.optimizer.facts()
        return {
            "asleep": facts["asleep"],
            "groups": facts["groups"],
            "members": group_members(self.optimizer),
            "frozen": self.frozen,
            "excluded": self.excluded,
            "aliases": {
                clean_name(name): clean_name(first) for name, first in names.items() if name != first
            },
            "others": others,
            "shapes": shapes_of(self.module),
        }

    def shared(
        self, extras: Extras, client_state: Mapping[str, Any], names: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return the saved data other than tensors that are equal on all ranks.

        names  of all pipeline stages; None: of this rank's module, which is the whole model
        """
        scheduler = extras.lr_scheduler
        return {
            **self.optimizer.facts(),
            "counters": dict(extras.counters),
            **{k: v for k, v in (self.names() if names is None else names).items() if k != "shapes"},
            "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
            **({} if scheduler is None else {"schedule": type(scheduler).__name__}),
            "client_state": dict(client_state),
        }
