"""Runs the parts of a day, each in a process of its own with a time limit, and keeps their results.

    python -m tests.gpu.day                  what has no complete result yet
    python -m tests.gpu.day --minutes 9.5    as many parts as fit; the next call goes on
    python -m tests.gpu.day --rehearse       the same commands, parsers, files and page on a CPU

A part has a log and a JSON file in the folder. Its state is "running", which it remains if everything was
killed, and then "done", "failed" (its process said so) or "stopped" (the time was over). Complete are only
those that are done. The exit code is 0 if all parts are, 1 if one has failed or was stopped, and 2 if some
have not been run.

[Note: calls] A machine may be there for a few calls only, each of which may be killed, and may be another one
in each call. So everything is written into one archive before and after every part (`archive.py`). A call
goes on from an archive that lies in the folder of the results, or beside the wheels that were carried along.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from tests.gpu import pack
from tests.gpu.day import archive, operators
from tests.gpu.day import parts as of_the_day
from tests.gpu.day.parts import OVERRUN, Part

ROOT = Path(__file__).parents[3]
GRACE = 5.0  # seconds between asking a part to end and ending it
ALONE = {  # unless somebody has chosen
    "OMP_NUM_THREADS": "1",  # of each rank
    "GLOO_SOCKET_IFNAME": "lo",  # a machine without a network may not know its own name
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # who asks whether there is a device can still be forked
}
SHOWN = 15  # lines of a failed part's log
FOLDER = "GPU_DAY"  # environment variable of parts: the folder of the results
# A part is a process group, so that it can be ended with all that it has started. It stays in the session of
# the call, so that whoever ends the session ends the part.
OWN_GROUP: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}
)
Result = dict[str, Any]


def result_of(part: Part, folder: Path) -> Result | None:
    """What is kept of a part; None if it has never been run."""
    file = folder / f"{part.name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def keep(result: Result, folder: Path) -> None:
    """Who looks sees the old file or the new one."""
    file = folder / f"{result['part']}.json"
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(file)


def is_done(part: Part, folder: Path) -> bool:
    """Whether its result is complete."""
    result = result_of(part, folder)
    return result is not None and result["state"] == "done"


def to_run(parts: Sequence[Part], folder: Path, again: bool) -> list[Part]:
    """First what has no result, then what has none that is complete: what kills a day comes last."""
    fresh = [part for part in parts if again or result_of(part, folder) is None]
    return fresh + [part for part in parts if part not in fresh and not is_done(part, folder)]


def row_of(line: str) -> dict[str, Any] | None:
    """The row that a line of output is, if it is one."""
    if line.startswith("{"):
        with suppress(ValueError):
            return dict(json.loads(line))
    return None


def card() -> str:
    """The first card and its driver, as nvidia-smi says it; empty if there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    ask = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    done = subprocess.run(ask, capture_output=True, text=True, timeout=60)
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""


def end_leftovers(folder: Path) -> None:
    """Kill processes of parts that an earlier call has left behind in this folder when it was killed.

    They would use the device beside the next part. Linux only: processes are known by their environment.
    """
    mark = f"{FOLDER}={folder}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if mark in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)


class Day:
    """A folder of results, and how parts are run into it."""

    def __init__(self, folder: Path, rehearse: bool) -> None:
        self.folder, self.rehearse = folder, rehearse
        folder.mkdir(parents=True, exist_ok=True)
        end_leftovers(folder)
        carried = ROOT / pack.FOLDER
        for earlier in (folder / archive.NAME, carried / archive.NAME):
            if earlier.exists() and (taken := archive.load(earlier, folder, rehearse)):
                print(f"going on from {earlier}, which has {len(taken)} parts", flush=True)
        packages = pack.unpack(carried, folder / "packages")
        paths = [str(ROOT), *([str(packages)] if packages else []), os.environ.get("PYTHONPATH", "")]
        self.cache = operators.private_cache([carried / pack.OPERATORS, folder / operators.COMPILED])
        self.known = {library.name for library in self.cache.glob("*.so")}
        self.environment = {
            **ALONE,
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            "ZERO_FULL_CACHE": str(self.cache),
            FOLDER: str(folder),
        }
        self.card = "" if rehearse else card()

    def run(self, part: Part, seconds: float) -> Result:
        """Run a part for so long at most."""
        command = [sys.executable, *part.command(self.rehearse)]
        switches = [f"{name}={value}" for name, value in part.environment.items()]
        result: Result = {
            "part": part.name,
            "state": "running",
            "began": datetime.now().astimezone().isoformat(timespec="seconds"),
            "rehearsal": self.rehearse,
            "card": self.card,
            "command": shlex.join([*switches, "python", *command[1:]]),
            "rows": [],
            "tables": [],
        }
        keep(result, self.folder)
        self.save()
        began = time.monotonic()
        with (self.folder / f"{part.name}.log").open("w") as log:
            code = self._follow(part, command, result, log, seconds)
        result["state"] = "stopped" if code is None else "failed" if code else "done"
        result |= {"code": code, "seconds": round(time.monotonic() - began, 1)}
        keep(result, self.folder)
        self.save()
        return result

    def save(self) -> None:
        """Write the archive."""
        operators.keep_compiled(self.cache, self.known, self.folder)
        if left_out := archive.save(self.folder):
            print(f"too large for the archive: {', '.join(left_out)}", flush=True)

    def _follow(
        self, part: Part, command: list[str], result: Result, log: TextIO, seconds: float
    ) -> int | None:
        """The exit code; None if it had to be ended. Rows are kept as they come."""
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**self.environment, **part.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            **OWN_GROUP,
        )

        def read() -> None:
            for line in process.stdout or ():
                log.write(line)
                log.flush()
                if (row := row_of(line)) is not None:
                    result["rows"].append(row)
                elif line.startswith(("|", "## ")):
                    result["tables"].append(line.rstrip())
                else:
                    continue
                keep(result, self.folder)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            return process.wait(timeout=max(seconds, 0))
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)
            reader.join(timeout=GRACE)


