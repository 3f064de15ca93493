"""Threads of this package: each begins on its maker's accelerator, with autograd off.

[Note: device of a thread] Each thread has a current device, and a new thread begins with the first device.
On ranks with another device, the first call of such a thread would open a context on device 0, in memory that
the first rank needs. So all threads of this package are started by this module. Not run on several GPUs.

Grad mode is a thread's own, too: the maker's does not hold in a new thread, and none of ours needs autograd.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def current_device() -> "torch.device | None":
    """Return the calling thread's current accelerator; None if this process has not used one."""
    import torch  # not at the top: `inspect` uses `checkpoint/disk.py` without torch

    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return None
    is_initialized = getattr(torch.get_device_module(kind), "is_initialized", None)
    if is_initialized is None or not is_initialized():  # asking for the device must not initialize it
        return None
    return torch.device(kind.type, torch.accelerator.current_device_index())


def begin_thread(device: "torch.device | None") -> None:
    """Prepare the calling thread, which is new: autograd is off, and this device is the current one."""
    import torch

    torch.set_grad_enabled(False)
    if device is not None:
        torch.accelerator.set_device_index(device.index)


def start_threads(threads: int, name: str) -> ThreadPoolExecutor:
    """Return an executor with at most `threads` threads, on the caller's current device."""
    return ThreadPoolExecutor(threads, name, begin_thread, (current_device(),))


def make_thread(target: Callable[[], object], name: str, daemon: bool = False) -> Thread:
    """Make a thread that calls `target` on the caller's current device. The caller starts it."""
    return Thread(target=_run, args=(target, current_device()), name=name, daemon=daemon)


def _run(target: Callable[[], object], device: "torch.device | None") -> None:
    begin_thread(device)
    target()
