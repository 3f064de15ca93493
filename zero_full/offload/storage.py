"""The common part of offload tiers and parameter stores: their disk, and errors of reads and writes."""

import logging

from zero_full.comm.lane import ThreadLane
from zero_full.offload.spill_file import SpillFile, check_disk_space

log = logging.getLogger("zero_full")


class Storage:
    """Base of tiers and parameter stores. Its attributes are those of a store that uses no disk."""

    disk_id = ""  # the disk of this host that it uses, while it is open
    advice = ""  # a hint for the user about this choice
    write_error = ""  # the reason why no further step can be taken
    lost = ""  # the message about values that could not be read

    def moved(self) -> dict[str, int]:
        """Return the bytes moved so far between memory and disk, by direction."""
        return {}

    def check_space(self, need: int) -> None:
        """Raise OSError if `need` bytes, of all ranks of this host, do not fit on the disk."""

    def close(self) -> None:
        """Free the memory, and close files and threads."""


class FileStorage(Storage):
    """A tier or store with an unnamed file, and the lane of its reads and writes."""

    contents: str  # the name in messages of what is stored

    def __init__(self, file: SpillFile, lane: ThreadLane) -> None:
        self.file, self.directory, self.disk_id, self.advice = file, file.directory, file.disk_id, file.advice
        self.lane = lane
        self.read_bytes = self.written_bytes = 0
        self.write_error = self.lost = ""

    def check_space(self, need: int) -> None:
        """Raise OSError if the disk does not have `need` free bytes."""
        check_disk_space(self.directory, need)

    def close(self) -> None:
        """End threads and file. Tensors at rest stay valid while they are referenced."""
        self.lane.close()
        self.file.end()

    def on_read_error(self, why: str) -> None:
        """Note and log that values cannot be read."""
        if not self.lost:
            self.lost = (
                f"{self.contents} in {self.directory} cannot be read: {why}. Start a new run from the last "
                "checkpoint, with a disk that can be read."
            )
            log.error("%s", self.lost)

    def on_write_error(self, error: OSError) -> None:
        """Note and log that values cannot be written."""
        self.write_error = (
            f"{self.contents} cannot be written to {self.directory}: {error}. All values stay in memory, and "
            "the step was finished. Save a checkpoint now, after zero_grad, and start a new run from it with "
            "a disk that can be written."
        )
        log.error("%s", self.write_error)
