"""`python -m tests.suite`: the tests in two processes beside each other, which take files from one queue.

Where the ranks of one process wait for each other, the other process computes. Arguments go to pytest.
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

import pytest

from tests import rotation

PROCESSES = 2
QUEUE, NUMBER = "ZERO_FULL_TEST_QUEUE", "ZERO_FULL_TEST_PROCESS"
# Files of these folders share nothing, and may run beside each other. Files of another folder may share
# results in build/ or in memory: one process runs them one after the other.
BY_FILE = ("tests/zero_full", "tests/conformance", "tests/hostile", "tests/fuzz", "tests/zero_min")
TOGETHER = {"tests/notebooks": "tests/site"}  # both run notebooks


# In each process, as a plugin of pytest ----------------------------------------------------------


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
    items = taken(session.items, Path(os.environ[QUEUE]), int(os.environ[NUMBER]) % 2 == 0)
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


def show(process: subprocess.Popen[str], number: int, lines: list[str]) -> None:
    """Print its output as it comes, with its number before each line."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        print(f"{number}: {line}", end="", flush=True)


def summary(outputs: list[list[str]], codes: list[int], seconds: float) -> str:
    """What failed, and how many tests there were, over all processes."""
    counts = Counter[str]()
    for lines in outputs:
        for count, what in re.findall(r"(\d+) (passed|failed|errors?|skipped)", lines[-1] if lines else ""):
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
        shared = {**os.environ, QUEUE: queue, rotation.VARIABLE: str(rotation.seed())}
        command = [sys.executable, "-m", "pytest", "-p", "tests.suite", *arguments]
        processes = [
            subprocess.Popen(
                command,
                env={**shared, NUMBER: str(number)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for number in range(1, PROCESSES + 1)
        ]
        outputs: list[list[str]] = [[] for _ in processes]
        readers = [
            Thread(target=show, args=(process, number, outputs[number - 1]))
            for number, process in enumerate(processes, 1)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        codes = [process.wait() for process in processes]
    print(summary(outputs, codes, monotonic() - began))
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
