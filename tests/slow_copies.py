"""A host tier for which the CPU's memory is a device: copies are made, slowly, and each is noted."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from zero_full.comm.lane import Done
from zero_full.offload import HostTier


@dataclass
class Copied:
    """One copy."""

    way: str  # "down" or "up"
    nbytes: int
    began: float
    ended: float


@dataclass
class Copies:
    """All copies of this process, and how they are made."""

    seconds_per_byte: float = 0.0
    done: list[Copied] = field(default_factory=list)
    fail: str = ""  # the way on which copies fail, if any

    def copiers(self, tier: HostTier, device: torch.device) -> tuple[Any, Any]:
        """In the place of the tier's."""
        return SlowCopier(self, "down"), SlowCopier(self, "up")


class SlowCopier:
    """One direction."""

    def __init__(self, copies: Copies, way: str) -> None:
        self.copies, self.way = copies, way

    def mark(self) -> None:
        """Nothing is queued."""

    def copy(self, target: Tensor, source: Tensor, after: None) -> Done:
        """Half of the time passes before the values are read, so that what is written too early shows."""
        began, nap = time.monotonic(), source.nbytes * self.copies.seconds_per_byte / 2
        time.sleep(nap)
        if self.copies.fail == self.way:
            raise RuntimeError("the cable is broken")
        target.copy_(source)
        time.sleep(nap)
        self.copies.done.append(Copied(self.way, source.nbytes, began, time.monotonic()))
        return Done()


@contextmanager
def slow_copies(bandwidth: float | None = None) -> Iterator[Copies]:
    """Host tiers copy, at so many bytes a second; None: as fast as they can."""
    copies = Copies(0.0 if bandwidth is None else 1 / bandwidth)
    with mock.patch.object(HostTier, "copiers", lambda tier, device: copies.copiers(tier, device)):
        yield copies
