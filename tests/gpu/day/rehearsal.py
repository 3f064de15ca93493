"""Rehearses a day in calls that are killed: on a CPU, each call on a machine of its own.

    python -m tests.gpu.day.rehearsal --kills 2

A call has `CALL` minutes and an empty folder, in which only the archive of the call before lies. The first
calls are killed while a part runs, with SIGKILL; the others are not. Prints a table of the calls, and ends
with 0 if all parts are done within `DAY` minutes, and none was run twice but those that were killed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from tests.gpu.day import archive, parts
from tests.gpu.day.parts import CALL, DAY
from tests.gpu.day.run import ROOT, end_leftovers

RUNNING = 1.0  # seconds that a part has run when its call is killed
LATEST = 0.6  # of a call's time: it is killed then, also if a slow machine has begun fewer parts
HEAD = ("call", "seconds", "parts begun", "done", "killed in")


@dataclass(frozen=True)
class Call:
    """What one call has left: its parts by name, and how it ended."""

    seconds: float
    code: int
    begun: tuple[str, ...]  # parts that it has begun, in order
    done: tuple[str, ...]
    killed_in: str  # the part that ran when it was killed; "" if it came to its end

    def cells(self, number: int) -> list[str]:
        """As a row of the table."""
        return [str(number), f"{self.seconds:.0f}", str(len(self.begun)), str(len(self.done)), self.killed_in]


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """The results in a folder, by part, in the order in which parts began."""
    found = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    return {result["part"]: result for result in sorted(found, key=lambda result: result["began"])}


def call(folder: Path, out: Path, earlier: Path | None, kill_after: float, only: Sequence[str]) -> Call:
    """Make one call, and kill it while it runs the part that follows its first `kill_after` ones.

    It is not killed if that is infinity.
    """
    folder.mkdir(parents=True)
    out.mkdir(parents=True)
    before: dict[str, Any] = {}
    if earlier is not None:
        shutil.copyfile(earlier, folder / archive.NAME)
        archive.load(earlier, out / "unpacked", rehearsal=True)
        before = results(out / "unpacked")
    command = [sys.executable, "-m", "tests.gpu.day", "--rehearse", "--minutes", str(CALL)]
    command += ["--folder", str(folder), *(["--only", *only] if only else [])]
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, archive.VARIABLE: str(out)})

    def begun() -> dict[str, Any]:
        return {
            name: result
            for name, result in results(folder).items()
            if name not in before or result["began"] != before[name]["began"]
        }

    def running() -> str:
        return next((name for name, result in begun().items() if result["state"] == "running"), "")

    killed_in = ""
    try:
        while process.poll() is None:
            time.sleep(0.2)
            late = time.monotonic() - began > 60 * LATEST * CALL
            if kill_after < inf and (late or len(begun()) > kill_after) and running():
                time.sleep(RUNNING)
                if killed_in := running():
                    process.kill()
                    process.wait()
    finally:
        process.kill()
        process.wait()
        end_leftovers(folder)  # the machine is given back
    found = begun()
    done = tuple(name for name, result in found.items() if result["state"] == "done")
    return Call(time.monotonic() - began, process.returncode, (*found,), done, killed_in)


def rehearse(kills: int, only: Sequence[str] = ()) -> list[Call]:
    """Make calls until all parts have been run, or the day is over. Kills divide the parts evenly."""
    names = only or [part.name for part in parts.ALL]
    calls, earlier = list[Call](), None
    with tempfile.TemporaryDirectory() as scratch:
        while sum(each.seconds for each in calls) < 60 * DAY:
            place = Path(scratch) / f"call{len(calls) + 1}"
            kill_after = len(names) // (kills + 1) if len(calls) < kills else inf
            calls.append(call(place / "folder", place / "out", earlier, kill_after, only))
            earlier = place / "out" / archive.NAME
            if calls[-1].code in (0, 1):  # no part is left
                break
    return calls


def faults(calls: Sequence[Call], kills: int, names: Sequence[str]) -> list[str]:
    """What is not as it has to be, in words."""
    found = list[str]()
    times: dict[str, int] = dict.fromkeys(names, 0)
    for each in calls:
        for name in each.begun:
            times[name] += 1
    killed = [each.killed_in for each in calls]
    again = [name for name, count in times.items() if count > 1 + killed.count(name)]
    left = [name for name in names if not any(name in each.done for each in calls)]
    if again:
        found.append(f"run again, though no call was killed in it: {', '.join(again)}")
    if left:
        found.append(f"not done: {', '.join(left)}")
    if [bool(name) for name in killed] != [number < kills for number in range(len(calls))]:
        found.append(f"the first {kills} calls had to be killed in a part, and these were: {killed}")
    if max(each.seconds for each in calls) > 60 * CALL or sum(each.seconds for each in calls) > 60 * DAY:
        found.append(f"longer than calls of {CALL:g} minutes and a day of {DAY:g}")
    return found


def main(given: Sequence[str] | None = None) -> int:
    """Rehearse, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=2, help="calls that are killed before the last one")
    parser.add_argument("--only", nargs="+", default=(), metavar="PART", help="nothing but these")
    asked = parser.parse_args(given)
    calls = rehearse(asked.kills, asked.only)
    rows = [HEAD, ["---"] * len(HEAD), *(each.cells(number + 1) for number, each in enumerate(calls))]
    print("\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows))
    wrong = faults(calls, asked.kills, asked.only or [part.name for part in parts.ALL])
    print(f"\n{sum(each.seconds for each in calls) / 60:.1f} of {DAY:g} minutes, {len(calls)} calls")
    print("".join(f"WRONG: {text}\n" for text in wrong), end="")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
