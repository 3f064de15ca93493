"""Show the progress of a command on stderr: a bar for bytes, a line for steps."""

import time
from collections.abc import Callable
from typing import TextIO, TypeVar

from zero_full.formatting import human, terminal_width

WIDTH = 24  # of the progress bar, in characters
ON_TERMINAL, ELSEWHERE = 0.1, 10.0  # seconds between two updates of the progress
Line = TypeVar("Line", bound="TerminalLine")
Advance = Callable[[int], None]  # progress callback, called with the bytes of each chunk


class TerminalLine:
    """A line of a terminal that is overwritten, and cleared when its context ends."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.shown = stream, ""
        self.terminal = stream.isatty()

    def _overwrite(self, text: str) -> None:
        print(f"\r{text:<{len(self.shown)}}", end="", file=self.stream, flush=True)
        self.shown = text

    def __enter__(self: Line) -> Line:
        return self

    def __exit__(self, *error: object) -> None:
        if self.shown:
            self._overwrite("")
            print("\r", end="", file=self.stream, flush=True)


class StatusLine(TerminalLine):
    """A line on a terminal that tells what a command is doing. Without a terminal nothing is printed."""

    def show(self, text: str) -> None:
        """Replace the line."""
        if self.terminal:
            self._overwrite(text[: terminal_width() - 1])


class Progress(TerminalLine):
    """The progress of a long read, in bytes: a bar on a terminal, else a line every ten seconds."""

    def __init__(
        self, doing: str, total: int, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(stream)
        self.doing, self.total, self.clock, self.done = doing, total, clock, 0
        self.began = self.last = clock()

    def advance(self, size: int) -> None:
        """Advance the display by `size` bytes."""
        self.done += size
        now = self.clock()
        if now - self.last >= (ON_TERMINAL if self.terminal else ELSEWHERE):
            self.last = now
            self._show(now - self.began)

    def _show(self, seconds: float) -> None:
        share = min(1.0, self.done / self.total)
        text = f"{share:4.0%}, {human(self.done)} of {human(self.total)}, {human(int(self.done / seconds))}/s"
        if self.terminal:
            self._overwrite(f"{self.doing} [{'#' * round(share * WIDTH):<{WIDTH}}] {text}")
        else:
            print(f"{self.doing}: {text.strip()}", file=self.stream, flush=True)
