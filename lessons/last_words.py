"""What a test process left behind that could not finish: a crash below Python, or a loop without an end.

`Watch` writes each test's name into a file and lets `faulthandler` add the stacks of all threads when the
process is killed by its own mistake, or when a test computes for longer than `LIMIT`. `read` finds in there
the learner's line.
"""

import faulthandler
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LIMIT = 20.0  # seconds for one test
SHORT = 5.0  # seconds for one of a task, which needs a small part of one
PATIENCE = 4  # times `LIMIT`, for a test that did not get the processor, or waits for ranks: they say why
CRASHES = {
    "Segmentation fault": "the process used memory that it does not have",
    "access violation": "the process used memory that it does not have",
    "Bus error": "the process used memory that it does not have",
    "Aborted": "memory was corrupted, or a library stopped the process",
    "Floating-point exception": "a division that the processor cannot do",
    "Illegal instruction": "an instruction that this processor does not have",
}
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')


class Watch:
    """Writes down what runs, and what was running when it could not go on."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", encoding="utf-8")
        self.lock, self.runs, self.cpu = threading.Lock(), 0, 0.0
        faulthandler.enable(self.file)

    @contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Inside the `with` this is what runs, and it has `LIMIT` seconds."""
        self.start(what)
        try:
            yield
        finally:
            self.stop()

    def start(self, what: str, limit: float | None = None) -> None:
        """From now on this is what runs, with a limit of its own or with `LIMIT`."""
        print(f"running {what}", file=self.file, flush=True)
        self.cpu = time.process_time()
        limit = limit or LIMIT
        self._allow(self.runs, limit, int(PATIENCE * LIMIT / limit))

    def _allow(self, run: int, limit: float, more: int) -> None:
        """Another period. Before it ends, look whether the process could compute at all in it."""
        with self.lock:
            idle = time.process_time() - self.cpu < limit / 2
            if run != self.runs or not idle:
                return
            faulthandler.dump_traceback_later(limit, exit=True, file=self.file)
        if more > 1:
            timer = threading.Timer(0.9 * limit, self._allow, (run, limit, more - 1))
            timer.daemon = True
            timer.start()

    def stop(self) -> None:
        """It has ended by itself."""
        with self.lock:
            self.runs += 1
            faulthandler.cancel_dump_traceback_later()


@dataclass(frozen=True)
class End:
    """How a process ended: during what, why, and in which line of a learner's file, if in any."""

    during: str
    why: str
    place: tuple[Path, int] | None


def read(text: str, works: Sequence[Path]) -> End | None:
    """What the file of a `Watch` says; None if nothing went wrong below Python."""
    if "Thread 0x" not in text and "Current thread 0x" not in text:
        return None
    during = re.findall(r"^running (.+)$", text, re.MULTILINE)[-1]
    if found := re.search(r"Timeout \((\d+):(\d+):([\d.]+)\)", text):
        seconds = 3600 * int(found[1]) + 60 * int(found[2]) + float(found[3])
        why = f"not done after {seconds:g} seconds: is there a loop that never ends?"
        return End(during, why, _place(text, works))
    for crash, meaning in CRASHES.items():
        if crash.lower() in text.lower():
            return End(during, f"{crash}: {meaning}", _place(text, works))
    return End(during, "the process crashed", _place(text, works))


def _place(text: str, works: Sequence[Path]) -> tuple[Path, int] | None:
    """The innermost line of a learner's file: of the thread that crashed, or of one that does not wait."""
    stacks = [
        (stack.startswith("Current"), [FRAME.match(line) for line in stack.splitlines()[1:]])
        for stack in re.split(r"^(?=Thread 0x|Current thread 0x)", text, flags=re.MULTILINE)[1:]
    ]
    found = []
    for crashed, lines in stacks:
        frames = [(Path(frame[1]), int(frame[2])) for frame in lines if frame]
        theirs = [frame for frame in frames if frame[0] in works]
        if theirs:
            waits = frames[0][0].name == "threading.py"
            found.append((not crashed, waits, theirs[0]))
    return min(found)[2] if found else None
