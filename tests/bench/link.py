"""Ranks behind links of a given rate, on one machine: each has a network namespace and a cable of its own.

All cables (veth pairs) end at one switch (a bridge), and at both ends of each a token bucket of `tc` lets no
more than the rate through: so a rank sends at the rate and receives at the rate, as with a network card. What
a bucket lets through at once is a millisecond's worth. `limited_steps.py` measures what a
stream really gets.

The namespaces are those of one process tree, which `unshare` starts with a user namespace: no right is needed
beyond making that, nothing outside sees it, and all of it ends with its first process. Where that is not
allowed, or `ip` or `tc` is missing, `problem` says why, and nothing can be limited here: a benchmark then
says so instead of measuring something else.

Only ranks import torch: all else here starts at once.

    python -m tests.bench.link
"""

import contextlib
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

ALONE = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")
TOOLS = ("unshare", "ip", "tc")
PORT = 29500  # free in a namespace that has just been made
RATES = {"100 Mbit": 100_000_000, "1 Gbit": 1_000_000_000, "no limit": None}
INSIDE = {
    "GLOO_SOCKET_IFNAME": "eth0",
    "ZERO_FULL_SHARED_MEMORY": "off",  # it would be a way around the link
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # the addresses have no names, and torch would say so
}


class LinkError(RuntimeError):
    """A rank behind a limited link has failed, or was too slow."""


def problem() -> str | None:
    """Why no link can be limited on this machine, or None."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} cannot be found"
    done = subprocess.run(
        [*ALONE, sys.executable, "-m", "tests.bench.link", "try"], capture_output=True, text=True
    )
    return None if done.returncode == 0 else (done.stderr.strip() or "unshare failed").splitlines()[-1]


def run(
    fn: Callable[..., Any], world: int, *args: Any, rate: int | None, limit: float = 300, **environment: str
) -> list[Any]:
    """Call `fn(*args)` on `world` ranks, behind links of `rate` bits a second or of none; the answers.

    `fn` must be importable by its name. The ranks have a gloo group of all.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job").write_bytes(pickle.dumps((fn, args)))
        (Path(folder) / "link").write_text(json.dumps([world, rate]))
        command = [*ALONE, sys.executable, "-m", "tests.bench.link", "switch", folder]
        try:
            done = subprocess.run(command, timeout=limit, env={**os.environ, **INSIDE, **environment})
        except subprocess.TimeoutExpired:
            raise LinkError(f"ranks behind links did not answer within {limit:.0f} s") from None
        files = [Path(folder) / f"answer{rank}" for rank in range(world)]
        answers = [pickle.loads(file.read_bytes()) if file.exists() else (False, "it died") for file in files]
    failed = [f"rank {rank}: {text}" for rank, (fine, text) in enumerate(answers) if not fine]
    if failed or done.returncode:
        raise LinkError("\n".join(failed) or "the switch failed, see above")
    return [answer for _, answer in answers]


# Inside ----------------------------------------------------------------------------------------------


def _do(*commands: str) -> None:
    for command in commands:
        done = subprocess.run(command.split(), capture_output=True, text=True)
        if done.returncode:
            raise LinkError(f"{command}: {done.stderr.strip()}")


def bucket(device: str, rate: int | None) -> list[str]:
    """The command that limits what leaves by a device."""
    if rate is None:
        return []
    burst = max(rate // 8 // 1000, 5_000)
    return [f"tc qdisc add dev {device} root tbf rate {rate}bit burst {burst} latency 200ms"]


def switch(world: int, rate: int | None, command: Sequence[str]) -> int:
    """Start the ranks by `command` and their number, give each a cable, and wait for them."""
    _do("ip link add switch type bridge", "ip link set switch up")
    ranks = []
    for rank in range(world):
        started = [*ALONE[:1], "--net", *command, str(rank)]
        ranks.append(subprocess.Popen(started, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for rank, process in enumerate(ranks):
        assert process.stdin is not None and process.stdout is not None
        if process.stdout.readline() != "here\n":  # it is in its namespace
            raise LinkError(f"rank {rank} did not start")
        _do(
            f"ip link add cable{rank} type veth peer name eth0 netns {process.pid}",
            f"ip link set cable{rank} master switch up",
            *bucket(f"cable{rank}", rate),
        )
    for process in ranks:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    while True:  # with this process, the first of its tree, end all ranks that wait for one that has failed
        codes = [process.poll() for process in ranks]
        if any(codes) or None not in codes:
            return 1 if any(codes) else 0
        time.sleep(0.05)


def connected(rank: int, rate: int | None) -> None:
    """Wait for the cable, and use it."""
    print("here", flush=True)
    if sys.stdin.readline() != "go\n":
        raise LinkError("there is no switch")
    _do(
        "ip link set lo up",
        f"ip addr add 10.77.0.{rank + 1}/24 dev eth0",
        "ip link set eth0 up",
        *bucket("eth0", rate),
    )
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads the pipe any more


def link_of(folder: Path) -> tuple[int, int | None]:
    """How many ranks, and the rate of their links."""
    world, rate = json.loads((folder / "link").read_text())
    return world, rate


def be_rank(folder: Path, rank: int) -> int:
    """The life of a rank; its answer becomes a file."""
    import torch
    import torch.distributed as dist

    world, rate = link_of(folder)
    connected(rank, rate)
    fn, args = pickle.loads((folder / "job").read_bytes())
    torch.set_num_threads(1)
    try:
        where = f"tcp://10.77.0.1:{PORT}"
        patience = timedelta(seconds=120)
        dist.init_process_group("gloo", where, world_size=world, rank=rank, timeout=patience)
        answer = (True, fn(*args))
    except Exception as error:
        answer = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    (folder / f"answer{rank}").write_bytes(pickle.dumps(answer))
    if answer[0]:
        dist.barrier()
        dist.destroy_process_group()
    return 0 if answer[0] else 1


def try_it() -> None:
    """Whatever `switch` and `connected` need, once, without ranks."""
    _do("ip link add switch type bridge", "ip link set lo up")
    _do("ip link add cable0 type veth peer name cable1", *bucket("cable0", RATES["100 Mbit"]))
    with contextlib.closing(socket.create_server(("127.0.0.1", PORT))):
        pass


def main(arguments: Sequence[str]) -> int:
    """What the processes of `run` and `problem` do; without arguments, say what this machine can."""
    try:
        if not arguments:
            print(problem() or "links can be limited here")
        elif arguments[0] == "try":
            try_it()
        elif arguments[0] == "switch":
            rank = [sys.executable, "-m", "tests.bench.link", "rank", arguments[1]]
            return switch(*link_of(Path(arguments[1])), rank)
        else:
            return be_rank(Path(arguments[1]), int(arguments[2]))
    except LinkError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
