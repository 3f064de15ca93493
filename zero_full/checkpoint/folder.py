"""The folder of a checkpoint: file names, the manifest, atomic publication and deletion.

    DIR/latest                       the tag of the newest checkpoint
    DIR/TAG/manifest.json            the files of all ranks; written last, so a folder that has it is complete
    DIR/TAG/rank_00000.safetensors   tensor data of one rank, as ranges of flattened tensors
    DIR/TAG/rank_00000.json          description and checksums of these data, and plain data
    DIR/partial-NONCE-TAG/           a save in progress, or an interrupted one
    DIR/replaced-NONCE-TAG/          temporary: a complete older save of the same tag
    DIR/removed-NONCE-TAG/           temporary: a folder that is being deleted

[Note: all at once] Files are written into a partial folder and flushed, the manifest last. Then the folder is
renamed, its parent is flushed, and `latest` is replaced by a rename. After an interruption at any point,
`latest` names a complete checkpoint. If a checkpoint with the same tag exists, it is first renamed to
`replaced-...`. A reader that finds no TAG uses the replaced folder. At most one exists per tag.

[Note: what is ours] Only folders of the three kinds above are deleted and, with `keep_last`, complete
checkpoints of the same model. Files of the user in a checkpoint's folder are kept, in DIR/TAG.
"""

import json
import logging
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from zero_full.checkpoint import disk
from zero_full.checkpoint.files import is_plain
from zero_full.errors import CheckpointError
from zero_full.formatting import listed

LATEST, MANIFEST = "latest", "manifest.json"
PARTIAL, REPLACED, REMOVED = "partial", "replaced", "removed"
FORMAT, VERSION = "zero_full checkpoint", 1
LARGEST = 1 << 30  # bytes of a manifest or a rank's JSON file; a larger one is damaged
LONGEST_TAG = 200  # bytes; most file systems allow 255 for "replaced-12345678-" and the tag
STALE = 3600.0  # seconds without a write after which a save counts as interrupted
ASIDE = re.compile(rf"({PARTIAL}|{REPLACED}|{REMOVED})-([0-9a-f]{{8}})-(.+)")
OURS = re.compile(rf"{re.escape(MANIFEST)}|rank_\d{{5,}}\.(safetensors|json)")

log = logging.getLogger("zero_full")


def partial_folder(directory: Path, tag: str, nonce: str) -> Path:
    """Return the folder in which a save is written until it is complete."""
    return directory / f"{PARTIAL}-{nonce}-{tag}"


def check_tag(tag: str) -> str:
    """Return the tag. Raises CheckpointError if it cannot be the name of a folder."""
    begins = tuple(f"{kind}-" for kind in (PARTIAL, REPLACED, REMOVED))
    is_clean = is_plain(tag) and tag.isprintable() and tag == tag.strip()
    if not is_clean or tag.startswith(begins) or tag in (LATEST, MANIFEST) or len(tag.encode()) > LONGEST_TAG:
        raise CheckpointError(
            f"the tag {tag!r} cannot be the name of a folder: use letters and digits, as in 'global_step100' "
            f"(not '{LATEST}', '{MANIFEST}', '{PARTIAL}-...', '{REPLACED}-...' or '{REMOVED}-...')"
        )
    return tag


