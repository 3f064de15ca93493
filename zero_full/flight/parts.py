"""What the ranks leave beside the recording: a folder with two files a rank, see [Note: black box]."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_full.errors import RecordingError

FORMAT, VERSION = "zero_full recording", 1
DONE = "rank{}.done"  # an empty file: this rank has ended its recording
CLOSED, LEFT = "closed", "its process or its engine ended"  # how a rank's recording can end without failing
NAME = re.compile(r"rank(\d+)\.([01])\.jsonl")


@dataclass
class Happening:
    """A collective, or a pass of one rank. Times are microseconds of its own clock."""

    what: str
    name: str
    start: int
    step: int
    held: dict[str, int]  # bytes by kind when it began
    end: int | None = None
    sent: int = 0
    group: int = -1  # which of its communicators; -1: none
    call: int = 0  # how many calls this communicator had made before
    beside: bool = False  # on another thread than the passes
    failed: str = ""


@dataclass
class RankTrace:
    """What one rank has left."""

    rank: int
    about: dict[str, Any]  # of the run
    happenings: list[Happening] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)  # of steps, by number
    dropped_steps: int = 0
    dropped_events: int = 0
    ended: str = ""  # CLOSED, LEFT or what has failed; "": it was still recording, or was killed
    last: int = 0  # when something was heard of it

    @property
    def groups(self) -> list[list[int]]:
        """The ranks of each communicator."""
        groups: list[list[int]] = self.about["groups"]
        return groups


def folder_of(path: Path) -> Path:
    """Where the ranks write while they record."""
    return path.with_name(f"{path.name}.parts")


def file_of(folder: Path, rank: int, number: int) -> Path:
    """One of a rank's two files."""
    return folder / f"rank{rank}.{number}.jsonl"


def ranks_in(folder: Path) -> set[int]:
    """The ranks that have begun to record here."""
    return {int(found[1]) for each in folder.glob("*.jsonl") if (found := NAME.fullmatch(each.name))}


def all_done(folder: Path, ranks: int) -> bool:
    """Whether every rank of so many that has begun here has ended; not where nobody has."""
    begun = [rank for rank in ranks_in(folder) if rank < ranks]  # an earlier run may have had more
    return bool(begun) and all(folder.joinpath(DONE.format(rank)).exists() for rank in begun)


def read_parts(folder: Path) -> list[RankTrace]:
    """What each rank has left of the newest run; RecordingError if there is nothing."""
    by_rank: dict[int, list[Path]] = {}
    for each in sorted(folder.glob("*.jsonl")):
        if found := NAME.fullmatch(each.name):
            by_rank.setdefault(int(found[1]), []).append(each)
    parts = [part for rank, files in sorted(by_rank.items()) if (part := _read_part(rank, files))]
    if not parts:
        raise RecordingError(f"{folder} has nothing of a recording")
    newest = max(parts, key=lambda part: part.about["started"]).about["run"]
    return [part for part in parts if part.about["run"] == newest]


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
        raise RecordingError(f"{files[0]} is of version {newest['version']}, and this reads {VERSION}")
    part = RankTrace(rank, newest)
    dropped = newest["dropped"]
    part.dropped_steps, part.dropped_events = int(dropped["steps"]), int(dropped["events"])
    open_ones: dict[int, Happening] = {}
    held: dict[str, int] = {}
    for about, lines in chapters:
        step = int(about["step"])
        for line in lines:
            held = line.get("held", held)
            step = _take(part, line, step, held, open_ones)
    return part


def _take(
    part: RankTrace, line: dict[str, Any], step: int, held: dict[str, int], open_ones: dict[int, Happening]
) -> int:
    """Take one line in; returns the step that is under way after it."""
    part.last = max(part.last, int(line.get("t", 0)))
    if "ended" in line:
        part.ended = line["ended"]
    elif "what" in line:
        known = {k: line[k] for k in ("sent", "group", "call", "beside") if k in line}
        made = Happening(line["what"], line.get("name", ""), line["t"], step, held, **known)
        open_ones[line["n"]] = made
        part.happenings.append(made)
    elif "n" in line:
        if (over := open_ones.pop(line["n"], None)) is not None:  # else it has begun before what is kept
            over.end, over.failed = line["t"], line.get("failed", "")
    elif "step" in line:
        part.ends[step] = line["t"]
        return step + 1
    return step


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines that are whole: the last one may be under way."""
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield line
