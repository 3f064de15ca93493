"""Recorded steps of stages 0 to 3 for the page that replays them on a machine of the reader's choice.

zero_min's trainers run, as for `python -m lessons clock N`. A step of several micro-batches is put together
on the page from the parts of a recorded one; a test compares it with what was recorded whole.
"""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from made_once import made_once
from places import ROOT, SiteError

import zero_min
from lessons.clock import MACHINES, PHASES
from lessons.plots import LANES
from lessons.recording import CONFIG, Build, Call, Recording, Work, record

FILE = "assets/js/clock_data.js"
MADE_FROM = ("zero_min/*.py", "lessons/clock.py", "lessons/plots.py", "lessons/recording.py")
RANKS = (2, 3, 4, 8)
BUCKETS = (1024, 4096, 16384, 65536)  # elements; the model has about 54,000
LETTERS = {what: letter for what, (letter, _) in (PHASES | LANES).items()}
STAGES: dict[str, Build] = {
    "0": zero_min.Stage0,
    "1": zero_min.Stage1,
    **{f"2/{size}": partial(zero_min.Stage2, bucket_size=size) for size in BUCKETS},
    "3": zero_min.Stage3,
    "3 with prefetch": zero_min.Stage3Prefetch,
}


def data() -> str:
    """The file that the page loads: `zeroClock` with machines and recordings."""
    sources = [Path(__file__), *(path for pattern in MADE_FROM for path in ROOT.glob(pattern))]
    return made_once("clock", sources, lambda: f"const zeroClock = {json.dumps(recorded())}\n")


def recorded() -> dict[str, Any]:
    """Every stage's step for every number of ranks."""
    whole = record(zero_min.Stage1, RANKS[0])
    return {
        "numel": whole.numel,
        "tokens": CONFIG.context,
        "ranks": RANKS,
        "buckets": BUCKETS,
        "names": {letter: what for what, letter in LETTERS.items()},
        "machines": {key: asdict(machine) for key, machine in MACHINES.items()},
        "steps": {
            name: {ranks: parts(name, build, ranks) for ranks in RANKS} for name, build in STAGES.items()
        },
    }


def parts(name: str, build: Build, ranks: int) -> dict[str, Any]:
    """The only micro-batch and the update after it; with prefetch also the first, middle and last of many."""
    one, update = split(record(build, ranks))
    found = {"one": one, "update": update}
    if name == "3 with prefetch":  # a micro-batch asks for what the next begins with
        first, middle, last, _ = split(record(build, ranks, micro_batches=3))
        found |= {"first": first, "middle": middle, "last": last}
    return found


def split(recording: Recording) -> list[list[list[Any]]]:
    """Part by part the entries: [letter, bytes], or [letter, FLOPs, how many calls ago it waits for, or -1].

    All ranks do the same arithmetic. Of the bytes the page needs the most that a rank sends.
    """
    works = {tuple(e for e in entries if isinstance(e, Work)) for entries in recording.ranks}
    if len(works) > 1:
        raise SiteError("clock: the ranks of a stage do different arithmetic")
    calls = [[entry for entry in entries if isinstance(entry, Call)] for entries in recording.ranks]
    made: list[list[list[Any]]] = [[] for _ in range(recording.micro_batches + 1)]
    number = 0
    for entry in recording.ranks[0]:
        if isinstance(entry, Call):
            most = max(mine[number].sent for mine in calls)
            made[entry.part].append([LETTERS[entry.what], most])
            number += 1
        else:
            ago = number - entry.after if entry.after >= 0 else -1
            made[entry.part].append([LETTERS[entry.phase], entry.flops, ago])
    return made
