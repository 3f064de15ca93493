"""`python -m tests.suite`: the tests in several processes beside each other, which take files from one queue.

Where the ranks of one process wait for each other, another process computes. One of them imports and
collects all tests, and the others are forked from it. Arguments go to pytest.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from time import monotonic
from typing import IO, Any

import pytest

from tests import rotation

PROCESSES = min(os.cpu_count() or 1, 4) + 1
QUEUE, OUTPUTS = "ZERO_FULL_TEST_QUEUE", "ZERO_FULL_TEST_OUTPUTS"
# Files of these folders share nothing, and may run beside each other. Files of another folder may share
# results in build/ or in memory: one process runs them one after the other.
BY_FILE = ("tests/zero_full", "tests/conformance", "tests/hostile", "tests/fuzz", "tests/zero_min")
TOGETHER = {"tests/notebooks": "tests/site"}  # both run notebooks


# In each process, as a plugin of pytest ----------------------------------------------------------

others: dict[int, int] = {}  # process id by number, of the processes that this one has forked


def fork_others(config: pytest.Config) -> int:
    """Fork the other processes, which write to pipes of their own. Returns the number of the present one."""
    pipes = [int(pipe) for pipe in os.environ[OUTPUTS].split(",")]
    sys.stdout.flush()
    for number, pipe in enumerate(pipes, 2):
        pid = os.fork()
        if pid == 0:
            others.clear()
            capture: Any = config.pluginmanager.getplugin("capturemanager")
            capture.stop_global_capturing()  # it would go back to the output of the first process
            os.dup2(pipe, 1)
            os.dup2(pipe, 2)
            capture.start_global_capturing()
            capture.suspend_global_capture()
            break
        others[number] = pid
    for pipe in pipes:
        os.close(pipe)
    return number if pid == 0 else 1


def pytest_sessionfinish() -> None:
    """Wait for the forked processes, and leave their exit codes in the queue."""
    for number, pid in others.items():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        (Path(os.environ[QUEUE]) / f"code {number}").write_text(str(code))


def unit_of(item: pytest.Item) -> str:
    """The file or folder that one process takes as a whole."""
    file = Path(item.nodeid.partition("::")[0])
    folder = "/".join(file.parts[:2])
    return file.as_posix() if folder in BY_FILE else TOGETHER.get(folder, folder)


def taken(items: list[pytest.Item], queue: Path, from_the_end: bool) -> Iterator[pytest.Item]:
    """The tests of units that no other process has taken.

    Units of ranks are last in the order of names and folders, and every second process begins there.
    """
    units: dict[str, list[pytest.Item]] = {}
    for item in sorted(items, key=lambda item: unit_of(item).endswith(".py")):
        units.setdefault(unit_of(item), []).append(item)
    for unit in reversed(units) if from_the_end else units:
        try:
            (queue / unit.replace("/", ".")).touch(exist_ok=False)
        except FileExistsError:
            continue
        yield from units[unit]


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run what this process takes from the queue. pytest itself stops after an error of collection."""
    if session.testsfailed or session.config.option.collectonly or QUEUE not in os.environ:
        return None
    number = fork_others(session.config)
    items = taken(session.items, Path(os.environ[QUEUE]), from_the_end=number % 2 == 0)
    item = next(items, None)
    while item is not None:
        following = next(items, None)  # which decides what fixtures stay
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


# Around them -------------------------------------------------------------------------------------


def show(output: IO[str], number: int, lines: list[str]) -> None:
    """Print a process's output as it comes, with its number before each line."""
    for line in output:
        lines.append(line)
        print(f"{number}: {line}", end="", flush=True)


def summary(outputs: list[list[str]], codes: list[int], seconds: float) -> str:
    """What failed, and how many tests there were, over all processes."""
    counts = Counter[str]()
    for lines in outputs:
        # What a library prints while the process ends stands behind pytest's last line.
        last = next((line for line in reversed(lines) if re.search(r"\d \w+.* in \d+\.\d+s", line)), "")
        for count, what in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last):
            counts[what] += int(count)
    failed = [line for lines in outputs for line in lines if re.match(r"(FAILED|ERROR) ", line)]
    ends = [f"process {number} ended with code {code}\n" for number, code in enumerate(codes, 1) if code]
    total = ", ".join(f"{count} {what}" for what, count in counts.items())
    return f"{''.join([*failed, *ends])}{total} in {seconds // 60:.0f} min {seconds % 60:.0f} s"


def main(arguments: list[str]) -> int:
    """Run them all; 1 if something failed in a process."""
    began = monotonic()
    print(rotation.in_words(), flush=True)
    with TemporaryDirectory() as queue:
        pipes = [os.pipe() for _ in range(PROCESSES - 1)]
        ends = [written for _, written in pipes]
        # A forked process cannot use threads of OpenMP that it has not started itself.
        shared = {
            "OMP_NUM_THREADS": "1",
            QUEUE: queue,
            OUTPUTS: ",".join(map(str, ends)),
            rotation.VARIABLE: str(rotation.seed()),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "tests.suite", *arguments],
            env={**os.environ, **shared},
            pass_fds=ends,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for end in ends:
            os.close(end)
        assert process.stdout is not None
        files = [process.stdout, *(os.fdopen(read) for read, _ in pipes)]
        outputs: list[list[str]] = [[] for _ in files]
        readers = [
            Thread(target=show, args=(file, number, outputs[number - 1]))
            for number, file in enumerate(files, 1)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        codes = [process.wait()]
        codes += [int(file.read_text()) for file in sorted(Path(queue).glob("code *"))]
    print(summary(outputs, codes, monotonic() - began))
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
