"""The folder of a checkpoint: file names, the manifest, atomic publication and deletion.

    DIR/latest                       the tag of the newest checkpoint
    DIR/TAG/manifest.json            the files of all ranks; written last, so a folder that has it is complete
    DIR/TAG/rank_00000.safetensors   tensor data of one rank, as ranges of flattened tensors
    DIR/TAG/rank_00000.json          description and checksums of these data, and plain data
    DIR/partial-NONCE-TAG/           a save in progress, or an interrupted one
    DIR/replaced-NONCE-TAG/          temporary: a complete older save of the same tag
    DIR/removed-NONCE-TAG/           temporary: a folder that is being deleted

[Note: atomic publication] Files are written into a partial folder and flushed, the manifest last. Then the
folder is renamed, its parent is flushed, and `latest` is replaced by a rename. After an interruption at any
point, `latest` names a complete checkpoint. If a checkpoint with the same tag exists, it is first renamed to
`replaced-...`. A reader that finds no TAG uses the replaced folder. At most one exists per tag.

[Note: deletion] Only folders of the three kinds above are deleted and, with `keep_last`, complete checkpoints
of the same model. Files of the user in a checkpoint's folder are kept, in DIR/TAG.
"""

import json
import logging
import os
import re
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_full.checkpoint import disk
from zero_full.checkpoint.disk import is_file_name
from zero_full.errors import CheckpointError
from zero_full.formatting import listed

if TYPE_CHECKING:
    from zero_full.checkpoint.rank_file import Payload

LATEST, MANIFEST = "latest", "manifest.json"
PARTIAL, REPLACED, REMOVED = "partial", "replaced", "removed"
FORMAT, VERSION = "zero_full checkpoint", 1
LONGEST_TAG = 200  # bytes; most file systems allow 255 for "replaced-12345678-" and the tag
STALE = 3600.0  # seconds without a write after which a save counts as interrupted
TEMPORARY = re.compile(rf"({PARTIAL}|{REPLACED}|{REMOVED})-([0-9a-f]{{8}})-(.+)")
OWN_FILE = re.compile(rf"{re.escape(MANIFEST)}|rank_\d{{5,}}\.(safetensors|json)")
URL = re.compile(r"[A-Za-z][\w+.-]+:/")  # `Path` makes one slash of two; a drive of Windows is one letter
Rows = Mapping[str, Mapping[str, int]]  # a manifest's entries by file name: sizes and checksums

log = logging.getLogger("zero_full")


def local_path(path: str | PathLike[str]) -> Path:
    """Return a path. Raises CheckpointError for a URL, for which a local folder named "s3:" would be made."""
    if URL.match(os.fspath(path)):
        raise CheckpointError(
            f"{path} is a URL, and files are written and read in a file system only. Mount the storage, or "
            "copy the folder"
        )
    return Path(path)


def check_tag(tag: str) -> str:
    """Return the tag, or raise CheckpointError if it cannot be the name of a folder."""
    begins = tuple(f"{kind}-" for kind in (PARTIAL, REPLACED, REMOVED))
    is_clean = is_file_name(tag) and tag.isprintable() and tag == tag.strip()
    if not is_clean or tag.startswith(begins) or tag in (LATEST, MANIFEST) or len(tag.encode()) > LONGEST_TAG:
        raise CheckpointError(
            f"the tag {tag!r} cannot be the name of a folder. Use letters and digits, as in 'global_step100' "
            f"(not '{LATEST}', '{MANIFEST}', '{PARTIAL}-...', '{REPLACED}-...' or '{REMOVED}-...')"
        )
    return tag


# Publishing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SaveOptions:
    """Options of a save, equal on every rank."""

    save_latest: bool = True  # `load_checkpoint` loads this checkpoint when it is called without a tag
    exclude_frozen_parameters: bool = False  # leave out parameters with requires_grad=False
    keep_last: int | None = None  # checkpoints of this model to keep; older and interrupted ones are deleted
    asynchronous: bool = False  # return after a copy to host memory, see `wait_for_checkpoint`


