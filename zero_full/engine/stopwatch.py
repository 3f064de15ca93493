"""`wall_clock_breakdown`: where the time of a step goes."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zero_full.formatting import duration


class Stopwatch:
    """Adds up seconds by name. Off, it costs nothing; on, it waits for the device at every reading."""

    def __init__(self, device: torch.device, on: bool) -> None:
        self.device, self.on = device, on
        self.seconds: dict[str, float] = defaultdict(float)

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`."""
        if not self.on:
            yield
            return
        start = self._now()
        try:
            yield
        finally:
            self.seconds[name] += self._now() - start

    def lap(self, steps: int) -> str:
        """The times of a step, the mean of so many, as text. They start from zero again."""
        told = ", ".join(f"{name} {duration(seconds / steps)}" for name, seconds in self.seconds.items())
        self.seconds.clear()
        return told or "nothing to time: forward, backward and step were not the engine's"
