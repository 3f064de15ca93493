"""What a device is asked for, as far as it shows without one: calls of the driver, numbers, refusals."""

import ctypes
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from zero_full.comm import device_queue
from zero_full.comm.device_queue import Flag
from zero_full.kernels import toolchain


class RecordedDriver:
    """A library with the functions that are called: what they are declared and called with."""

    def __init__(self, result: int = 0) -> None:
        self.calls: list[Any] = []
        self.result = result
        functions = {
            "cuStreamWriteValue32_v2": self.write,
            "cuStreamWaitValue32_v2": self.wait,
            "cuMemHostGetDevicePointer_v2": self.address_of,
            "cuGetErrorName": self.name_of,
        }
        for name, function in functions.items():  # which convert what they get, as real ones do
            prototype = ctypes.CFUNCTYPE(ctypes.c_int, *device_queue.SIGNATURES[name])
            setattr(self, name, prototype(function))

    def write(self, stream: int, address: int, value: int, flags: int) -> int:
        self.calls.append(("write", stream, address, value, flags))
        return self.result

    def wait(self, stream: int, address: int, value: int, flags: int) -> int:
        self.calls.append(("wait", stream, address, value, flags))
        return self.result

    def address_of(self, pointer: Any, host: int, flags: int) -> int:
        assert flags == 0
        pointer[0] = host + 2**40  # another address than the host's
        return 0

    def name_of(self, error: int, name: Any) -> int:
        assert error == 801
        name[0] = b"CUDA_ERROR_NOT_SUPPORTED"
        return 0


def a_cuda_queue(library: Any, stream: int | None) -> Any:
    """With ordinary memory, and a current stream of this number."""
    entered: list[Any] = []

    @contextmanager
    def current_device(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    queue = device_queue.Cuda(torch.device("cuda", 1), device_queue.Driver(library))
    patches = ExitStack()
    patches.enter_context(mock.patch.object(torch.cuda, "device", current_device))
    handle = SimpleNamespace(cuda_stream=stream)
    patches.enter_context(mock.patch.object(torch.cuda, "current_stream", lambda device: handle))
    patches.enter_context(
        mock.patch.object(queue, "memory", lambda size: torch.empty(size, dtype=torch.uint8))
    )
    return queue, patches, entered


def test_the_driver_gets_the_stream_the_devices_address_the_number_and_no_flags() -> None:
    library = RecordedDriver()
    queue, patches, entered = a_cuda_queue(library, 2**47 + 16)  # a handle is a pointer: more than 32 bits
    with patches:
        flag = queue.flag(2**32 - 1)
        queue.signal(flag, 2**32 + 6)
        queue.wait(flag, 2**32 - 1)
    address = flag.memory.data_ptr() + 2**40
    assert library.calls == [
        ("write", 2**47 + 16, address, 6, 0),
        ("wait", 2**47 + 16, address, 2**32 - 1, 0),
    ]
    assert entered == [torch.device("cuda", 1)] * 3 and address % 4 == 0
    assert flag.number.value == 2**32 - 1 and flag.memory.numel() == 64


def test_the_default_stream_is_a_null_pointer() -> None:
    library = RecordedDriver()
    queue, patches, _ = a_cuda_queue(library, 0)
    with patches:
        queue.signal(queue.flag(0), 1)
    assert library.calls[0][1] is None


def test_what_the_driver_says_is_an_error() -> None:
    queue, patches, _ = a_cuda_queue(RecordedDriver(result=801), 1)
    with (
        patches,
        pytest.raises(RuntimeError, match=r"WaitValue32_v2: CUDA_ERROR_NOT_SUPPORTED \(801\)"),
    ):
        queue.wait(queue.flag(0), 1)


C_TYPES = {"CUstream": "c_void_p", "CUdeviceptr": "c_ulong", "cuuint32_t": "c_uint", "unsigned int": "c_uint"}
C_TYPES |= {
    "void *": "c_void_p",
    "CUdeviceptr *": "LP_c_ulong",
    "CUresult": "c_int",
    "const char **": "LP_c_char_p",
}


def header() -> str:
    """The text of cuda.h, if a toolkit is here."""
    homes = [Path(toolchain.toolchain("cuda").nvcc or "").resolve().parents[1]] if has_nvcc() else []
    found = [path for home in homes for path in home.glob("**/include/cuda.h")]
    return found[0].read_text() if found else ""


def has_nvcc() -> bool:
    try:
        return toolchain.toolchain("cuda").nvcc is not None
    except toolchain.BuildError:
        return False


def test_declarations_are_those_of_cudas_header() -> None:
    text = header()
    if not text:
        pytest.skip("no CUDA toolkit here, so no cuda.h")
    for name, types in device_queue.SIGNATURES.items():
        plain = name.removesuffix("_v2")
        declared = re.search(rf"CUresult CUDAAPI {plain}\(([^)]*)\);", text)
        assert declared is not None, name
        given = [re.sub(r"\s*\b\w+$", "", each.strip()) for each in declared[1].split(",")]
        assert [C_TYPES[each] for each in given] == [each.__name__ for each in types], name
    assert re.search(rf"CU_STREAM_WAIT_VALUE_GEQ\s+= {device_queue.WAIT_AT_LEAST:#x},", text)
    assert re.search(rf"CU_STREAM_WRITE_VALUE_DEFAULT\s+= {device_queue.WRITE_DEFAULT:#x},", text)
    assert re.search(r"#define cuMemHostGetDevicePointer +cuMemHostGetDevicePointer_v2\n", text)


@pytest.mark.parametrize(
    ("at", "number", "reached"),
    [
        (0, 0, True),
        (0, 1, False),
        (5, 3, True),
        (2**32 - 1, 1, False),
        (1, 2**32 - 1, True),
        (7, 2**32 + 7, True),
    ],
)
def test_numbers_are_compared_as_the_device_does(at: int, number: int, reached: bool) -> None:
    assert Flag(torch.empty(64, dtype=torch.uint8), at).has_reached(number) is reached


@pytest.mark.parametrize(
    ("machine", "library", "words"),
    [
        ("x86_64", mock.Mock(side_effect=OSError("libcuda.so.1: cannot open")), "libcuda.so.1: cannot open"),
        ("x86_64", lambda name: SimpleNamespace(cuGetErrorName=1), "cuStreamWriteValue32_v2"),
        ("aarch64", None, "aarch64 does not keep the order of what the host writes"),
    ],
)
def test_without_the_drivers_functions_the_host_waits_and_the_log_says_why_once(
    machine: str,
    library: Any,
    words: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device_queue.driver_of.cache_clear()
    monkeypatch.setenv(device_queue.SWITCH, "on")
    device = torch.device("cuda", 0)
    with (
        mock.patch.object(device_queue.platform, "machine", lambda: machine),
        mock.patch.object(device_queue.ctypes, "CDLL", library),
    ):
        kinds = [type(device_queue.queue_for(device)) for _ in range(2)]
    device_queue.driver_of.cache_clear()
    assert kinds == [device_queue.HostWaits] * 2 and len(caplog.records) == 1
    assert words in caplog.text and "so the host waits for them" in caplog.text


def test_a_device_that_does_not_come_is_noticed_when_it_is_tried_out() -> None:
    """The driver takes the calls, and nothing happens."""
    library = RecordedDriver()
    queue, patches, _ = a_cuda_queue(library, 1)
    with patches as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "Stream", lambda device: None))
        stack.enter_context(mock.patch.object(torch.cuda, "stream", nullcontext))
        stack.enter_context(mock.patch.object(device_queue, "PATIENCE_S", 0.05))
        with pytest.raises(TimeoutError, match=r"nothing has happened within 0\.05 s"):
            queue.try_out()
    assert [call[0] for call in library.calls] == ["write"]


