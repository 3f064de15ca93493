"""`wall_clock_breakdown`: the seconds that a step spends in forward, backward and the optimizer's step."""

import time
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch

from zero_full.formatting import duration

PHASES = ("forward", "backward", "step")


class Stopwatch:
    """Adds up the seconds of each phase. On, it synchronizes with the device at every reading."""

    def __init__(self, device: torch.device, on: bool) -> None:
        self.device, self.on = device, on
        self.seconds: dict[str, float] = defaultdict(float)  # by phase, since the last lap

    def phases(self) -> dict[str, AbstractContextManager[None]]:
        """Return a context manager for each phase that times its block; off, all are the same empty one."""
        if not self.on:
            return dict.fromkeys(PHASES, nullcontext())
        return {phase: Timed(self, phase) for phase in PHASES}

    def now(self) -> float:
        """Return the time in seconds, after all work that is queued on the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def lap(self, steps: int) -> str:
        """Return the mean times of a step over `steps` steps, as text, and reset them to zero."""
        told = ", ".join(f"{name} {duration(seconds / steps)}" for name, seconds in self.seconds.items())
        self.seconds.clear()
        return told or "nothing to time: forward, backward and step were not the engine's"


class Timed:
    """Reusable context manager: adds the seconds of its block to one phase of a stopwatch."""

    def __init__(self, stopwatch: Stopwatch, phase: str) -> None:
        self.stopwatch, self.phase = stopwatch, phase
        self.starts: list[float] = []  # of the blocks that are open: a forward may run inside a forward

    def __enter__(self) -> None:
        self.starts.append(self.stopwatch.now())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopwatch.seconds[self.phase] += self.stopwatch.now() - self.starts.pop()
