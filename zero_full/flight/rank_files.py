"""The folder of a recording in progress: two files for each rank, see [Note: black box].

Each recording has a folder of its own, also if its path is used again. A rank may begin the next recording
while another rank still merges the last one and deletes its folder.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_full.errors import RecordingError

FORMAT, VERSION = "zero_full recording", 1
DONE = "rank{}.done"  # an empty file: this rank's recording has ended
CLOSED, LEFT = "closed", "its process or its engine ended"  # how a recording ends without a failure
NAME = re.compile(r"rank(\d+)\.([01])\.jsonl")


@dataclass
class RankEvent:
    """An event: a collective or a pass of one rank. Times are microseconds of the rank's own clock."""

    what: str
    name: str
    start: int
    step: int
    held: dict[str, int]  # bytes by kind at the start
    end: int | None = None
    sent: int = 0  # bytes
    group: int = -1  # index of the rank's communicator; -1: not a collective
    call: int = 0  # number of this call among the communicator's
    beside: bool = False  # on another thread than forward, backward and step
    failed: str = ""  # the error; "": none


@dataclass
class RankTrace:
    """The events in one rank's files."""

    rank: int
    about: dict[str, Any]  # facts of the run, from the start of the file
    events: list[RankEvent] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)  # by number of a step: when it ended
    dropped_steps: int = 0
    dropped_events: int = 0
    ended: str = ""  # CLOSED, LEFT or an error; "": still recording, or killed
    last: int = 0  # the time of its last event


def folder_of(path: Path, run: str = "*") -> Path:
    """Return the folder in which the ranks write while they record. `run` is the recording's id."""
    return path.with_name(f"{path.name}.{run}.parts")


def folders_of(path: Path) -> list[Path]:
    """Return the folders of all recordings into `path`, the newest last: ids are times, of equal length."""
    name = re.compile(rf"{re.escape(path.name)}\.[0-9a-f]+\.parts")
    return sorted(each for each in path.parent.iterdir() if name.fullmatch(each.name))


def file_of(folder: Path, rank: int, number: int) -> Path:
    """Return the path of one of a rank's two files: `number` is 0 or 1."""
    return folder / f"rank{rank}.{number}.jsonl"


def files_in(folder: Path) -> dict[int, list[Path]]:
    """Return the files in the folder, by rank."""
    by_rank: dict[int, list[Path]] = {}
    for each in sorted(folder.glob("*.jsonl")):
        if found := NAME.fullmatch(each.name):
            by_rank.setdefault(int(found[1]), []).append(each)
    return by_rank


def all_done(folder: Path) -> bool:
    """Return whether some rank has recorded in this folder, and all ranks that did have ended."""
    begun = files_in(folder)
    return bool(begun) and all(folder.joinpath(DONE.format(rank)).exists() for rank in begun)


def read_parts(folder: Path) -> list[RankTrace]:
    """Read the files of all ranks. RecordingError if the folder has none."""
    parts = [part for rank, files in sorted(files_in(folder).items()) if (part := _read_part(rank, files))]
    if not parts:
        raise RecordingError(f"{folder} contains no recording. engine.record(path) makes one")
    return parts


def _read_part(rank: int, files: Sequence[Path]) -> RankTrace | None:
    chapters = []
    for each in files:
        lines = list(_lines(each))
        if lines and FORMAT in lines[0]:
            chapters.append((lines[0][FORMAT], lines[1:]))
    if not chapters:
        return None
    chapters.sort(key=lambda chapter: int(chapter[0]["turn"]))
    newest = chapters[-1][0]
    if newest["version"] != VERSION:
        raise RecordingError(
            f"{files[0]} has format version {newest['version']}, and this release reads {VERSION}. Use the "
            "release that recorded it"
        )
    part = RankTrace(rank, newest)
    dropped = newest["dropped"]
    part.dropped_steps, part.dropped_events = int(dropped["steps"]), int(dropped["events"])
    unfinished: dict[int, RankEvent] = {}
    held: dict[str, int] = {}
    for about, lines in chapters:
        step = int(about["step"])
        for line in lines:
            held = line.get("held", held)
            step = _add_line(part, line, step, held, unfinished)
    return part


def _add_line(
    part: RankTrace, line: dict[str, Any], step: int, held: dict[str, int], unfinished: dict[int, RankEvent]
) -> int:
    """Add one line to `part`. Returns the number of the step that follows the line."""
    part.last = max(part.last, int(line.get("t", 0)))
    if "ended" in line:
        part.ended = line["ended"]
    elif "what" in line:
        known = {k: line[k] for k in ("sent", "group", "call", "beside") if k in line}
        made = RankEvent(line["what"], line.get("name", ""), line["t"], step, held, **known)
        unfinished[line["n"]] = made
        part.events.append(made)
    elif "n" in line:
        if (event := unfinished.pop(line["n"], None)) is not None:  # else its start was dropped
            event.end, event.failed = line["t"], line.get("failed", "")
    elif "step" in line:
        part.ends[step] = line["t"]
        return step + 1
    return step


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines: the last one may be half written."""
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield line
