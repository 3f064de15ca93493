"""Copies between a device's memory and the host's, each made by a thread that waits until it is done."""

from typing import Any, Protocol

import torch
from torch import Tensor

from zero_full.comm.device_queue import wait_until


class Copier(Protocol):
    """One direction between a device and the host."""

    def mark(self) -> Any:
        """The end of what the caller has queued on the device so far."""

    def copy(self, target: Tensor, source: Tensor, after: Any) -> None:
        """Copy what is there when the device has come to this mark, and return when that is done."""


class StreamCopier:
    """An accelerator's copies, on a stream of their own: the device goes on meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.Stream(device)

    def mark(self) -> Any:
        """An event on the caller's stream."""
        return torch.accelerator.current_stream(self.device).record_event()

    def copy(self, target: Tensor, source: Tensor, after: Any) -> None:
        """Queue it, and sleep between looks, so that other threads run."""
        with self.stream:
            self.stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            done = self.stream.record_event()
        wait_until(done.query, lambda: None)
