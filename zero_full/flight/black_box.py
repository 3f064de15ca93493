"""One rank's events on disk: lines of JSON, in two files that take turns.

[Note: black box] Once written, a line is in the system's page cache. It survives if the process is killed,
aborted by its backend, or hangs. Nothing calls fsync, so a line costs a copy in memory, and a power cut may
lose it.

When a file has enough steps or events, the other file is emptied and written next. So the two files always
hold the last `steps` steps and never more than twice as many. Each file states at its start how many steps
and events were dropped before it.
"""

import json
import logging
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_full.flight.rank_files import DONE, FORMAT, file_of, folder_of, folders_of

log = logging.getLogger("zero_full")
EVENTS = 20_000  # in one file, at most
WRITE_FAILED = "cannot write the recording %s (%s): it ends here, and training continues"


class BlackBox:
    """Writes one rank's events. Threads may share it."""

    def __init__(self, path: Path, rank: int, about: Mapping[str, Any], steps: int) -> None:
        """Open both files and write `about` to the first. Raises OSError if the folder cannot be written."""
        self.path, self.rank, self.about, self.steps = path, rank, dict(about), steps
        self.lock = threading.Lock()
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder. Pass the path of a file")
        self.folder = folder = folder_of(path, about["run"])
        folder.mkdir(parents=True, exist_ok=True)
        # This recording takes the place of earlier ones: of their file, and of what killed runs have left.
        path.unlink(missing_ok=True)
        for each in folders_of(path):
            if each < folder:
                shutil.rmtree(each, ignore_errors=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self.files = [os.open(file_of(folder, rank, number), flags, 0o644) for number in (0, 1)]
        self.turns = 0
        self.held_steps, self.held_events = [0, 0], [0, 0]  # by file
        self.dropped_steps = self.dropped_events = 0
        self.step = int(about["step"])
        self._begin()

    def _begin(self) -> None:
        dropped = {"steps": self.dropped_steps, "events": self.dropped_events}
        about = {**self.about, "turn": self.turns, "step": self.step, "dropped": dropped}
        self._put(json.dumps({FORMAT: about}))

    def _put(self, line: str) -> None:
        os.write(self.files[self.turns % 2], f"{line}\n".encode())

    def write(self, line: Mapping[str, Any], ends_step: bool = False) -> None:
        """Write one event. After a failed write, which is logged, do nothing."""
        text = json.dumps(line, separators=(",", ":"))
        with self.lock:
            if self.files:
                try:
                    self._put(text)
                    self._count("what" in line, ends_step)  # an event's first line has "what"
                except OSError as error:
                    log.warning(WRITE_FAILED, self.path, error)
                    self._close()

    def _count(self, begins: bool, ends_step: bool) -> None:
        now = self.turns % 2
        self.held_events[now] += begins
        self.held_steps[now] += ends_step
        self.step += ends_step
        if self.held_events[now] >= EVENTS or self.held_steps[now] >= self.steps:
            self._turn()

    def _turn(self) -> None:
        self.turns += 1
        now = self.turns % 2
        self.dropped_steps += self.held_steps[now]
        self.dropped_events += self.held_events[now]
        self.held_steps[now] = self.held_events[now] = 0
        os.ftruncate(self.files[now], 0)
        os.lseek(self.files[now], 0, os.SEEK_SET)
        self._begin()

    def finish(self, how: str) -> None:
        """Write how the recording ended, close the files, and mark this rank as done."""
        self.write({"ended": how})
        with self.lock:
            if self.files:
                self._close()
                self.folder.joinpath(DONE.format(self.rank)).touch()

    def _close(self) -> None:
        files, self.files = self.files, []
        for file in files:
            os.close(file)
