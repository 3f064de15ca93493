"""Copies between device and host memory, each by a thread that waits until it is done."""

import time
from typing import Any, Protocol

import torch
from torch import Tensor

NAP_S, LONG_NAP_S = 2e-5, 5e-4


class Copier(Protocol):
    """Copies in one direction between a device and the host."""

    def mark(self) -> Any:
        """Return an event behind the caller's work on the device so far."""

    def copy(self, target: Tensor, source: Tensor, after: Any) -> None:
        """Copy when the device has reached the event `after`, and return when the copy is done."""


class StreamCopier:
    """Copies on their own stream of an accelerator, beside its other work."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.Stream(device)

    def mark(self) -> Any:
        """Record an event on the caller's stream."""
        return torch.accelerator.current_stream(self.device).record_event()

    def copy(self, target: Tensor, source: Tensor, after: Any) -> None:
        """Queue the copy, and poll for its end with sleeps in between, so that other threads run."""
        with self.stream:
            self.stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            done = self.stream.record_event()
        nap = NAP_S
        while not done.query():
            time.sleep(nap)
            nap = min(2 * nap, LONG_NAP_S)
