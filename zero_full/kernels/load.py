"""Load the compiled operators of a device, build them on first use, or give the reason for the fallback.

[Note: CUDA] A good library may not run on this machine: its code may be for another GPU, or the CUDA runtime
that nvcc has linked into it may be newer than the driver. So one kernel is run before the operators are
registered with torch. If that fails, the reference is used from the beginning, and no step raises.
"""

import ctypes
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_full.kernels import builder, library_cache, ops
from zero_full.kernels.architectures import Device
from zero_full.kernels.builder import Stamp
from zero_full.kernels.library_cache import NotTrustedError
from zero_full.kernels.toolchain import BuildError, toolchain

log = logging.getLogger("zero_full")
CHOICES = ("auto", "all", "off")


class DoesNotRunError(BuildError):
    """Raised if an existing library does not run on this device. See [Note: CUDA]."""


@dataclass(frozen=True)
class Loaded:
    """One part's library, or the reason why the reference is used instead."""

    path: Path | None
    reason: str = ""
    should_warn: bool = False  # the user has asked for the library, or it is not trusted


@functools.cache
def operators(device: torch.device) -> Any:
    """Return `torch.ops.zero_full`, with the compiled versions for this device if they can be loaded."""
    load(device)
    return torch.ops.zero_full


@functools.cache
def load(device: torch.device) -> Loaded:
    """Find or build the device's library, and load it, once per process. Building takes up to a minute."""
    found = _load(device.type, device)
    if found.path is not None:
        log.info("compiled operators for %s: %s", device.type, found.path)
    else:
        level = logging.WARNING if found.should_warn else logging.INFO
        log.log(level, "no compiled operators for %s, torch's own are used: %s", device.type, found.reason)
    return found


def find(part: str) -> Loaded:
    """Find what `load` would, without building a library or running a kernel: for the doctor."""
    return _load(part, None)


@functools.cache
def compiled_for(device: torch.device) -> bool:
    """Return whether the operators on this device are the compiled ones."""
    return load(device).path is not None


def build_now(part: str, report: Callable[[str], None]) -> Path:
    """Build the library of this machine's compilers, also if that failed before: for `zero_full build`.

    `report` is called with messages about the progress.
    """
    library_cache.check_platform()
    devices = _capabilities(part)
    name = str(builder.name_for(part, toolchain(part), devices))
    installed = library_cache.libraries(library_cache.BUILT, name)
    if installed:
        return installed[0]
    return builder.build(part, library_cache.caches()[0], devices, again=True, report=report)


def _capabilities(part: str) -> tuple[Device, ...]:
    """Return the compute capabilities of the GPUs that this process sees; none for the CPU's part."""
    if part != "cuda" or not torch.cuda.is_available():
        return ()
    return tuple(sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}))


def _load(part: str, device: torch.device | None) -> Loaded:
    """Find a library and load it for the device. Without a device nothing is built, and no kernel runs."""
    wanted = os.environ.get("ZERO_FULL_KERNELS", "auto").lower()
    if wanted not in CHOICES:
        raise ValueError(f"ZERO_FULL_KERNELS={wanted!r}: must be one of {', '.join(CHOICES)}")
    if part not in builder.PARTS:
        return Loaded(None, f"there are none for {part}")
    if wanted == "off":
        return Loaded(None, "switched off by ZERO_FULL_KERNELS=off")
    if part == "cuda" and not torch.cuda.is_available():
        return Loaded(None, "no CUDA device")
    try:
        library_cache.check_platform()
        return Loaded(_first_that_works(part, device))
    except (BuildError, OSError) as error:
        return Loaded(None, _reason(error), wanted == "all" or isinstance(error, NotTrustedError))


def _reason(error: Exception) -> str:
    return str(error if isinstance(error, BuildError) else error.__cause__ or error)  # torch leaves it out


