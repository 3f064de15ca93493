"""What a transport through the host's memory asks of an accelerator: copies and signals in a stream's order.

[Note: signals] A stream can write a number to memory when it comes to that place (`signal`), and can stop
until a number there is high enough (`wait`). CUDA's driver does both without a kernel, so a waiting stream
keeps no multiprocessor busy, and ranks that share the device go on. torch has no name for these functions,
so they are called by ctypes.

[Note: Python's lock] By default the host waits instead: slower, the same bits, and no stream ever waits for
Python. Streams may wait only if nobody keeps Python's lock until a stream goes on, because the thread that
would let it go on needs the lock. torch keeps it where it records an event or lets a stream wait for one,
also when so much is queued that the driver takes no more; and in `UntypedStorage.resize_`, also when memory
has to be freed first. A small model does not come there. With ZERO_FULL_STREAM_WAITS=on streams wait: then
collectives return at once and are ordered by streams alone, as NCCL's are.

Whether they work is tried out and not looked up. The attribute that tells of them
(CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1) means their first version, which drivers since CUDA 12 leave
switched off while the second version works.
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

from zero_full.comm.spin_barrier import ORDERED_STORES
from zero_full.comm.topology import this_rank

log = logging.getLogger("zero_full")
NAP_S, LONG_NAP_S = 2e-5, 5e-4
LOOK_S = 0.05  # between looks whether waiting is in vain
PATIENCE_S = 5.0  # with a device that is tried out
SWITCH = "ZERO_FULL_STREAM_WAITS"
LINE = 64  # bytes: a flag has a cache line of its own
NUMBERS = 2**32  # flags have 32 bits


class Flag:
    """A number that the host and a device see both. It grows, and begins again at zero after 32 bits."""

    def __init__(self, memory: Tensor, start: int = 0, address: int | None = None) -> None:
        self.memory = memory  # keeps the addresses valid
        self.address = memory.data_ptr() if address is None else address  # for the device
        self.number = ctypes.c_uint32.from_address(memory.data_ptr())
        self.set(start)

    def set(self, number: int) -> None:
        """Write it, on the host."""
        self.number.value = number % NUMBERS

    def has_reached(self, number: int) -> bool:
        """Whether it is this number or a later one, as the device compares: by the sign of the difference."""
        return (self.number.value - number) % NUMBERS < NUMBERS // 2


class Mark(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Whether the stream has passed it. Raises RuntimeError if the device has failed."""


class Queue(Protocol):
    """The current stream of a device. Nothing here waits for the device, unless it says so."""

    def memory(self, size: int) -> Tensor:
        """So many bytes of the host's memory that the device copies from and to by itself."""

    def flag(self, start: int) -> Flag:
        """A flag."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy. One of the two is on the device, the other one in such memory."""

    def signal(self, flag: Flag, number: int) -> None:
        """When all that is queued is done, the flag gets this number."""

    def wait(self, flag: Flag, number: int) -> None:
        """What is queued from now on runs when the flag has reached this number."""

    def mark(self) -> Mark:
        """Mark the end of what is queued."""

    def after(self, mark: Mark) -> None:
        """What is queued from now on runs after the mark, which may be another stream's."""


def wait_until(
    reached: Callable[[], bool], look: Callable[[], object], patience_s: float | None = None
) -> None:
    """Return when it is so; `look` raises if it will never be. TimeoutError if patience ends before.

    It sleeps between looks, so that other threads run.
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
    """The queue of any accelerator: the host waits for its streams. See [Note: Python's lock]."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def memory(self, size: int) -> Tensor:
        """Page-locked."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def flag(self, start: int) -> Flag:
        """In ordinary memory: only the host uses it."""
        return Flag(torch.empty(LINE, dtype=torch.uint8), start)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """A copy that the host does not wait for."""
        with torch.no_grad():
            target.copy_(source, non_blocking=True)

    def signal(self, flag: Flag, number: int) -> None:
        """Wait for the stream, without keeping workers from Python's lock."""
        wait_until(self.mark().query, lambda: None)
        flag.set(number)

    def wait(self, flag: Flag, number: int) -> None:
        """Wait for the flag."""
        wait_until(lambda: flag.has_reached(number), lambda: None)

    def mark(self) -> Mark:
        """An event."""
        event: Mark = self._stream().record_event()
        return event

    def after(self, mark: Mark) -> None:
        """The stream waits for the event."""
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
WRITE_DEFAULT = 0x0  # CU_STREAM_WRITE_VALUE_DEFAULT: what was queued before is visible before the number is
WAIT_AT_LEAST = 0x0  # CU_STREAM_WAIT_VALUE_GEQ: (int32_t)(*address - value) >= 0


class Driver:
    """The functions of CUDA's driver that torch has no name for."""

    def __init__(self, library: Any) -> None:
        self.functions = {name: getattr(library, name) for name in SIGNATURES}
        for name, function in self.functions.items():
            function.argtypes, function.restype = SIGNATURES[name], ctypes.c_int

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call a function; RuntimeError with the driver's name of the error."""
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
        """In page-locked memory, at the address by which the device knows it."""
        memory, address = self.memory(LINE), ADDRESS()
        with torch.cuda.device(self.device):
            self.driver("cuMemHostGetDevicePointer_v2", ctypes.byref(address), memory.data_ptr(), 0)
        return Flag(memory, start, address.value)

    def signal(self, flag: Flag, number: int) -> None:
        """The stream writes."""
        with self._current() as stream:
            self.driver("cuStreamWriteValue32_v2", stream, flag.address, number % NUMBERS, WRITE_DEFAULT)

    def wait(self, flag: Flag, number: int) -> None:
        """The stream waits."""
        with self._current() as stream:
            self.driver("cuStreamWaitValue32_v2", stream, flag.address, number % NUMBERS, WAIT_AT_LEAST)

    @contextmanager
    def _current(self) -> Iterator[int]:
        """The stream as the driver knows it. The default one, 0, is that of the current device."""
        with torch.cuda.device(self.device):
            yield torch.cuda.current_stream(self.device).cuda_stream

    def try_out(self) -> None:
        """Raise unless the device writes and waits: on a stream that is new, then on the current one."""
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
    """CUDA's driver, if the device does what [Note: signals] says; else None, and the log tells why."""
    try:
        if platform.machine() not in ORDERED_STORES:
            raise OSError(f"{platform.machine()} does not keep the order of what the host writes")
        driver = Driver(ctypes.CDLL("libcuda.so.1"))
        Cuda(device, driver).try_out()
    except (OSError, AttributeError, RuntimeError) as error:  # no driver, an old one, one that refuses
        if this_rank() == 0:
            log.warning("streams cannot wait for the host here (%s), so the host waits for them", error)
        return None
    return driver


def queue_for(device: torch.device) -> Queue:
    """The queue of this device; the one that is asked for, if it works there."""
    said = os.environ.get(SWITCH, "off").lower()
    if said not in ("on", "off"):
        raise ValueError(f"{SWITCH}={said!r}: it can be on or off")
    driver = driver_of(device) if said == "on" and device.type == "cuda" else None
    return HostWaits(device) if driver is None else Cuda(device, driver)
