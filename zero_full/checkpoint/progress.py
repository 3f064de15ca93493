"""Progress of a long read: a bar on a terminal, else a line every ten seconds."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from zero_full.formatting import human

WIDTH = 24  # of the bar, in characters
ON_TERMINAL, ELSEWHERE = 0.1, 10.0  # seconds between two updates


class Progress:
    """A progress display in bytes. As a context manager it clears its line on the terminal at exit."""

    def __init__(
        self, doing: str, total: int, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.doing, self.total, self.stream, self.clock = doing, total, stream, clock
        self.done, self.shown = 0, ""
        self.terminal = stream.isatty()
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
            full = round(share * WIDTH)
            self._overwrite(f"{self.doing} [{'#' * full:<{WIDTH}}] {text}")
        else:
            print(f"{self.doing}: {text.strip()}", file=self.stream, flush=True)

    def _overwrite(self, text: str) -> None:
        print(f"\r{text:<{len(self.shown)}}", end="", file=self.stream, flush=True)
        self.shown = text

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.shown:
            self._overwrite("")
            print("\r", end="", file=self.stream, flush=True)
