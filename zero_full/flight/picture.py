"""`python -m zero_full replay`: print a recording as text.

The text has the terminal's width, at most 80 columns: a row of letters for each rank and step, and a legend.
"""

import argparse
import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from zero_full.errors import RecordingError
from zero_full.flight.captions import ms, ranks_in_words
from zero_full.flight.rank_files import CLOSED, FORMAT, LEFT, VERSION, folder_of, folders_of, read_parts
from zero_full.flight.timeline import PASSES, merge, newest, recording_of
from zero_full.formatting import counted, flowed, human, printable, terminal_width

WIDE = 80
LETTERS = {
    "forward": "f",
    "backward": "b",
    "step": "u",
    "reduce_scatter": "R",
    "all_gather": "G",
    "all_reduce": "A",
    "all_to_all": "T",
    "broadcast": "B",
    "sum": "S",
    "gather_objects": "O",
}
LEGEND = (
    *("f forward", "b backward", "u update", "R reduce-scatter", "G all-gather", "A all-reduce"),
    *("T all-to-all", "B broadcast", "S sum", "O objects", "~ waits for another rank", ". other"),
)
WAITS, OTHER = "~", "."
BESIDE = " beside "  # label of the row for other threads than that of forward, backward and step
Frame = Mapping[str, Any]


def replay(options: argparse.Namespace) -> int:
    """Print a recording. Merge the ranks' files first, if they are newer."""
    path: Path = options.recording
    recording, made = open_recording(path)
    if options.json:
        print(json.dumps(recording))
        return 0
    if made:
        print(f"{path} was merged from the ranks' files in {folder_of(path)}")
    for line in picture(recording, options.moments, min(WIDE, terminal_width())):
        print(line)
    return 0


def open_recording(path: Path) -> tuple[dict[str, Any], bool]:
    """Return a recording, and whether its file was merged just now. RecordingError if it is absent."""
    if path.is_dir():
        raise RecordingError(f"{path} is a folder. Pass the path that was passed to engine.record")
    with suppress(FileNotFoundError):  # the ranks have merged their files meanwhile
        folders = folders_of(path)
        if folders and (not path.exists() or newest(folders[-1]) > path.stat().st_mtime_ns):
            try:
                return merge(path), True
            except PermissionError:
                return recording_of(read_parts(folders[-1])), False
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise RecordingError(
            f"there is no {path}, and no folder {folder_of(path)}, where ranks write during the recording. "
            "Pass the path of a recording"
        ) from None
    except (OSError, ValueError) as error:
        raise RecordingError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or FORMAT not in found:
        raise RecordingError(f"{path} is not a recording. engine.record(path) makes one")
    if found[FORMAT] != VERSION:
        raise RecordingError(f"{path} has format version {found[FORMAT]}, not {VERSION}, which this reads")
    return found, False


def picture(recording: Mapping[str, Any], moments: bool = False, wide: int = WIDE) -> Iterator[str]:
    """Yield the lines, of at most `wide` columns. `moments`: also a caption for every moment."""
    frames: Sequence[Frame] = recording["frames"]
    yield from _about(recording, wide)
    if not frames:
        yield "nothing was recorded"
        return
    for step in sorted({frame["step"] for frame in frames}):
        yield ""
        yield from _step(recording, [frame for frame in frames if frame["step"] == step], step, wide)
    yield from ("", *flowed(LEGEND, wide), "")
    yield from _ranks(recording, wide)
    for rank in recording["present"]:
        if (failed := recording["ended"][rank]) not in ("", CLOSED):
            yield from _folded(f"rank {rank}: {failed}", wide)
    if stuck := [frame for frame in frames if frame["missing"] or frame["failed"]]:
        yield ""
        yield "Failed or incomplete calls, by time:"
        for frame in stuck:
            yield from _moment(frame, wide)
    if moments:
        yield ""
        for frame in frames:
            yield from _moment(frame, wide)