@dataclass(frozen=True)
class CheckpointSave:
    """One rank's part of a save: it writes its files, and the first rank publishes the checkpoint."""

    directory: Path
    tag: str
    nonce: str
    payload: "Payload"
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
        return self.directory / f"{PARTIAL}-{self.nonce}-{self.tag}"

    def write(self, check: Callable[[], None] = lambda: None) -> Rows:
        """Write this rank's files. `check` is called in between. If it raises, the save ends."""
        from zero_full.checkpoint.rank_file import write  # not at the top: reading a manifest needs no torch

        if not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder} does not exist on this host, but rank {min(self.ranks)} has made it. Save "
                "into a folder that all hosts share"
            )
        return write(self.folder, self.payload, check)

    def commit(self, rows: Mapping[int, Rows]) -> None:
        """Publish the checkpoint, once all ranks' files are on the disk."""
        files = {name: dict(row) for each in rows.values() for name, row in each.items()}
        if lost := sorted(files.keys() - {path.name for path in self.folder.iterdir()}):
            raise CheckpointError(
                f"{self.folder} lacks {listed(lost)}, which this save has written. Does another program "
                "delete files?"
            )
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "saved_at": time.time(),
            "ranks": sorted(rows),
            "files": files,
            "about": {**self.about, "tag": self.tag},
        }
        body = _canonical(manifest)
        content = b'{"crc32": %d, "manifest": %s}\n' % (zlib.crc32(body), body)
        disk.write_file(self.folder / MANIFEST, content)
        disk.flush_folder(self.folder)
        _publish(self.folder, self.tag, self.nonce, self.options.save_latest)
        self._delete_obsolete()

    def _delete_obsolete(self) -> None:
        """Delete obsolete folders. A failure only warns, because the new checkpoint is valid regardless."""
        try:
            _mark_replaced(self.directory, self.tag)
            if self.options.keep_last is not None:
                _mark_old(self.directory, self.options.keep_last, self.tag, self.nonce)
            _delete_marked(self.directory)
        except (OSError, CheckpointError) as error:
            log.warning("older checkpoints in %s could not be removed: %s", self.directory, error)

    def discard(self) -> None:
        """Delete the partial files of this save, on the first rank.

        Errors are ignored, because the save's own error is being raised.
        """
        with suppress(OSError):
            if self.is_first and self.folder.is_dir():
                _mark(self.folder)
                _delete_marked(self.directory)


def _publish(folder: Path, tag: str, nonce: str, latest: bool) -> None:
    """Rename a complete partial folder to the checkpoint of this tag. See [Note: atomic publication]."""
    directory, place = folder.parent, folder.parent / tag
    replaced = directory / f"{REPLACED}-{nonce}-{tag}"
    if place.exists():
        _mark_replaced(directory, tag)
        disk.rename(place, replaced)
    try:
        disk.rename(folder, place)
    except OSError:
        if replaced.exists():
            disk.rename(replaced, place)
        raise
    disk.flush_folder(directory)
    if latest:
        disk.replace_file(directory / LATEST, tag.encode(), directory / f"{PARTIAL}-{nonce}-{LATEST}")


def _mark(folder: Path) -> None:
    """Mark a partial or replaced folder for deletion, by a rename."""
    disk.rename(folder, folder.with_name(f"{REMOVED}-{folder.name.partition('-')[2]}"))


def _mark_replaced(directory: Path, tag: str) -> None:
    """Mark the replaced checkpoints of this tag for deletion."""
    for path in _temporary(directory, REPLACED):
        if _tag_of(path) == tag:
            _mark(path)


def _delete_marked(directory: Path) -> None:
    """Delete the folders that are marked for deletion. Files of the user are moved back to DIR/TAG."""
    for folder in _temporary(directory, REMOVED):
        try:
            for path in sorted(folder.iterdir()):
                place = directory / _tag_of(folder) / path.name
                if OWN_FILE.fullmatch(path.name) and not path.is_dir():
                    disk.remove(path)
                elif not place.exists():
                    disk.make_folders(place.parent)
                    disk.rename(path, place)
            disk.remove(folder)
        except OSError as error:
            log.warning("%s could not be removed: %s", folder, error)


def _mark_old(directory: Path, keep_last: int, newest: str, nonce: str) -> None:
    """Mark old complete checkpoints of the newest one's model, and interrupted saves, for deletion.

    The checkpoint that `latest` names is kept. See [Note: deletion].
    """
    found, model = _found(directory), read_manifest(directory / newest)["about"].get("model")
    alike = [tag for tag, (_, each) in found.items() if each["about"].get("model") == model]
    others = sorted((tag for tag in alike if tag != newest), key=lambda tag: found[tag][1]["saved_at"])
    for tag in others[: max(0, len(others) - (keep_last - 1))]:
        if tag != latest_tag(directory):
            # A rename is atomic, so a reader finds the complete folder or none.
            disk.rename(found[tag][0], directory / f"{REMOVED}-{nonce}-{tag}")
    now = (directory / newest / MANIFEST).stat().st_mtime  # by the clock of the file system
    for path in _temporary(directory, PARTIAL):
        if now - max(each.stat().st_mtime for each in (path, *path.iterdir())) > STALE:
            _mark(path)