def end(process: "subprocess.Popen[str]") -> None:
    """End the process and those that it has started, if any are left."""
    for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience if process.returncode is None else 0)


def state_of(part: Part, folder: Path) -> str:
    """In a few words."""
    result = result_of(part, folder)
    if result is None:
        return "not run"
    rows = f"{len(result['rows'])} row{'' if len(result['rows']) == 1 else 's'}"
    if result["state"] == "running":
        return f"was killed while it ran, {rows}"
    code = f" with code {result['code']}" if result["state"] == "failed" else ""
    return f"{result['state']}{code} after {result['seconds']:.0f} s, {rows}"


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.day", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny sizes and stand-ins")
    parser.add_argument("--minutes", type=float, help="do not take longer than this, all parts together")
    parser.add_argument("--only", nargs="+", metavar="PART", help="nothing but these")
    parser.add_argument("--again", action="store_true", help="also what is done")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument("--folder", type=Path, help="of results; default: build/gpu-day, or -rehearsal")
    parser.epilog = f"the archive {archive.NAME} is written into ${archive.VARIABLE}, else into the folder"
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None, parts: Sequence[Part] = of_the_day.ALL) -> int:
    """Run what is asked for; see above for the exit code."""
    asked = arguments(given)
    folder = asked.folder or ROOT / "build" / ("gpu-day-rehearsal" if asked.rehearse else "gpu-day")
    folder = folder.absolute()
    if unknown := {*(asked.only or ())} - {part.name for part in parts}:
        raise SystemExit(f"there is no part {', '.join(sorted(unknown))}; see --list")
    wanted = [part for part in parts if not asked.only or part.name in asked.only]
    if asked.list:
        for part in wanted:
            print(f"{part.name:<16} about {part.minutes:g} min  {state_of(part, folder)}")
        return 0
    run_all(wanted, Day(folder, asked.rehearse), asked)
    if asked.rehearse:
        make_page(folder)
    bad = [part for part in wanted if (result_of(part, folder) or {}).get("state") in ("failed", "stopped")]
    left = [part for part in wanted if part not in bad and not is_done(part, folder)]
    for part in bad:
        print(f"FAILED: {part.name}, see {folder / part.name}.log")
    if left:
        print(f"not run: {', '.join(part.name for part in left)}; the same command goes on with them")
    print(f"all results: {archive.target(folder)}")
    return 1 if bad else 2 if left else 0


def run_all(wanted: Sequence[Part], day: Day, asked: argparse.Namespace) -> None:
    """One after the other, as long as the time lasts."""
    ends = time.monotonic() + 60 * (asked.minutes or float("inf"))
    for part in to_run(wanted, day.folder, asked.again):
        remaining, expected = ends - time.monotonic(), part.seconds(day.rehearse)
        if remaining < expected:
            print(f"{part.name}: not started, it takes about {expected / 60:g} min")
            continue
        print(f"{part.name}: {part.title} ...", flush=True)
        result = day.run(part, min(OVERRUN * expected, remaining))
        print(f"{part.name}: {state_of(part, day.folder)}", flush=True)
        if result["state"] != "done":
            lines = (day.folder / f"{part.name}.log").read_text().splitlines()[-SHOWN:]
            print("\n".join(f"    {line}" for line in lines), flush=True)


def make_page(folder: Path) -> None:
    """The rehearsal's page, beside its results."""
    command = [sys.executable, "-m", "tests.gpu.day.page", "--folder", str(folder), "--rehearsal"]
    subprocess.run(command, cwd=ROOT, check=True)
