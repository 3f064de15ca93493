"""Runs checks, each on ranks that are forked for it: what one breaks or hangs, the next does not see.

    python -m tests.gpu.day.ranks --ranks 2 conformance streams

This process imports and never touches the device, so ranks start in no time and none shares a context. They
find each other by torchrun's variables. With more ranks than devices several share a card.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zero_full
from tests.gpu.day import conformance, failures, hooks, memory, native, overlap, streams, tiers
from tests.gpu.day.place import Place
from tests.gpu.day.rows import parser_for, say
from tests.worlds import free_port

Check = Callable[[Place], None]
SECONDS = 90  # of one check: a part has several, and ends after some minutes
PATIENCE = {True: 3, False: 20}  # seconds that a rank waits for another one; in a rehearsal and otherwise
GRACE = 10  # seconds that ranks have to end after one has failed, beside what they wait for each other
SHOWN = 600  # characters of what a rank has written at last
CHECKS: dict[str, Check] = {
    "conformance": conformance.check,
    "streams": streams.check,
    "watched": streams.watched,
    "synchronisations": streams.synchronisations,
    "peak": memory.check,
    "default-peak": memory.defaults,
    "traces": overlap.check,
    "tiers": tiers.check,
    "reads": tiers.reads,
    "native": native.check,
    "hooks": hooks.check,
}


@dataclass(frozen=True)
class Ended:
    """How a rank has ended: its exit code (None: it did not, and was killed), when, and its last words."""

    code: int | None
    after: float
    said: str


def life(check: Check, device: str, rank: int, world: int, tiny: bool, port: int, log: str) -> None:
    """Of a rank."""
    with Path(log).open("w") as file:
        os.dup2(file.fileno(), 2)
    if world > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ |= {**{name: str(value) for name, value in place.items()}, "MASTER_PORT": str(port)}
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        patience = timedelta(seconds=PATIENCE[tiny])
        zero_full.init_distributed("gloo" if device == "cpu" else None, timeout=patience)
    if device == "cpu":
        torch.set_num_threads(1)
        where = torch.device("cpu")
    else:
        where = torch.device("cuda", torch.cuda.current_device())
    check(Place(where, rank, world, tiny))
    if dist.is_initialized():
        dist.destroy_process_group()


def together(check: Check, asked: Any, seconds: float = SECONDS, grace: float | None = None) -> list[Ended]:
    """Run a check on all ranks. If one fails the others have `grace` seconds, and are killed then."""
    assert not torch.cuda.is_initialized(), "a process that uses the device cannot be forked"
    grace = GRACE + 2 * PATIENCE[asked.tiny] if grace is None else grace
    context, port = multiprocessing.get_context("fork"), free_port()
    with tempfile.TemporaryDirectory() as scratch:
        logs = [Path(scratch) / f"rank{rank}" for rank in range(asked.ranks)]
        ranks = []
        for rank, log in enumerate(logs):
            given = (check, asked.device, rank, asked.ranks, asked.tiny, port, str(log))
            ranks.append(context.Process(target=life, args=given))
            ranks[-1].start()
        began = time.monotonic()
        ended: dict[int, tuple[int | None, float]] = {}
        deadline = began + seconds
        while len(ended) < len(ranks) and time.monotonic() < deadline:
            time.sleep(0.01)
            for rank, process in enumerate(ranks):
                if rank not in ended and process.exitcode is not None:
                    ended[rank] = (process.exitcode, time.monotonic() - began)
                    if process.exitcode:
                        deadline = min(deadline, time.monotonic() + grace)
        for process in ranks:
            process.kill()
            process.join()
        lost = (None, time.monotonic() - began)
        said = [log.read_text(errors="replace").strip() if log.exists() else "" for log in logs]
    return [Ended(*ended.get(rank, lost), text) for rank, text in enumerate(said)]


def passes(name: str, asked: Any) -> bool:
    """Run a check of that name, and say whether every rank came to its end."""
    began = time.monotonic()
    ended = together(CHECKS[name], asked)
    bad = {rank: one for rank, one in enumerate(ended) if one.code != 0}
    for rank, one in bad.items():
        how = "did not end" if one.code is None else f"ended with code {one.code}"
        say(check=name, rank=rank, fine=False, why=f"{how}: {one.said[-SHOWN:]}")
    spent = round(time.monotonic() - began, 1)
    say(check=name, ranks=asked.ranks, seconds=spent, fine=not bad)
    return not bad


def main() -> int:
    """Run the checks; 1 if one of them fails."""
    parser = parser_for(__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("names", nargs="+", choices=[*CHECKS, *failures.EVENTS])
    asked = parser.parse_args()
    good = [
        failures.ends(name, asked, together) if name in failures.EVENTS else passes(name, asked)
        for name in asked.names
    ]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
