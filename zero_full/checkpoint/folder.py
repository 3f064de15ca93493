"""The folder of a checkpoint: its names, its manifest, and how it appears all at once.

    DIR/latest                       the newest tag
    DIR/TAG/manifest.json            who has written what: written last, so what has one is complete
    DIR/TAG/rank_00000.safetensors   numbers of one rank, in ranges of flattened tensors
    DIR/TAG/rank_00000.json          what these are, their checksums, and plain data
    DIR/partial-NONCE-TAG/           a save that has not ended, or never will
    DIR/replaced-NONCE-TAG/          for a moment: an older save of the same tag

[Note: all at once] Files are written into a partial folder and flushed, the manifest last; then the folder is
renamed, its parent flushed, and `latest` replaced by a rename. Wherever this is cut off, `latest` names a
complete checkpoint. A folder that takes the place of one of the same tag comes after that one was renamed:
who finds no TAG looks for a complete one that is being replaced.
"""

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_full.checkpoint import disk
from zero_full.checkpoint.failure import CheckpointError
from zero_full.checkpoint.files import is_plain

LATEST, MANIFEST = "latest", "manifest.json"
PARTIAL, REPLACED = "partial", "replaced"
FORMAT, VERSION = "zero_full checkpoint", 1
LARGEST = 1 << 30  # bytes of a manifest or a rank's json, beyond which something is wrong


def partial_folder(directory: Path, tag: str, nonce: str) -> Path:
    """Where a save is until it is complete."""
    return directory / f"{PARTIAL}-{nonce}-{tag}"


def check_tag(tag: str) -> str:
    """The tag, if it can be the name of a folder; else CheckpointError."""
    begins = (f"{PARTIAL}-", f"{REPLACED}-")
    if not is_plain(tag) or tag.startswith(begins) or tag == LATEST:
        raise CheckpointError(
            f"the tag {tag!r} cannot be the name of a folder: use letters and digits, as in 'global_step100' "
            f"(and not 'latest', '{PARTIAL}-...' or '{REPLACED}-...')"
        )
    return tag


# Publishing --------------------------------------------------------------------------------------


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Put the manifest into a partial folder, all of whose files are on the disk."""
    body = _canonical(manifest)
    disk.write_file(folder / MANIFEST, b'{"crc32": %d, "manifest": %s}\n' % (zlib.crc32(body), body))
    disk.flush_folder(folder)


def publish(folder: Path, tag: str, nonce: str, latest: bool) -> None:
    """A partial folder with a manifest becomes the checkpoint of this tag. See [Note: all at once]."""
    place = folder.parent / tag
    replaced = folder.parent / f"{REPLACED}-{nonce}-{tag}"
    if place.exists():
        disk.rename(place, replaced)
    disk.rename(folder, place)
    disk.flush_folder(folder.parent)
    if latest:
        disk.replace_file(folder.parent / LATEST, tag.encode(), nonce)
    disk.remove(replaced)


def retain(directory: Path, keep_last: int, newest: str) -> None:
    """Remove all complete checkpoints but the last ones, and saves that were cut off."""
    found = sorted(complete(directory).items(), key=lambda item: item[1].get("saved_at", 0.0))
    kept = (
        {newest, *[tag for tag, _ in found if tag != newest][-(keep_last - 1) :]}
        if keep_last > 1
        else {newest}
    )
    for tag, _ in found:
        if tag not in kept:
            gone = directory / f"{REPLACED}-{newest}-{tag}"
            disk.rename(directory / tag, gone)  # at once: who looks finds all of it or nothing
            disk.remove(gone)
    for path in unfinished(directory) + sorted(directory.glob(f"{REPLACED}-*")):
        disk.remove(path)


def refuse_strange(directory: Path, tag: str) -> None:
    """CheckpointError if a save would take the place of something that is no checkpoint of ours."""
    place = directory / tag
    if place.exists() and not (place / MANIFEST).exists():
        raise CheckpointError(
            f"{place} exists and is no checkpoint of zero_full, so it is left alone: choose another tag or "
            "another folder"
        )


# Finding -----------------------------------------------------------------------------------------


def complete(directory: Path) -> dict[str, dict[str, Any]]:
    """The manifests of all complete checkpoints in a folder, by tag."""
    found = {}
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        name = re.sub(rf"^{REPLACED}-[0-9a-f]+-", "", path.name)
        if path.name.startswith(f"{PARTIAL}-") or (name != path.name and (directory / name).exists()):
            continue
        try:
            found[name] = read_manifest(path)
        except CheckpointError:
            continue
    return found


def unfinished(directory: Path) -> list[Path]:
    """Folders of saves that were cut off, or are still under way."""
    return sorted(directory.glob(f"{PARTIAL}-*")) if directory.is_dir() else []


def latest_tag(directory: Path) -> str | None:
    """What `latest` names; None if there is no such file."""
    try:
        tag = (directory / LATEST).read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{directory / LATEST} cannot be read: {error}") from error
    if not is_plain(tag):
        raise CheckpointError(f"{directory / LATEST} names {tag!r}, which is no folder beside it")
    return tag


def folder_of(directory: Path, tag: str) -> Path:
    """Where the checkpoint of this tag is; CheckpointError if there is none that is complete."""
    place = directory / check_tag(tag)
    if place.exists():
        return place
    for replaced in sorted(directory.glob(f"{REPLACED}-*")):
        if re.fullmatch(rf"{REPLACED}-[0-9a-f]+-{re.escape(tag)}", replaced.name):
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
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it was never finished, or is no checkpoint of zero_full"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    return dict(manifest)


def read_whole(path: Path, crc: int | None) -> bytes:
    """A small file; CheckpointError if its checksum is not this one."""
    size = path.lstat().st_size
    if size > LARGEST:
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
