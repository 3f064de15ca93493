"""Real ranks that are killed while they save, and what must be there afterwards."""

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_full
from zero_full.checkpoint import complete, open_checkpoint

CALLS = ("open", "write", "fsync", "mkdir", "replace", "unlink", "rmdir")  # that change a disk, or promise to
LIMIT = 60.0  # seconds, after which a rank hangs


class Small(nn.Module):
    """So few tensors that few calls save them; `more` parameters make a save take longer."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
        self.more = nn.Parameter(torch.zeros(more))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        self.calls += 1
        return self.layer(x).square().mean() + self.more.sum()


def engine_of(more: int = 0, keep_last: int | None = None) -> zero_full.Engine:
    """A new one."""
    keys: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1},
    }
    keys |= {"checkpoint": {"keep_last": keep_last}} if keep_last else {}
    return zero_full.initialize(model=Small(more), config=keys)[0]


def step(engine: zero_full.Engine) -> None:
    """One step, the same on every rank."""
    generator = torch.Generator().manual_seed(engine.global_steps)
    engine.backward(engine(torch.randn(4, 3, generator=generator)))
    engine.step()


def save(engine: zero_full.Engine, folder: Path, tag: str) -> None:
    """With the step's number beside it."""
    engine.save_checkpoint(folder, tag=tag, client_state={"step": engine.global_steps})


# What a rank does ----------------------------------------------------------------------------------


class Killer:
    """Counts the calls of `CALLS`, and ends this process at the one of this number: a write half-way.

    What has been written and not flushed is lost then, as when the power fails.
    """

    def __init__(self, at: int | None) -> None:
        self.at, self.calls = at, list[str]()
        self.unflushed: dict[int, Any] = {}  # files, by descriptor
        self.real = {name: getattr(os, name) for name in CALLS}

    def __enter__(self) -> "Killer":
        for name in CALLS:
            setattr(os, name, self._watched(name))
        return self

    def __exit__(self, *failure: Any) -> None:
        for name, real in self.real.items():
            setattr(os, name, real)

    def _watched(self, name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if len(self.calls) == self.at:
                self._end(name, given)
            self.calls.append(name)
            result = self.real[name](*given, **named)
            if name == "open" and given[1] & os.O_CREAT:
                self.unflushed[result] = given[0]
            if name == "fsync":
                self.unflushed.pop(given[0], None)
            return result

        return call

    def _end(self, name: str, given: tuple[Any, ...]) -> None:
        if name == "write":
            self.real["write"](given[0], given[1][: len(given[1]) // 2])
        elif len(self.calls) % 2:
            for path in self.unflushed.values():
                os.truncate(path, 0)
        os.kill(os.getpid(), signal.SIGKILL)


def saves_and_dies(
    rank: int, pipe: Connection, folder: Path, how: Mapping[str, Any]
) -> tuple[list[str], str | None]:
    """Two steps and a save; which calls that made, and what it said if it failed."""
    engine = engine_of(how.get("more", 0), how.get("keep_last"))
    step(engine)
    step(engine)
    pipe.send("begin")
    said = None
    with Killer(how.get("at") if rank == how["victim"] else None) as killer:
        try:
            save(engine, folder, how["tag"])
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    return killer.calls, said


def prepares(rank: int, pipe: Connection, folder: Path, scenario: str, more: int) -> None:
    """What lies in the folder when the save begins whose ranks are killed."""
    engine = engine_of(more)
    save(engine, folder, "same" if scenario == "replaced" else "oldest")
    if scenario == "replaced" and rank == 0:
        (folder / "same").rename(folder / "set aside")
    step(engine)
    save(engine, folder, "old" if scenario in ("new", "kept") else "same")
    if scenario == "replaced" and rank == 0:
        (folder / "set aside").rename(folder / "replaced-0123abcd-same")


def _serve(rank: int, port: int, pipe: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT / 2)
    )
    pipe.send(("answer", pickle.dumps(fn(rank, pipe, *args))))
    os._exit(0)  # whoever is left does not wait for the dead


def two_ranks(
    fn: Callable[..., Any], *args: Any, kill: tuple[int, float] | None = None
) -> tuple[list[Any], float]:
    """What `fn(rank, pipe, *args)` answers on two ranks (None: it has died), and the seconds since it began.

    kill  which rank is to be killed, and how many seconds after both have sent "begin"
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.imported"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = [context.Pipe() for _ in range(2)]
    ranks = [
        context.Process(target=_serve, args=(rank, store.port, ends[rank][1], fn, args)) for rank in range(2)
    ]
    for process, (_, theirs) in zip(ranks, ends, strict=True):
        process.start()
        theirs.close()
    try:
        return _answers(ranks, [mine for mine, _ in ends], kill)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _answers(
    ranks: list[Any], pipes: list[Connection], kill: tuple[int, float] | None
) -> tuple[list[Any], float]:
    answers: dict[Connection, Any] = {}
    begun, deadline, began = 0, time.monotonic() + LIMIT, 0.0
    while len(answers) < len(pipes):
        left = [pipe for pipe in pipes if pipe not in answers]
        ready = wait(left, timeout=max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {[pipes.index(pipe) for pipe in left]} hang"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                told = pipe.recv()
            except (EOFError, ConnectionResetError):
                answers[pipe] = None
                continue
            if told != "begin":
                answers[pipe] = pickle.loads(told[1])
                continue
            begun += 1
            if begun == len(pipes):
                began = time.monotonic()
                if kill is not None:
                    time.sleep(kill[1])
                    ranks[kill[0]].kill()
    return [answers[pipe] for pipe in pipes], time.monotonic() - began


# What there is afterwards --------------------------------------------------------------------------


def contents_of(folder: Path, tag: str | None = None) -> dict[str, Any]:
    """All that a checkpoint has, read from its files, every byte verified."""
    source = open_checkpoint(folder, tag)
    try:
        found: dict[str, Any] = {"step": source.shared["client_state"]["step"], "numbers": source.numbers}
        for key, tensor in source.tensors.items():
            for start, stop in tensor.pieces:
                source.verify(key, start, stop)
            found[key] = source.read_across(key, 0, tensor.numel)
        return found
    finally:
        source.close()


def check_folder(folder: Path, references: list[dict[str, Any]], at_least: int) -> int:
    """Everything that counts as complete is one of the saves, from its first to its last byte.

    Returns the step of the newest, which a load finds; it must be `at_least` this one.
    """
    newest = -1
    for tag in (*complete(folder), None):
        found = contents_of(folder, tag)
        same = references[found["step"]]
        assert found.keys() == same.keys()
        for key, value in found.items():
            is_same = torch.equal(value, same[key]) if isinstance(value, Tensor) else value == same[key]
            assert is_same, (tag, key, value, same[key])
        newest = found["step"]
    assert newest >= at_least, newest
    return newest
