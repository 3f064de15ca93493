"""Device queues: copies and signals in stream order, for the transport through host memory.

[Note: signals] A stream can write a number to memory when it reaches that point (`signal`), and can stop
until a number in memory is high enough (`wait`). CUDA's driver does both without a kernel, so a waiting
stream occupies no multiprocessor, and ranks that share the device go on. torch does not expose these
functions, so they are called by ctypes.

[Note: the GIL] By default the host waits instead: slower, with the same bits, and no stream waits for Python.
Streams can deadlock if a thread holds the GIL until a stream goes on, because the worker that would signal
the stream needs the GIL. torch holds it while it records an event or makes a stream wait for one, even when
the driver's queue is full; and in `UntypedStorage.resize_`, even when memory has to be freed first. A small
model does not reach these cases. With ZERO_FULL_STREAM_WAITS=on streams wait: then collectives return at once
and are ordered by streams alone, as NCCL's are.

Support is tested by a trial run, since the device attribute is wrong: it stands for the first version of
these functions (CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1), which drivers since CUDA 12 leave switched
off while the second version works.
"""

import ctypes
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from zero_full.comm.shared import ORDERED_STORES
from zero_full.comm.topology import this_rank

log = logging.getLogger("zero_full")
NAP_S, LONG_NAP_S = 2e-5, 5e-4
LOOK_S = 0.05  # between checks for a failure while waiting
PATIENCE_S = 5.0  # for the trial run
SWITCH = "ZERO_FULL_STREAM_WAITS"
LINE = 64  # bytes: a flag has a cache line of its own
NUMBERS = 2**32  # flags have 32 bits


class Flag:
    """A counter that the host and a device both read and write. It wraps to zero after 32 bits."""

    def __init__(self, memory: Tensor, start: int = 0, address: int | None = None) -> None:
        self.memory = memory  # keeps the addresses valid
        self.address = memory.data_ptr() if address is None else address  # for the device
        self.number = ctypes.c_uint32.from_address(memory.data_ptr())
        self.set(start)

    def set(self, number: int) -> None:
        """Write the number on the host."""
        self.number.value = number % NUMBERS

    def has_reached(self, number: int) -> bool:
        """Whether the flag has this number or a later one, by the sign of the difference as on the device."""
        return (self.number.value - number) % NUMBERS < NUMBERS // 2


class Mark(Protocol):
    """A point in a stream, such as an event."""

    def query(self) -> bool:
        """Whether the stream has passed it. Raises RuntimeError if the device has failed."""


class Queue(Protocol):
    """The current stream of a device. No method waits for the device unless its docstring says so."""

    def memory(self, size: int) -> Tensor:
        """Allocate `size` bytes of host memory that the device can access directly."""

    def flag(self, start: int) -> Flag:
        """Create a flag."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between the device and memory from `memory`."""

    def signal(self, flag: Flag, number: int) -> None:
        """Set the flag to this number after all queued work."""

    def wait(self, flag: Flag, number: int) -> None:
        """Make later work wait until the flag has reached this number."""

    def mark(self) -> Mark:
        """Mark the end of the queued work."""

    def after(self, mark: Mark) -> None:
        """Make later work wait for the mark, which may be of another stream."""


def wait_until(
    reached: Callable[[], bool], look: Callable[[], object], patience_s: float | None = None
) -> None:
    """Poll until `reached` is true. `look` raises if that will never be. TimeoutError after `patience_s`.

    Sleeps between polls, so that other threads run.
    """
    nap, began = NAP_S, time.monotonic()
    looked = began
    while not reached():
        time.sleep(nap)
        nap, now = min(2 * nap, LONG_NAP_S), time.monotonic()
        if patience_s is not None and now - began > patience_s:
            raise TimeoutError(f"nothing has happened within {patience_s:g} s")
        if now - looked > LOOK_S:
            look()
            looked = now