def check_replaceable(directory: Path, tag: str, model: str) -> None:
    """Raise CheckpointError if a save would replace anything but a checkpoint of this model."""
    place = directory / tag
    message = f"{place} is %s and is not replaced. Choose another tag or another folder"
    if place.is_symlink():
        raise CheckpointError(message % "a symbolic link")
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return
    if not place.is_dir() or sum(bool(OWN_FILE.fullmatch(path.name)) for path in place.iterdir()) < 3:
        raise CheckpointError(message % "not a checkpoint of zero_full")
    try:
        found = read_manifest(place)
    except CheckpointError:  # it is damaged, so replacing it loses nothing
        return
    if found["about"].get("model", model) != model:
        raise CheckpointError(message % "a checkpoint of another model")


# Finding -----------------------------------------------------------------------------------------


def _temporary(directory: Path, kind: str) -> list[Path]:
    """Return the folders of one kind: partial, replaced or removed."""
    found = [path for path in directory.iterdir() if path.name.startswith(f"{kind}-")]
    return sorted(p for p in found if TEMPORARY.fullmatch(p.name) and p.is_dir() and not p.is_symlink())


def _tag_of(path: Path) -> str:
    """Return the tag in the name of a partial, replaced or removed folder."""
    found = TEMPORARY.fullmatch(path.name)
    assert found is not None, path
    return found[3]


def _found(directory: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Return the path and the manifest of each complete checkpoint in a folder, by tag."""
    if not directory.is_dir():
        return {}
    places = {path.name: path for path in directory.iterdir() if not TEMPORARY.fullmatch(path.name)}
    places = {**{_tag_of(path): path for path in _temporary(directory, REPLACED)}, **places}
    found = {}
    for tag, path in sorted(places.items()):
        if not path.is_symlink():
            try:
                found[tag] = path, read_manifest(path)
            except CheckpointError:
                continue
    return found


def complete(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the manifests of all complete checkpoints in a folder, by tag."""
    return {tag: manifest for tag, (_, manifest) in _found(directory).items()}


def unfinished(directory: Path) -> list[Path]:
    """Return the folders of saves that were interrupted or are in progress."""
    return _temporary(directory, PARTIAL) if directory.is_dir() else []


def latest_tag(directory: Path) -> str | None:
    """Return the tag in the file `latest`, or None without such a file."""
    try:
        tag = disk.read_file(directory / LATEST, limit=4096).decode().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{directory / LATEST} cannot be read: {error}") from error
    try:
        return check_tag(tag)
    except CheckpointError:
        raise CheckpointError(
            f"{directory / LATEST} names {tag!r}, which cannot be a tag. Write the tag to load into this file"
        ) from None


def folder_of(directory: Path, tag: str) -> Path:
    """Return the folder of the checkpoint with this tag. Raises CheckpointError if none exists."""
    place = directory / check_tag(tag)
    if place.exists():
        return place
    for replaced in _temporary(directory, REPLACED) if directory.is_dir() else []:
        if _tag_of(replaced) == tag:
            return replaced
    others = ", ".join(complete(directory)) or "none"
    partial = ", ".join(path.name for path in unfinished(directory))
    more = f". Incomplete ones: {partial}" if partial else ""
    raise CheckpointError(f"{directory} has no checkpoint {tag}. Complete ones: {others}{more}")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a manifest. Raises CheckpointError if the folder is incomplete or in another format."""
    path = folder / MANIFEST
    try:
        content = json.loads(disk.read_file(path))
        manifest = content["manifest"]
        if content["crc32"] != zlib.crc32(_canonical(manifest)):
            raise CheckpointError(f"{path} is damaged: its checksum does not match. Load another tag")
        if manifest["format"] != FORMAT or manifest["version"] != VERSION:
            raise CheckpointError(
                f"{path} has format {manifest['format']!r}, version {manifest['version']}. This release of "
                f"zero_full reads version {VERSION} of {FORMAT!r}. Use a newer release"
            )
        _check_types(manifest)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: the save was interrupted, or this is no checkpoint of zero_full. "
            "Load another tag"
        ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}. Load another tag") from error
    return dict(manifest)


def digest_of(manifest: Mapping[str, Any]) -> str:
    """Return a digest that differs between two saves."""
    return blake2b(_canonical(manifest), digest_size=8).hexdigest()


def _check_types(manifest: Mapping[str, Any]) -> None:
    ranks, about = manifest["ranks"], manifest["about"]
    if not ranks or any(type(rank) is not int or rank < 0 for rank in ranks) or len(set(ranks)) < len(ranks):
        raise ValueError(f"its ranks are {ranks!r}")
    if about["world_size"] != len(ranks) or type(manifest["saved_at"]) is not float:
        raise ValueError(
            f"its world size is {about['world_size']!r} and its time of saving {manifest['saved_at']!r}"
        )


def _canonical(manifest: Mapping[str, Any]) -> bytes:
    return json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
