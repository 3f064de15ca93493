"""What the tests of block I/O share: both kinds of threads, bytes, and new processes."""

import json
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.kernels.cases import ops
from zero_full.kernels.files import PAGE, BlockIO, aligned_empty

MiB = 2**20


@pytest.fixture(params=["compiled", "python"])
def compiled(request: pytest.FixtureRequest) -> bool:
    """Every test is about both kinds of threads."""
    wanted = request.param == "compiled"
    if wanted:
        ops()
    return wanted


@pytest.fixture
def io(compiled: bool) -> Iterator[BlockIO]:
    with BlockIO(threads=3, block_bytes=PAGE, compiled=compiled) as found:
        assert found.compiled == compiled
        yield found


def noise(size: int, memory_offset: int = 0) -> torch.Tensor:
    """Random bytes, so many bytes behind a page's begin."""
    values = aligned_empty(memory_offset + size, torch.uint8)[memory_offset:]
    return values.random_(0, 256, generator=torch.Generator().manual_seed(size))


def content(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


SERVER = """
import atexit
at_the_end = []
atexit.register(lambda: [each() for each in at_the_end])  # registered first, so called last
import contextlib, gc, json, os, pathlib, resource, sys, tempfile, threading, torch
from zero_full.kernels import load
from zero_full.kernels.files import *
load.load(torch.device("cpu"))
gc.freeze()  # else each child, as it ends, copies all that was imported
for line in sys.stdin:
    script, argument, said = json.loads(line)
    child = os.fork()
    if child == 0:
        for stream in (1, 2):
            os.dup2(os.open(said[stream - 1], os.O_WRONLY | os.O_CREAT), stream)
        exec(script)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """Has imported torch, which takes longer than all else here, and becomes a new process on demand."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as found:
        yield found
        found.kill()


@dataclass
class Done:
    code: int
    out: str
    err: str


Run = Callable[[str], Done]


@pytest.fixture
def in_new_process(server: subprocess.Popen[str], tmp_path: Path) -> Run:
    """Runs a script that finds a path in `argument`; it ends soon, or the test fails."""

    def run(script: str) -> Done:
        assert server.stdin is not None and server.stdout is not None
        said = [tmp_path / "out", tmp_path / "err"]
        server.stdin.write(json.dumps([script, str(tmp_path / "file"), list(map(str, said))]) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], 60)[0]:
            server.kill()
            pytest.fail("the process hangs")
        return Done(int(server.stdout.readline()), *(path.read_text() for path in said))

    return run
