"""`python -m zero_full replay`: print a recording."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from zero_full.errors import RecordingError
from zero_full.flight.picture import picture
from zero_full.flight.rank_files import FORMAT, VERSION, folder_of, read_parts
from zero_full.flight.timeline import merge, newest, recording_of


def replay(path: Path, moments: bool = False) -> int:
    """Print a recording. Merge the ranks' files first, if they are newer. `moments`: also every moment."""
    recording, made = open_recording(path)
    if made:
        print(f"{path} was merged from the ranks' files in {folder_of(path)}")
    for line in picture(recording, moments):
        print(line)
    return 0


def open_recording(path: Path) -> tuple[dict[str, Any], bool]:
    """Return a recording, and whether its file was merged just now. RecordingError if it is absent."""
    folder = folder_of(path)
    with suppress(FileNotFoundError):  # the ranks have merged their files meanwhile
        if folder.is_dir() and (not path.exists() or _is_newer(path, folder)):
            try:
                return merge(path), True
            except PermissionError:
                return recording_of(read_parts(folder)), False
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise RecordingError(
            f"there is no {path}, and no {folder}, where ranks write during the recording"
        ) from None
    except (OSError, ValueError) as error:
        raise RecordingError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or FORMAT not in found:
        raise RecordingError(f"{path} is not a recording. engine.record(path) makes one")
    if found[FORMAT] != VERSION:
        raise RecordingError(f"{path} has format version {found[FORMAT]}, not {VERSION}, which this reads")
    return found, False


def _is_newer(path: Path, folder: Path) -> bool:
    """Return whether a rank has written since the recording was merged."""
    return newest(folder) > path.stat().st_mtime_ns
