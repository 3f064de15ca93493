"""Where the ranks of a test live: threads (fast) or real gloo processes (a pool that stays up).

The pool starts once: its ranks are forked from a process that has imported torch and used nothing of
it, so that the import is paid for once, and not by every rank and after every kill. Every job gets a fresh
process group over one TCP store whose port the system chose; a job that overruns its limit is killed with
all its ranks and the pool starts anew.
"""

import atexit
import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from lessons import replace

if "zero_min" not in sys.modules:  # in a worker: the same files as in the parent
    replace.install()

from zero_min.dist_comm import DistComm
from zero_min.thread_comm import run_world

SIZE = 4


class RankError(RuntimeError):
    """A rank of a process world failed or did not answer."""


def _serve(pipe: Connection, port: int) -> None:
    """A worker's life: take a job, be one rank of it, answer. The end of the pipe is the end of life."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    gc.freeze()  # what was imported stays: without it, tests that collect garbage have little to look at
    client: Any = None
    while True:
        try:
            job, rank, world_size, limit, backend, fn, args = pipe.recv()
        except EOFError:
            return
        try:
            # One connection while all goes well: now and then a new one takes five seconds.
            client = client or dist.TCPStore("127.0.0.1", port, is_master=False)
            seconds = timedelta(seconds=limit)
            store = dist.PrefixStore(f"job{job}", client)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=seconds)
            # A rank that leaves at once would fail those that are still connecting.
            if store.add("connected", 1) == world_size:
                store.set("all connected", "")
            store.wait(["all connected"])
            comm = DistComm()
            answer = (True, fn(comm, *args))
            comm.sent()
        except BaseException as error:
            answer = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
            client = None  # what has failed may have left it unusable, and then all jobs after it would fail
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            # As after destroying a group. A rank whose group was never made has counted it, and its next one
            # would have another name than on the other ranks.
            dist.distributed_c10d._world.group_count = 0
            if job % 16 == 0:
                gc.collect()  # process groups have threads: do not let those of a hundred jobs pile up
        # By value: tensors handed over as shared memory would keep a file open each, and results are kept.
        pipe.send_bytes(pickle.dumps(answer))


class Pool:
    """Up to `size` ranks as processes."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.store: Any = None
        self.workers: list[tuple[Any, Connection]] = []
        self.jobs = itertools.count()

    def _start(self) -> None:
        if self.workers:
            return
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.imported"])
        for _ in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self.store.port), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, mine))

    def stop(self) -> None:
        """Kill every rank."""
        for process, pipe in self.workers:
            process.kill()
            process.join()
            pipe.close()
        self.workers = []

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        limit: float = 180,  # of many cases on a machine with other work; a rank that waits gives up before
        collective: float = 20,
        backend: str = "gloo",
    ) -> list[Any]:
        """Call `fn(comm, *args)` on `world_size` processes; `collective` limits each wait for a peer."""
        self._start()
        job = next(self.jobs)
        team = self.workers[:world_size]
        for rank, (_, pipe) in enumerate(team):
            pipe.send((job, rank, world_size, collective, backend, fn, args))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + limit
        while len(answers) < world_size and time.monotonic() < deadline:
            pipes = {pipe: rank for rank, (_, pipe) in enumerate(team) if rank not in answers}
            for pipe in wait(list(pipes), timeout=max(0.0, deadline - time.monotonic())):
                rank = pipes[pipe]  # type: ignore[index]
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    answers[rank] = (False, "the process died")
        silent = [rank for rank in range(world_size) if rank not in answers]
        failed = {rank: text for rank, (fine, text) in answers.items() if not fine}
        if silent or "the process died" in failed.values():
            self.stop()
        if silent:
            raise RankError(f"ranks {silent} did not answer within {limit} s; others: {failed}")
        if failed:
            raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failed.items())))
        return [answers[rank][1] for rank in range(world_size)]


POOL = Pool()
atexit.register(POOL.stop)


@contextmanager
def new_pool(size: int) -> Iterator[Pool]:
    """Processes that have run nothing yet, for tests of memory: how much glibc keeps depends on what ran."""
    pool = Pool(size)
    try:
        yield pool
    finally:
        pool.stop()


def run_in(place: str, fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run `fn(comm, *args)` on every rank, as "threads" or as "processes"."""
    return run_world(fn, world_size, *args) if place == "threads" else POOL.run(fn, world_size, *args)


def run_each(fn: Callable[..., Any], world_size: int, cases: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    """Run `fn(comm, *case)` on processes, for one case after the other in one job; by case, then by rank.

    A job of its own costs a case a process group, which is often more than what it tests. The first case that
    fails says which it is, and ends the job.
    """
    by_rank = POOL.run(_one_after_another, world_size, fn, cases)
    return [list(answers) for answers in zip(*by_rank, strict=True)]


def _one_after_another(comm: Any, fn: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    answers = []
    for case in cases:
        try:
            answers.append(fn(comm, *case))
        except Exception as error:
            raise RuntimeError(f"{fn.__name__}{case}: {type(error).__name__}: {error}") from error
    return answers


def free_port() -> int:
    """One that the system gives to nobody else for a minute, except to who asks for this one by its number.

    It stays with a connection that has ended: of these the system keeps the port, and who listens there as
    torch's store does (SO_REUSEADDR) may take it.
    """
    with socket.socket() as asked:
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        asked.bind(("127.0.0.1", 0))
        asked.listen()
        with socket.create_connection(asked.getsockname()) as caller:
            asked.accept()[0].close()  # the end that is closed first is the one whose port is kept
            caller.recv(1)
        return int(asked.getsockname()[1])