def _about(recording: Mapping[str, Any], wide: int) -> Iterator[str]:
    began = datetime.fromtimestamp(recording["started"], timezone.utc)
    yield from _folded(
        f"Stage {recording['stage']} on {recording['ranks']} ranks ({recording['device']}), "
        f"recorded from {began:%Y-%m-%d %H:%M:%S} UTC on.",
        wide,
    )
    if absent := sorted(set(range(recording["ranks"])) - set(recording["present"])):
        yield from _folded(f"There are no events of {ranks_in_words(absent)}.", wide)
    dropped = recording["dropped"]
    if dropped["events"]:
        steps, events = dropped["steps"], dropped["events"]
        yield from _folded(f"Earlier events are dropped: {events} events of {counted(steps, 'step')}.", wide)
    if recording["unaligned"]:
        yield from _folded(
            f"The clock of {ranks_in_words(recording['unaligned'])} could not be aligned with the others.",
            wide,
        )
    if recording["device"] != "cpu":
        yield from _folded("Times are when the host queued the work, not when the device did it.", wide)


def _step(recording: Mapping[str, Any], frames: Sequence[Frame], step: int, wide: int) -> Iterator[str]:
    times = [t for frame in frames for key in ("start", "end") for t in frame[key] if t is not None]
    first, last = min(times), max(times)
    yield f"step {step}, {ms(last - first)}"
    labels = [f"rank {rank} " for rank in range(recording["ranks"])]
    label_wide = max(map(len, (*labels, BESIDE)))
    for rank in recording["present"]:
        for beside in (False, True):
            here = [f for f in frames if f["start"][rank] is not None and f["beside"] is beside]
            if here:
                label = BESIDE if beside else labels[rank]
                yield f"{label:{label_wide}}{_row(here, rank, first, last, wide - label_wide)}"


def _row(frames: Sequence[Frame], rank: int, first: int, last: int, columns: int) -> str:
    """Return one letter for each column: the event that took most of its time."""
    slot = max(1, last - first) / columns
    took = [Counter[str]() for _ in range(columns)]
    passes = [Counter[str]() for _ in range(columns)]
    for frame in frames:
        start = frame["start"][rank] - first
        end = (last if frame["end"][rank] is None else frame["end"][rank]) - first
        letter, counts = LETTERS.get(frame["what"], OTHER), passes if frame["what"] in PASSES else took
        arrived = min(end, start + frame["waited"][rank])
        for mark, low, high in ((WAITS, start, arrived), (letter, arrived, end)):
            for column in range(int(low / slot), min(columns, int(high / slot) + 1)):
                covered = min(high, (column + 1) * slot) - max(low, column * slot)
                counts[column][mark] += max(0, round(1000 * covered))
    return "".join(map(_letter, took, passes, [1000 * slot] * columns)).rstrip(OTHER)


def _letter(calls: Counter[str], passes: Counter[str], whole: float) -> str:
    busy = sum(calls.values())
    if calls and busy >= whole / 2:
        return calls.most_common(1)[0][0]
    return passes.most_common(1)[0][0] if passes and sum(passes.values()) >= whole / 2 else OTHER


def _ranks(recording: Mapping[str, Any], wide: int) -> Iterator[str]:
    """Yield a table: each rank's waiting time, for which rank, its peak memory, how its recording ended."""
    if wide >= WIDE:
        yield f"{'':8}{'waited':>10}  {'most of it for':22}{'peak memory':>14}  recording"
    for rank in recording["present"]:
        mine = recording["waits"][rank]
        longest = f"rank {mine[0][0]}, {ms(mine[0][1])}" if mine else ""
        most = max(frame["live"][rank] for frame in recording["frames"])
        known = recording["ended"][rank]
        ended = {"": "not ended", CLOSED: CLOSED, LEFT: "left"}.get(known, "failed")
        waited = ms(sum(us for _, us in mine))
        if wide < WIDE:
            most_for = f", most of it for {longest}" if longest else ""
            text = f"rank {rank}: waited {waited}{most_for}; peak memory {human(most)}; recording {ended}"
            yield from textwrap.wrap(text, wide, subsequent_indent="  ")
            continue
        yield f"rank {rank:<3}{waited:>10}  {longest:22}{human(most):>14}  {ended}"


def _moment(frame: Frame, wide: int) -> Iterator[str]:
    start = min(t for t in frame["start"] if t is not None)
    at = f"{start / 1000:9.2f} ms"
    for line in _folded(f"{frame['title']}. {frame['text']}", wide - len(at) - 2):
        yield f"{at}  {line}"
        at = " " * len(at)


def _folded(text: str, wide: int) -> Iterator[str]:
    """Yield the text in lines of at most `wide` columns."""
    yield from textwrap.wrap(printable(text), wide)
