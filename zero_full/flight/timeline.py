"""Merge the ranks' events into one recording: a list of frames, which the website's player shows.

A frame is a collective with all ranks that made it, or a pass of all ranks. It has a value for each rank:
bytes held (`live`) and `sent`, when the rank arrived (`start`) and left (`end`), and how long it `waited`.
`last` is the rank that the others waited for; `missing` are the ranks that did not arrive.

[Note: clocks] Every rank counts microseconds from the start of its own recording. No rank leaves a collective
before the last one has entered it, and then all leave at nearly the same time. So the offset between two
ranks' clocks is the difference between their end times of the same collective: the median over all that both
have completed. Ranks without a common collective are compared through other ranks. Failed collectives do not
count, nor do broadcasts, whose source may leave early.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from zero_full.flight.captions import BETWEEN, caption, in_sentence
from zero_full.flight.rank_files import CLOSED, FORMAT, VERSION, RankEvent, RankTrace, folders_of, read_parts

MAX_EVENTS = 200_000  # events of all ranks together in a recording; earlier ones are dropped
MERGE_ATTEMPTS = 3  # to merge while other ranks still write
Key = tuple[Any, ...]
PASSES = ("forward", "backward", "step", BETWEEN)
ONE_SIDED = ("broadcast",)
ABOUT_KEYS = ("ranks", "stage", "precision", "device", "micro_batches", "started", "keeps", "elsewhere")


@dataclass
class Moment:
    """A collective or a pass, with the event of each rank that took part."""

    what: str
    name: str
    step: int
    ranks: Sequence[int]  # all that should take part
    by: dict[int, RankEvent]


def merge(path: Path) -> dict[str, Any]:
    """Merge the ranks' files of the newest recording into `path`. If all ranks have ended, delete the files.

    FileNotFoundError if another rank has done so meanwhile.
    """
    folders, aside = folders_of(path), path.with_name(f".{path.name}.{os.getpid()}")
    if not folders:
        raise FileNotFoundError(f"{path} has no files of ranks")
    folder = folders[-1]
    try:
        for _ in range(MERGE_ATTEMPTS):  # another rank may write meanwhile, and merge a longer recording
            known = newest(folder)
            parts = read_parts(folder)
            made = recording_of(parts)
            aside.write_text(json.dumps(made, separators=(",", ":")))
            os.utime(aside, ns=(known, known))  # `open_recording` merges again if a file is newer
            if known == newest(folder):
                break
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    if made["present"] == list(range(made["ranks"])) and all(part.ended for part in parts):
        # Renamed first: another rank that reads the folder must find all of it, or nothing.
        with suppress(OSError):
            shutil.rmtree(folder.rename(aside))
    return made


def newest(folder: Path) -> int:
    """Return when a rank last wrote to the folder, in nanoseconds."""
    return max((each.stat().st_mtime_ns for each in folder.iterdir()), default=0)


def recording_of(parts: Sequence[RankTrace]) -> dict[str, Any]:
    """Return the recording of all ranks' parts."""
    about, by_rank = parts[0].about, {part.rank: part for part in parts}
    complete, keeps = sorted({step for part in parts for step in part.ends}), int(about["keeps"])
    first = complete[-keeps] if len(complete) > keeps else 0  # first of the last `keeps` complete steps
    for part in parts:
        part.dropped_steps += sum(step < first for step in part.ends)
        part.dropped_events += sum(each.step < first for each in part.events)
        part.events = [each for each in part.events if each.step >= first]
    moments = list(_moments(by_rank))
    clock = offsets(sorted(by_rank), _meetings(moments))
    for rank, part in by_rank.items():
        by_wall = round(1e6 * (about["started"] - part.about["started"]))
        _shift(part, -clock.get(rank, by_wall))
    moments.sort(key=lambda moment: min(each.start for each in moment.by.values()))
    most = max(1, MAX_EVENTS // max(1, len(parts)))
    cut, moments = sum(len(moment.by) for moment in moments[:-most]), moments[-most:]
    origin = min((each.start for moment in moments for each in moment.by.values()), default=0)
    for part in parts:
        _shift(part, -origin)
    kinds = list(dict.fromkeys(kind for part in parts for each in part.events for kind in each.held))
    frames = list(_frames(by_rank, moments, kinds, int(about["ranks"])))
    return {
        FORMAT: VERSION,
        **{key: value for key, value in about.items() if key in ABOUT_KEYS},
        "present": sorted(by_rank),
        "kinds": kinds,
        "dropped": {
            "steps": max(part.dropped_steps for part in parts),
            "events": sum(part.dropped_events for part in parts) + cut,
        },
        "unaligned": sorted(by_rank.keys() - clock.keys()),
        "ended": [by_rank[r].ended if r in by_rank else None for r in range(int(about["ranks"]))],
        "waits": waits(frames, int(about["ranks"])),
        "frames": frames,
    }


def waits(frames: Sequence[Mapping[str, Any]], ranks: int) -> list[list[tuple[int, int]]]:
    """Return for each rank a list of (rank it waited for, microseconds), the longest first."""
    found = [Counter[int]() for _ in range(ranks)]
    for frame in frames:
        whom = frame["missing"][0] if frame["missing"] else frame["last"]
        for rank, us in enumerate(frame["waited"]):
            if us and whom is not None:
                found[rank][whom] += us
    return [each.most_common() for each in found]


def _shift(part: RankTrace, by: int) -> None:
    for each in part.events:
        each.start += by
        each.end = None if each.end is None else each.end + by
    part.ends = {step: at + by for step, at in part.ends.items()}
    part.last += by


def _moments(by_rank: Mapping[int, RankTrace]) -> Iterator[Moment]:
    found: dict[Key, Moment] = {}
    for rank, part in by_rank.items():
        passes = Counter[tuple[str, int]]()
        for each in part.events:
            if each.group >= 0:
                ranks = part.about["groups"][each.group]
                key: Key = (each.group, tuple(ranks), each.call, each.what, each.name)
            else:
                ranks = list(range(int(part.about["ranks"])))
                passes[each.what, each.step] += 1
                key = (each.what, each.step, passes[each.what, each.step])
            moment = found.setdefault(key, Moment(each.what, each.name, each.step, ranks, {}))
            moment.by[rank] = each
    yield from found.values()


def _meetings(moments: Sequence[Moment]) -> Iterator[dict[int, int]]:
    """Yield the end times, by rank, of collectives that all their ranks have completed."""
    for moment in moments:
        if moment.what not in (*PASSES, *ONE_SIDED) and len(moment.by) == len(moment.ranks):
            ends = {r: each.end for r, each in moment.by.items() if each.end is not None and not each.failed}
            if len(ends) == len(moment.ranks):
                yield ends


def offsets(ranks: Sequence[int], meetings: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Return each rank's clock offset from the first rank's clock, for ranks whose clocks can be compared.

    meetings  for each collective, by rank: when it left, in microseconds of its clock. See [Note: clocks]
    """
    met = [ends for ends in meetings if len(ends) > 1]
    known = {ranks[0]: 0} if ranks else {}
    while True:
        found: dict[int, list[int]] = {}
        for ends in met:
            here = next((rank for rank in sorted(ends) if rank in known), None)
            if here is not None:
                for rank in ends.keys() - known.keys():
                    found.setdefault(rank, []).append(ends[rank] - ends[here] + known[here])
        if not found:
            return known
        known |= {rank: round(median(differences)) for rank, differences in found.items()}


def _frames(
    by_rank: Mapping[int, RankTrace], moments: Sequence[Moment], kinds: Sequence[str], ranks: int
) -> Iterator[dict[str, Any]]:
    """Yield the frames of a recording, in order of time."""
    held = [[0] * len(kinds) for _ in range(ranks)]
    latest = max((part.last for part in by_rank.values()), default=0)
    calls = {(rank, each.group, each.call): each for rank, part in by_rank.items() for each in part.events}

    def of_each(values: Mapping[int, Any], otherwise: Any = None) -> list[Any]:
        return [values.get(rank, otherwise) for rank in range(ranks)]

    def was_recording(rank: int, came: int) -> bool:
        part = by_rank.get(rank)
        if part is None or not part.events:
            return False
        return part.events[0].start <= came and not (part.ended == CLOSED and part.last <= came)

    def whereabouts(rank: int, moment: Moment) -> str:
        """Describe where a missing rank is: at another call in place of this one, or at its last event."""
        mine = next(iter(moment.by.values()))
        if (each := calls.get((rank, mine.group, mine.call))) is not None:
            return f"makes another call in its place, {in_sentence(each.what, each.name)}"
        seen = by_rank[rank].events[-1]
        where = "in" if seen.end is None else "after"
        what = in_sentence(seen.what, seen.name)
        return f"has not come, and was last seen {where} {what} of step {seen.step}"

    for moment in moments:
        by, is_pass = moment.by, moment.what in PASSES
        for rank, each in by.items():
            held[rank] = [each.held.get(kind, 0) for kind in kinds]
        starts = {rank: each.start for rank, each in by.items()}
        ends = {rank: each.end for rank, each in by.items()}
        absent = [] if is_pass else [rank for rank in moment.ranks if rank not in by]
        missing = [rank for rank in absent if was_recording(rank, min(starts.values()))]
        last = None if is_pass or missing or len(starts) < 2 else max(starts, key=lambda rank: starts[rank])
        until = {rank: latest if end is None else end for rank, end in ends.items()}
        if last is not None:  # a rank that failed earlier has stopped waiting
            until = {rank: min(end, starts[last]) for rank, end in until.items()}
        waited = {rank: until[rank] - starts[rank] if last is not None or missing else 0 for rank in starts}
        frame = {
            "what": moment.what,
            "name": moment.name,
            "step": moment.step,
            "start": of_each(starts),
            "end": of_each(ends),
            "live": [sum(each) for each in held],
            "held": [list(each) for each in held],
            "sent": None if is_pass else of_each({r: each.sent for r, each in by.items()}, 0),
            "waited": of_each({rank: max(0, us) for rank, us in waited.items()}, 0),
            "last": last,
            "missing": missing,
            "beside": any(each.beside for each in by.values()),
            "failed": next((each.failed for each in by.values() if each.failed), ""),
        }
        frame["title"], frame["text"] = caption(frame, {rank: whereabouts(rank, moment) for rank in missing})
        yield frame
