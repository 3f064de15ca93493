"""The folder of a checkpoint: its names, its manifest, and how it appears all at once.

    DIR/latest                       the newest tag
    DIR/TAG/manifest.json            who has written what: written last, so what has one is complete
    DIR/TAG/rank_00000.safetensors   numbers of one rank, in ranges of flattened tensors
    DIR/TAG/rank_00000.json          what these are, their checksums, and plain data
    DIR/partial-NONCE-TAG/           a save that has not ended, or never will
    DIR/replaced-NONCE-TAG/          for a moment: an older save of the same tag, complete
    DIR/removed-NONCE-TAG/           for a moment: what is being removed

[Note: all at once] Files are written into a partial folder and flushed, the manifest last; then the folder is
renamed, its parent flushed, and `latest` replaced by a rename. Wherever this is cut off, `latest` names a
complete checkpoint. A folder that takes the place of one of the same tag comes after that one was renamed:
who finds no TAG looks for the one that is being replaced, of which there is never more than one.

[Note: what is ours] Nothing is removed but folders of the three kinds above and, with `keep_last`, complete
checkpoints of the same model. Files that others have put into a checkpoint's folder stay, in DIR/TAG.
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
LARGEST = 1 << 30  # bytes of a manifest or a rank's json, beyond which something is wrong
LONGEST_TAG = 200  # bytes: what most file systems leave beside "replaced-12345678-"
STALE = 3600.0  # seconds without a write, after which a save is one that was cut off
ASIDE = re.compile(rf"({PARTIAL}|{REPLACED}|{REMOVED})-([0-9a-f]{{8}})-(.+)")
OURS = re.compile(rf"{re.escape(MANIFEST)}|rank_\d{{5,}}\.(safetensors|json)")

log = logging.getLogger("zero_full")


def partial_folder(directory: Path, tag: str, nonce: str) -> Path:
    """Where a save is until it is complete."""
    return directory / f"{PARTIAL}-{nonce}-{tag}"


def check_tag(tag: str) -> str:
    """The tag, if it can be the name of a folder; else CheckpointError."""
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
    """Put the manifest into a partial folder, all of whose files are on the disk."""
    lost = sorted(set(manifest["files"]) - {path.name for path in folder.iterdir()})
    if lost:
        raise CheckpointError(
            f"{folder} has no {listed(lost)} any more: has something else removed files there?"
        )
    body = _canonical(manifest)
    disk.write_file(folder / MANIFEST, b'{"crc32": %d, "manifest": %s}\n' % (zlib.crc32(body), body))
    disk.flush_folder(folder)


def publish(folder: Path, tag: str, nonce: str, latest: bool) -> None:
    """A partial folder with a manifest becomes the checkpoint of this tag. See [Note: all at once]."""
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
    """Remove what nobody needs any more, as far as possible: this tag's checkpoint counts in any case."""
    try:
        _put_away(directory, tag)
        if keep_last is not None:
            _put_away_all_but(directory, keep_last, tag, nonce)
        _remove_all(directory)
    except (OSError, CheckpointError) as error:
        log.warning("older checkpoints in %s could not be removed: %s", directory, error)


def discard(folder: Path) -> None:
    """Remove a partial folder, as far as possible: why a save has failed is known already."""
    with suppress(OSError):
        if folder.is_dir():
            disk.rename(folder, folder.with_name(folder.name.replace(PARTIAL, REMOVED, 1)))
            _remove_all(folder.parent)


def _put_away(directory: Path, tag: str) -> None:
    """What was replaced under this tag is not needed any more."""
    for path in _aside(directory, REPLACED):
        if _tag_of(path) == tag:
            disk.rename(path, directory / path.name.replace(REPLACED, REMOVED, 1))


def _remove_all(directory: Path) -> None:
    """Remove what is to be removed, as far as possible. What others have put there is put back."""
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
    """All complete checkpoints of the newest one's model but the last ones, and saves that were cut off.

    What `latest` names stays. See [Note: what is ours].
    """
    found, model = _found(directory), read_manifest(directory / newest)["about"].get("model")
    others = [
        tag for tag, (_, told) in found.items() if tag != newest and told["about"].get("model") == model
    ]
    others.sort(key=lambda tag: found[tag][1]["saved_at"])
    gone = others[: max(0, len(others) - (keep_last - 1))]
    for tag in gone:
        if tag != latest_tag(directory):
            # At once: who looks for it finds all of it or nothing.
            disk.rename(found[tag][0], directory / f"{REMOVED}-{nonce}-{tag}")
    now = (directory / newest / MANIFEST).stat().st_mtime  # by the clock of the file system
    for path in _aside(directory, PARTIAL):
        if now - _last_write(path) > STALE:
            disk.rename(path, directory / path.name.replace(PARTIAL, REMOVED, 1))


def _last_write(path: Path) -> float:
    return max(each.stat().st_mtime for each in (path, *path.iterdir()))


def refuse_strange(directory: Path, tag: str, model: str) -> None:
    """CheckpointError if a save would take the place of something that is no checkpoint of this model."""
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
    except CheckpointError:  # nobody can load it
        return
    if found["about"].get("model", model) != model:
        raise CheckpointError(told % "a checkpoint of another model")


# Finding -----------------------------------------------------------------------------------------


def _aside(directory: Path, kind: str) -> list[Path]:
    """The folders of one of the kinds that have a nonce in their name."""
    found = [path for path in directory.iterdir() if path.name.startswith(f"{kind}-")]
    return sorted(p for p in found if ASIDE.fullmatch(p.name) and p.is_dir() and not p.is_symlink())


def _tag_of(path: Path) -> str:
    """The tag of such a folder."""
    told = ASIDE.fullmatch(path.name)
    assert told is not None, path
    return told[3]


def _found(directory: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """All complete checkpoints in a folder, by tag: where each is, and its manifest."""
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
    """The manifests of all complete checkpoints in a folder, by tag."""
    return {tag: manifest for tag, (_, manifest) in _found(directory).items()}


def unfinished(directory: Path) -> list[Path]:
    """Folders of saves that were cut off, or are still under way."""
    return _aside(directory, PARTIAL) if directory.is_dir() else []


def latest_tag(directory: Path) -> str | None:
    """What `latest` names; None if there is no such file."""
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
    """Where the checkpoint of this tag is; CheckpointError if there is none that is complete."""
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
    """Who has written what; CheckpointError if the folder is not complete, or not one of ours."""
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
    """What tells two saves apart."""
    return blake2b(_canonical(manifest), digest_size=8).hexdigest()


def _check_types(manifest: Mapping[str, Any]) -> None:
    ranks, about = manifest["ranks"], manifest["about"]
    if not ranks or any(type(rank) is not int or rank < 0 for rank in ranks) or len(set(ranks)) < len(ranks):
        raise ValueError(f"ranks {ranks!r}")
    if about["world_size"] != len(ranks) or type(manifest["saved_at"]) is not float:
        raise ValueError(f"{about['world_size']} ranks, saved at {manifest['saved_at']!r}")


def read_whole(path: Path, crc: int | None, largest: int = LARGEST) -> bytes:
    """A small file; CheckpointError if its checksum is not this one."""
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
