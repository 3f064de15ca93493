"""One rank's part of a save: write its files and, on the first rank, publish the checkpoint."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_full.checkpoint.folder import (
    FORMAT,
    VERSION,
    delete_obsolete,
    discard,
    partial_folder,
    publish,
    write_manifest,
)
from zero_full.checkpoint.rank_file import Payload, write
from zero_full.errors import CheckpointError

Rows = Mapping[str, Mapping[str, int]]  # a manifest's entries by file name: sizes and checksums


@dataclass(frozen=True)
class SaveOptions:
    """Options of a save, equal on every rank."""

    save_latest: bool = True  # `load_checkpoint` loads this checkpoint when it is called without a tag
    exclude_frozen_parameters: bool = False  # leave out parameters with requires_grad=False
    keep_last: int | None = None  # checkpoints of this model to keep; older and interrupted ones are deleted
    asynchronous: bool = False  # return after a copy to host memory, see `wait_for_checkpoint`


@dataclass(frozen=True)
class CheckpointSave:
    """One rank's part of a save."""

    directory: Path
    tag: str
    nonce: str
    payload: Payload
    about: Mapping[str, Any]
    ranks: tuple[int, ...]  # all ranks of the save
    options: SaveOptions

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that creates and publishes the folder."""
        return self.payload.rank == min(self.ranks)

    @property
    def folder(self) -> Path:
        """The partial folder, which holds the files until all are complete."""
        return partial_folder(self.directory, self.tag, self.nonce)

    def write(self, check: Callable[[], None] = lambda: None) -> Rows:
        """Write this rank's files. `check` is called in between. If it raises, the save ends."""
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder} does not exist on this host, but rank {min(self.ranks)} has made it. Save "
                "into a folder that all hosts share"
            )
        return write(self.folder, self.payload, check)

    def commit(self, rows: Mapping[int, Rows]) -> None:
        """Publish the checkpoint, once all ranks' files are complete."""
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
        delete_obsolete(self.directory, self.tag, self.nonce, self.options.keep_last)

    def discard(self) -> None:
        """Delete the partial files of this save, on the first rank."""
        if self.is_first:
            discard(self.folder)