def _first_that_works(part: str, device: torch.device | None) -> Path:
    """Return the best library that works. One that cannot be opened, as on an older host, is rebuilt."""
    devices = _capabilities(part)
    errors: dict[Path, Exception] = {}
    broken: dict[Path, Stamp] = {}
    for path in builder.find(part, devices):
        stamp = builder.stamp(path)
        try:
            _open(part, path, device)
            return path
        except DoesNotRunError as error:
            errors[path] = error
        except OSError as error:
            errors[path], broken[path] = error, stamp
        log.info("%s is not used: %s", path, _reason(errors[path]))
    try:
        path = (_raise_not_built if device is None else _build)(part, devices, broken)
    except BuildError as error:
        if not errors:
            raise
        first = next(iter(errors.values()))
        raise BuildError(f"{_reason(first)}; and none was built: {error}") from None
    if path in errors and path not in broken:
        raise errors[path]
    _open(part, path, device)
    return path


def _build(part: str, devices: Sequence[Device], broken: Mapping[Path, Stamp]) -> Path:
    began = time.monotonic()
    log.info("compiling the operators for %s, once for this machine", part)
    path = builder.build(part, library_cache.caches()[0], devices, broken=broken)
    log.info("compiled %s in %.0f s", path, time.monotonic() - began)
    return path


def _raise_not_built(part: str, devices: Sequence[Device], broken: Mapping[Path, Stamp]) -> Path:
    when = "that happens on first use, or now with python -m zero_full build"
    if broken:
        raise BuildError(when)
    failure = builder.last_failure(part, library_cache.caches()[0], devices)
    raise BuildError(failure or f"not built yet: {when}")


def _open(part: str, path: Path, device: torch.device | None) -> None:
    """Open a library, and raise if its versions do not fit, or if a kernel does not run on the device."""
    if part == "cpu":
        torch.ops.load_library(path)
        return
    library = ctypes.CDLL(str(path))
    for name in ("zf_cuda_check", "zf_cuda_register"):
        getattr(library, name).restype = ctypes.c_char_p  # the error, or null
    runtime, driver = library.zf_cuda_runtime(), library.zf_cuda_driver()
    if driver // 1000 < runtime // 1000:
        _raise_if(path, b"the driver is too old" if driver else b"there is no driver")
    if device is not None:
        with torch.cuda.device(device):
            _raise_if(path, library.zf_cuda_check())
        _raise_if(path, library.zf_cuda_register())


def _raise_if(path: Path, error: bytes | None) -> None:
    if error is not None:
        reason = error.decode(errors="replace")
        raise DoesNotRunError(f"{path} does not run here: {reason} ({_versions(path)})")


def _versions(path: Path) -> str:
    """Return the CUDA versions of the library, the driver and torch, as text."""
    library = ctypes.CDLL(str(path))
    numbers = [library.zf_cuda_runtime(), library.zf_cuda_driver()]
    runtime, driver = (f"{each // 1000}.{each % 1000 // 10}" for each in numbers)
    return f"made with CUDA {runtime}, the driver supports {driver}, torch has {torch.version.cuda}"


def rows() -> list[tuple[str, str]]:
    """Return rows for the doctor: each part, and the implementation of each operator."""
    parts = {part: find(part) for part in builder.PARTS}
    lines = []
    for part, loaded in parts.items():
        text = f"{loaded.path}" if loaded.path else f"not used: {loaded.reason}"
        if part == "cpu" and loaded.path:
            text += f" (x86-64-v{torch.ops.zero_full.cpu_isa(0)})"
        if part == "cuda" and loaded.path:
            text += f" ({_versions(loaded.path)}; the first use runs one kernel as a test)"
        lines.append((part, text))
    active = [f"{part} {'compiled' if at.path else 'reference'}" for part, at in parts.items()]
    lines += [(name, ", ".join(active)) for name in ops.SCHEMAS]
    return lines + [(name, active[0]) for name in ops.CPU_SCHEMAS]