# Publishing --------------------------------------------------------------------------------------


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest into a partial folder, when all other files are on the disk."""
    lost = sorted(set(manifest["files"]) - {path.name for path in folder.iterdir()})
    if lost:
        raise CheckpointError(
            f"{folder} has no {listed(lost)} any more: has something else removed files there?"
        )
    body = _canonical(manifest)
    disk.write_file(folder / MANIFEST, b'{"crc32": %d, "manifest": %s}\n' % (zlib.crc32(body), body))
    disk.flush_folder(folder)


def publish(folder: Path, tag: str, nonce: str, latest: bool) -> None:
    """Rename a partial folder with a manifest to the checkpoint of this tag. See [Note: all at once]."""
    directory, place = folder.parent, folder.parent / tag
    replaced = directory / f"{REPLACED}-{nonce}-{tag}"
    if place.exists():
        _put_away(directory, tag)
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


def tidy(directory: Path, tag: str, nonce: str, keep_last: int | None) -> None:
    """Delete obsolete folders. A failure only warns, because the new checkpoint is valid regardless."""
    try:
        _put_away(directory, tag)
        if keep_last is not None:
            _put_away_all_but(directory, keep_last, tag, nonce)
        _remove_all(directory)
    except (OSError, CheckpointError) as error:
        log.warning("older checkpoints in %s could not be removed: %s", directory, error)


def discard(folder: Path) -> None:
    """Delete a partial folder. Errors are ignored, because the save's own error is being raised."""
    with suppress(OSError):
        if folder.is_dir():
            disk.rename(folder, folder.with_name(folder.name.replace(PARTIAL, REMOVED, 1)))
            _remove_all(folder.parent)


def _put_away(directory: Path, tag: str) -> None:
    """Mark the replaced checkpoints of this tag for deletion."""
    for path in _aside(directory, REPLACED):
        if _tag_of(path) == tag:
            disk.rename(path, directory / path.name.replace(REPLACED, REMOVED, 1))


def _remove_all(directory: Path) -> None:
    """Delete the folders that are marked for deletion. Files of the user are moved back to DIR/TAG."""
    for folder in _aside(directory, REMOVED):
        try:
            for path in sorted(folder.iterdir()):
                place = directory / _tag_of(folder) / path.name
                if OURS.fullmatch(path.name) and not path.is_dir():
                    disk.remove(path)
                elif not place.exists():
                    disk.make_folders(place.parent)
                    disk.rename(path, place)
            disk.remove(folder)
        except OSError as error:
            log.warning("%s could not be removed: %s", folder, error)


def _put_away_all_but(directory: Path, keep_last: int, newest: str, nonce: str) -> None:
    """Mark old complete checkpoints of the newest one's model, and interrupted saves, for deletion.

    The checkpoint that `latest` names is kept. See [Note: what is ours].
    """
    found, model = _found(directory), read_manifest(directory / newest)["about"].get("model")
    others = [
        tag for tag, (_, told) in found.items() if tag != newest and told["about"].get("model") == model
    ]
    others.sort(key=lambda tag: found[tag][1]["saved_at"])
    gone = others[: max(0, len(others) - (keep_last - 1))]
    for tag in gone:
        if tag != latest_tag(directory):
            # A rename is atomic, so a reader finds the complete folder or none.
            disk.rename(found[tag][0], directory / f"{REMOVED}-{nonce}-{tag}")
    now = (directory / newest / MANIFEST).stat().st_mtime  # by the clock of the file system
    for path in _aside(directory, PARTIAL):
        if now - _last_write(path) > STALE:
            disk.rename(path, directory / path.name.replace(PARTIAL, REMOVED, 1))


def _last_write(path: Path) -> float:
    return max(each.stat().st_mtime for each in (path, *path.iterdir()))


def refuse_strange(directory: Path, tag: str, model: str) -> None:
    """Raise CheckpointError if a save would replace anything but a checkpoint of this model."""
    place = directory / tag
    told = f"{place} exists and is %s, so it is left alone: choose another tag or another folder"
    if place.is_symlink():
        raise CheckpointError(told % "a link")
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return
    if not place.is_dir() or sum(bool(OURS.fullmatch(path.name)) for path in place.iterdir()) < 3:
        raise CheckpointError(told % "no checkpoint of zero_full")
    try:
        found = read_manifest(place)
    except CheckpointError:  # it is damaged, so replacing it loses nothing
        return
    if found["about"].get("model", model) != model:
        raise CheckpointError(told % "a checkpoint of another model")


# Finding -----------------------------------------------------------------------------------------


