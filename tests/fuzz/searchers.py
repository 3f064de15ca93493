"""Several judges beside each other, each a process with four ranks of its own."""

import itertools
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.fuzz.case import draw
from tests.fuzz.search import Judge, Verdict

CHUNK = 16  # cases at a time


def found_by(seeds: Iterator[int], seconds: float | None, searchers: int) -> Iterator[tuple[int, Verdict]]:
    """Verdicts as they come, of processes that have four ranks each."""
    context = multiprocessing.get_context("spawn")
    deadline = None if seconds is None else time.monotonic() + seconds
    pipes: dict[Any, list[int]] = {}
    processes = []
    for _ in range(searchers):
        mine, theirs = context.Pipe()
        process = context.Process(target=_search, args=(theirs,))
        process.start()
        theirs.close()
        processes.append(process)
        pipes[mine] = []

    def ask(pipe: Connection) -> None:
        late = deadline is not None and time.monotonic() > deadline
        pipes[pipe] = [] if late else list(itertools.islice(seeds, CHUNK))
        if pipes[pipe]:
            pipe.send(pipes[pipe])

    try:
        for pipe in pipes:
            ask(pipe)
        while busy := [pipe for pipe, some in pipes.items() if some]:
            for pipe in wait(busy):
                yield from zip(pipes[pipe], pipe.recv(), strict=True)
                ask(pipe)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(30)
            process.kill()


def _search(pipe: Connection) -> None:
    """A searcher's life: seeds in, verdicts out."""
    judge = Judge()
    try:
        while True:
            pipe.send(judge.verdicts([draw(seed) for seed in pipe.recv()]))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass
    finally:
        judge.close()
