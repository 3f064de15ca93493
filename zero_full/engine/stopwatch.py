"""`wall_clock_breakdown`: the seconds that a step spends in forward, backward and the optimizer's step."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

PHASES = ("forward", "backward", "step")


class Stopwatch:
    """Adds up the seconds of each phase. On, it synchronizes with the device at every reading."""

    def __init__(self, device: torch.device, on: bool) -> None:
        self.device, self.on = device, on
        self.seconds: dict[str, float] = defaultdict(float)  # by phase, of the whole run

    def phases(self) -> dict[str, Callable[[], AbstractContextManager[None]]]:
        """Return for each phase a function. It makes a context that times a block, or does nothing if off."""
        if not self.on:
            return dict.fromkeys(PHASES, nullcontext)
        return {phase: partial(self._timed, phase) for phase in PHASES}

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = self.now()
        try:
            yield
        finally:
            self.seconds[phase] += self.now() - start

    def now(self) -> float:
        """Return the time in seconds, after all work that is queued on the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()