def _aside(directory: Path, kind: str) -> list[Path]:
    """Return the folders of one kind: partial, replaced or removed."""
    found = [path for path in directory.iterdir() if path.name.startswith(f"{kind}-")]
    return sorted(p for p in found if ASIDE.fullmatch(p.name) and p.is_dir() and not p.is_symlink())


def _tag_of(path: Path) -> str:
    """Return the tag in the name of a partial, replaced or removed folder."""
    told = ASIDE.fullmatch(path.name)
    assert told is not None, path
    return told[3]


def _found(directory: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Return the path and the manifest of each complete checkpoint in a folder, by tag."""
    if not directory.is_dir():
        return {}
    places = {path.name: path for path in directory.iterdir() if not ASIDE.fullmatch(path.name)}
    places = {**{_tag_of(path): path for path in _aside(directory, REPLACED)}, **places}
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
    return _aside(directory, PARTIAL) if directory.is_dir() else []


def latest_tag(directory: Path) -> str | None:
    """Return the tag in the file `latest`, or None without such a file."""
    try:
        tag = read_whole(directory / LATEST, None, largest=4096).decode().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{directory / LATEST} cannot be read: {error}") from error
    try:
        return check_tag(tag)
    except CheckpointError:
        raise CheckpointError(
            f"{directory / LATEST} names {tag!r}, which is no folder beside it: write the tag to load into it"
        ) from None


def folder_of(directory: Path, tag: str) -> Path:
    """Return the folder of the checkpoint with this tag. Raises CheckpointError if none exists."""
    place = directory / check_tag(tag)
    if place.exists():
        return place
    for replaced in _aside(directory, REPLACED) if directory.is_dir() else []:
        if _tag_of(replaced) == tag:
            return replaced
    others = ", ".join(complete(directory)) or "none"
    cut_off = [path.name for path in unfinished(directory)]
    told = f"; never finished: {', '.join(cut_off)}" if cut_off else ""
    raise CheckpointError(f"{directory} has no checkpoint {tag}. Complete ones: {others}{told}")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a manifest. Raises CheckpointError if the folder is incomplete or in another format."""
    path = folder / MANIFEST
    try:
        told = json.loads(read_whole(path, None))
        manifest = told["manifest"]
        if told["crc32"] != zlib.crc32(_canonical(manifest)):
            raise CheckpointError(f"{path} is damaged: its checksum is another one")
        if manifest["format"] != FORMAT or manifest["version"] != VERSION:
            raise CheckpointError(
                f"{path} is {manifest['format']!r}, version {manifest['version']}; this release of zero_full "
                f"reads version {VERSION}: use a newer one"
            )
        _check_types(manifest)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it was never finished, or is no checkpoint of zero_full"
        ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    return dict(manifest)


def digest_of(manifest: Mapping[str, Any]) -> str:
    """Return a digest that differs between two saves."""
    return blake2b(_canonical(manifest), digest_size=8).hexdigest()


def _check_types(manifest: Mapping[str, Any]) -> None:
    ranks, about = manifest["ranks"], manifest["about"]
    if not ranks or any(type(rank) is not int or rank < 0 for rank in ranks) or len(set(ranks)) < len(ranks):
        raise ValueError(f"ranks {ranks!r}")
    if about["world_size"] != len(ranks) or type(manifest["saved_at"]) is not float:
        raise ValueError(f"{about['world_size']} ranks, saved at {manifest['saved_at']!r}")


def read_whole(path: Path, crc: int | None, largest: int = LARGEST) -> bytes:
    """Read a small file. Raises CheckpointError if it is too large or its checksum is not `crc`."""
    size = path.lstat().st_size
    if size > largest:
        raise CheckpointError(f"{path} has {size} bytes, which is too much")
    file = disk.OldFile(path, size)
    try:
        data = bytearray(size)
        file.read_into(memoryview(data), 0)
    finally:
        file.close()
    if crc is not None and zlib.crc32(data) != crc:
        raise CheckpointError(f"{path} is damaged: its checksum is not the one that was written")
    return bytes(data)


def _canonical(manifest: Mapping[str, Any]) -> bytes:
    return json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
