"""One save, as one rank takes part in it: its files, and how they become a checkpoint."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_full.checkpoint.folder import (
    FORMAT,
    VERSION,
    discard,
    partial_folder,
    publish,
    tidy,
    write_manifest,
)
from zero_full.checkpoint.rank_file import Payload, write
from zero_full.errors import CheckpointError

Rows = Mapping[str, Mapping[str, int]]  # what a manifest says of files


@dataclass(frozen=True)
class SaveOptions:
    """How a checkpoint is saved; the same on every rank."""

    save_latest: bool = True  # `load_checkpoint` finds this one without a tag
    exclude_frozen_parameters: bool = False  # leave out what has requires_grad=False
    keep_last: int | None = None  # of this model in this folder; older ones are removed, and cut-off saves
    asynchronous: bool = False  # wait for a copy in the host's memory only, see `wait_for_checkpoint`


@dataclass(frozen=True)
class CheckpointSave:
    """One save, as one rank takes part in it."""

    directory: Path
    tag: str
    nonce: str
    payload: Payload
    about: Mapping[str, Any]
    ranks: tuple[int, ...]  # that take part
    options: SaveOptions

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that makes the folder, and publishes it."""
        return self.payload.rank == min(self.ranks)

    @property
    def folder(self) -> Path:
        """Where files are until all are there."""
        return partial_folder(self.directory, self.tag, self.nonce)

    def write(self, look: Callable[[], None] = lambda: None) -> Rows:
        """This rank's files. `look` is called now and then; what it raises ends the writing."""
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder} is not there, but rank {min(self.ranks)} has made it: save into a folder "
                "that all hosts share"
            )
        return write(self.folder, self.payload, look)

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
        tidy(self.directory, self.tag, self.nonce, self.options.keep_last)

    def discard(self) -> None:
        """What was written goes."""
        if self.is_first:
            discard(self.folder)