class HostWaits:
    """The queue of any accelerator: the host waits for its streams. See [Note: the GIL]."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def memory(self, size: int) -> Tensor:
        """Allocate pinned memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def flag(self, start: int) -> Flag:
        """Create a flag in ordinary memory: only the host uses it."""
        return Flag(torch.empty(LINE, dtype=torch.uint8), start)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy that the host does not wait for."""
        with torch.no_grad():
            target.copy_(source, non_blocking=True)

    def signal(self, flag: Flag, number: int) -> None:
        """Wait for the stream, without holding the GIL, and set the flag."""
        wait_until(self.mark().query, lambda: None)
        flag.set(number)

    def wait(self, flag: Flag, number: int) -> None:
        """Wait for the flag on the host."""
        wait_until(lambda: flag.has_reached(number), lambda: None)

    def mark(self) -> Mark:
        """Record an event."""
        event: Mark = self._stream().record_event()
        return event

    def after(self, mark: Mark) -> None:
        """Make the stream wait for the event."""
        self._stream().wait_event(mark)

    def _stream(self) -> Any:
        return torch.accelerator.current_stream(self.device)


# CUDA's driver ---------------------------------------------------------------------------------------

STREAM, ADDRESS, NUMBER, FLAGS = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
SIGNATURES: dict[str, tuple[Any, ...]] = {  # as in cuda.h; each returns a CUresult, an int
    "cuStreamWriteValue32_v2": (STREAM, ADDRESS, NUMBER, FLAGS),
    "cuStreamWaitValue32_v2": (STREAM, ADDRESS, NUMBER, FLAGS),
    "cuMemHostGetDevicePointer_v2": (ctypes.POINTER(ADDRESS), ctypes.c_void_p, ctypes.c_uint),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}
WRITE_DEFAULT = 0x0  # CU_STREAM_WRITE_VALUE_DEFAULT: earlier writes are visible before the number is
WAIT_AT_LEAST = 0x0  # CU_STREAM_WAIT_VALUE_GEQ: (int32_t)(*address - value) >= 0


class Driver:
    """Functions of CUDA's driver that torch does not expose."""

    def __init__(self, library: Any) -> None:
        self.functions = {name: getattr(library, name) for name in SIGNATURES}
        for name, function in self.functions.items():
            function.argtypes, function.restype = SIGNATURES[name], ctypes.c_int

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call a function. Raises RuntimeError with the driver's name of the error."""
        result = self.functions[name](*arguments)
        if result:
            told = ctypes.c_char_p()
            self.functions["cuGetErrorName"](result, ctypes.byref(told))
            raise RuntimeError(f"{name}: {(told.value or b'unknown error').decode()} ({result})")


class Cuda(HostWaits):
    """The queue of a CUDA device. See [Note: signals]."""

    def __init__(self, device: torch.device, driver: Driver) -> None:
        super().__init__(device)
        self.driver = driver

    def flag(self, start: int) -> Flag:
        """Create a flag in pinned memory, with the device's address of it."""
        memory, address = self.memory(LINE), ADDRESS()
        with torch.cuda.device(self.device):
            self.driver("cuMemHostGetDevicePointer_v2", ctypes.byref(address), memory.data_ptr(), 0)
        return Flag(memory, start, address.value)

    def signal(self, flag: Flag, number: int) -> None:
        """Queue a write of the flag on the stream."""
        with self._current() as stream:
            self.driver("cuStreamWriteValue32_v2", stream, flag.address, number % NUMBERS, WRITE_DEFAULT)

    def wait(self, flag: Flag, number: int) -> None:
        """Queue a wait for the flag on the stream."""
        with self._current() as stream:
            self.driver("cuStreamWaitValue32_v2", stream, flag.address, number % NUMBERS, WAIT_AT_LEAST)

    @contextmanager
    def _current(self) -> Iterator[int]:
        """Handle of the current stream. The default stream's, 0, means the current device's."""
        with torch.cuda.device(self.device):
            yield torch.cuda.current_stream(self.device).cuda_stream

    def try_out(self) -> None:
        """Raise unless the device can write and wait: on a new stream, then on the current one."""
        flag = self.flag(0)
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            self.signal(flag, 1)
            wait_until(lambda: flag.has_reached(1), lambda: None, PATIENCE_S)
            self.wait(flag, 2)
            mark = self.mark()
            flag.set(2)
            wait_until(mark.query, lambda: None, PATIENCE_S)
        self.signal(flag, 3)
        self.wait(flag, 3)
        torch.cuda.synchronize(self.device)  # the flag's memory must last until then


@cache
def driver_of(device: torch.device) -> Driver | None:
    """CUDA's driver if the device supports [Note: signals]; else None, with a warning that says why."""
    try:
        if platform.machine() not in ORDERED_STORES:
            raise OSError(f"{platform.machine()} does not keep the order of what the host writes")
        driver = Driver(ctypes.CDLL("libcuda.so.1"))
        Cuda(device, driver).try_out()
    except (OSError, AttributeError, RuntimeError) as error:  # no driver, an old one, or one that fails
        if this_rank() == 0:
            log.warning("streams cannot wait for the host here (%s), so the host waits for them", error)
        return None
    return driver


def queue_for(device: torch.device) -> Queue:
    """The queue of this device. Streams wait if the user asks for it and the driver can, else the host."""
    said = os.environ.get(SWITCH, "off").lower()
    if said not in ("on", "off"):
        raise ValueError(f"{SWITCH}={said!r}: it can be on or off")
    driver = driver_of(device) if said == "on" and device.type == "cuda" else None
    return HostWaits(device) if driver is None else Cuda(device, driver)