def test_it_is_tried_out_on_a_stream_of_its_own_and_on_the_current_one() -> None:
    """A device that obeys at once: what it is told, in this order."""
    library = RecordedDriver()
    queue, patches, _ = a_cuda_queue(library, 1)
    flags: list[Flag] = []

    def make(start: int) -> Flag:
        flags.append(Flag(torch.empty(64, dtype=torch.uint8), start))
        return flags[0]

    def write(stream: int, address: int, value: int, flags_of_it: int) -> int:
        flags[0].set(value)
        return RecordedDriver.write(library, stream, address, value, flags_of_it)

    queue.driver.functions["cuStreamWriteValue32_v2"] = write
    with patches as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "Stream", lambda device: None))
        stack.enter_context(mock.patch.object(torch.cuda, "stream", nullcontext))
        synchronized = stack.enter_context(mock.patch.object(torch.cuda, "synchronize"))
        stack.enter_context(mock.patch.object(queue, "flag", make))
        mark = SimpleNamespace(query=lambda: flags[0].has_reached(2))
        stack.enter_context(mock.patch.object(queue, "mark", lambda: mark))
        queue.try_out()
    assert [(call[0], call[3]) for call in library.calls] == [
        *[("write", 1), ("wait", 2), ("write", 3), ("wait", 3)]
    ]
    assert synchronized.called


def test_streams_wait_only_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = device_queue.Driver(RecordedDriver())
    monkeypatch.setattr(device_queue, "driver_of", lambda device: driver)
    monkeypatch.delenv(device_queue.SWITCH, raising=False)
    cuda, xpu = torch.device("cuda", 0), torch.device("xpu", 0)
    kinds = {"on": device_queue.Cuda, "off": device_queue.HostWaits}
    assert type(device_queue.queue_for(cuda)) is device_queue.HostWaits
    for said, kind in kinds.items():
        monkeypatch.setenv(device_queue.SWITCH, said)
        assert type(device_queue.queue_for(cuda)) is kind
        assert type(device_queue.queue_for(xpu)) is device_queue.HostWaits
    monkeypatch.setenv(device_queue.SWITCH, "perhaps")
    with pytest.raises(ValueError, match="ZERO_FULL_STREAM_WAITS='perhaps': it can be on or off"):
        device_queue.queue_for(cuda)
