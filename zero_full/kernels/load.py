"""Load the compiled operators of a device, build them on first use, or give the reason for the fallback.

[Note: CUDA] The CUDA kernels have not run on a GPU yet, so they are opt-in. And a good library may not run on
this machine: its code may be for another GPU, or the CUDA runtime that nvcc has linked into it may be newer
than the driver. So one kernel is run before the operators are registered with torch. If that fails, the
reference is used from the beginning, and no step raises.
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

from zero_full.kernels import build, ops, places
from zero_full.kernels.architectures import Device
from zero_full.kernels.build import Stamp
from zero_full.kernels.toolchain import BuildError, toolchain

log = logging.getLogger("zero_full")
CHOICES = ("auto", "all", "off")
Otherwise = Callable[[str, Sequence[Device], Mapping[Path, Stamp]], Path]


class DoesNotRunError(BuildError):
    """An existing library does not run on this device. See [Note: CUDA]."""


@dataclass(frozen=True)
class Loaded:
    """One part's library, or the reason why the reference is used instead."""

    path: Path | None
    reason: str = ""
    is_loud: bool = False  # warn: the user has asked for the library, or it is not trusted


@functools.cache
def operators(device: torch.device) -> Any:
    """`torch.ops.zero_full`, after loading the compiled versions for this device if possible."""
    load(device)
    return torch.ops.zero_full


@functools.cache
def load(device: torch.device) -> Loaded:
    """Find or build the device's library, and load it, once per process. Building takes up to a minute."""
    found = _load(device.type, functools.partial(_open, device), _build)
    if found.path is not None:
        log.info("compiled operators for %s: %s", device.type, found.path)
    else:
        told = "no compiled operators for %s, torch's own are used: %s"
        log.log(logging.WARNING if found.is_loud else logging.INFO, told, device.type, found.reason)
    return found


def look(part: str) -> Loaded:
    """Find what `load` would, without building a library or running a kernel: for the doctor."""
    return _load(part, _look_into, _why_not_built)


@functools.cache
def compiled_for(device: torch.device) -> bool:
    """Whether the operators on this device are the compiled ones."""
    return load(device).path is not None


def build_now(part: str, tell: Callable[[str], None]) -> Path:
    """Build the library of this machine's compilers, also if that failed before: for `zero_full build`.

    `tell` is called with messages about the progress.
    """
    places.refuse_here()
    devices = capabilities() if part == "cuda" else ()
    name = str(build.name_for(part, toolchain(part), devices))
    installed = places.libraries(places.BUILT, name)
    if installed:
        return installed[0]
    return build.build(part, places.caches()[0], devices, again=True, tell=tell)


def capabilities() -> tuple[Device, ...]:
    """The compute capabilities of the GPUs that this process sees."""
    if not torch.cuda.is_available():
        return ()
    return tuple(sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}))


def _load(part: str, use: Callable[[str, Path], object], otherwise: Otherwise) -> Loaded:
    wanted = os.environ.get("ZERO_FULL_KERNELS", "auto").lower()
    if wanted not in CHOICES:
        raise ValueError(f"ZERO_FULL_KERNELS={wanted!r}: it can be {', '.join(CHOICES)}")
    if part not in build.PARTS:
        return Loaded(None, f"there are none for {part}")
    if wanted == "off":
        return Loaded(None, "switched off by ZERO_FULL_KERNELS=off")
    if part == "cuda" and not torch.cuda.is_available():
        return Loaded(None, "no CUDA device")
    if part == "cuda" and wanted != "all":
        return Loaded(None, "not yet tried on a GPU: ZERO_FULL_KERNELS=all uses it")
    try:
        places.refuse_here()
        return Loaded(_first_that_works(part, use, otherwise))
    except (BuildError, OSError) as error:
        return Loaded(None, _reason(error), wanted == "all" or isinstance(error, places.NotTrustedError))


def _reason(error: Exception) -> str:
    return str(error if isinstance(error, BuildError) else error.__cause__ or error)  # torch leaves it out


def _first_that_works(part: str, use: Callable[[str, Path], object], otherwise: Otherwise) -> Path:
    """The best library that works. One that cannot be opened, as on an older host, is rebuilt."""
    devices = capabilities() if part == "cuda" else ()
    refused: dict[Path, Exception] = {}
    broken: dict[Path, Stamp] = {}
    for path in build.find(part, devices):
        stamp = build.stamp(path)
        try:
            use(part, path)
            return path
        except DoesNotRunError as error:
            refused[path] = error
        except OSError as error:
            refused[path], broken[path] = error, stamp
        log.info("%s is not used: %s", path, _reason(refused[path]))
    first = next(iter(refused.values()), None)
    try:
        path = otherwise(part, devices, broken)
    except BuildError as error:
        if first is None:
            raise
        raise BuildError(f"{_reason(first)}; and none is made here: {error}") from None
    if path in refused and path not in broken:
        raise refused[path]
    use(part, path)
    return path


def _open(device: torch.device, part: str, path: Path) -> None:
    if part == "cpu":
        torch.ops.load_library(path)
        return
    library = _look_into(part, path)
    with torch.cuda.device(device):
        _refuse(path, library.zf_cuda_check())
    _refuse(path, library.zf_cuda_register())


def _refuse(path: Path, said: bytes | None) -> None:
    if said is not None:
        raise DoesNotRunError(
            f"{path} does not run here: {said.decode(errors='replace')} ({_versions(path)})"
        )


def _look_into(part: str, path: Path) -> Any:
    """Open a library, and raise if its versions do not fit. Runs nothing on a device."""
    if part == "cpu":
        torch.ops.load_library(path)
        return None
    library = ctypes.CDLL(str(path))
    for name in ("zf_cuda_check", "zf_cuda_register"):
        getattr(library, name).restype = ctypes.c_char_p
    runtime, driver = library.zf_cuda_runtime(), library.zf_cuda_driver()
    if driver // 1000 < runtime // 1000:
        _refuse(path, b"the driver is too old" if driver else b"there is no driver")
    return library


def _versions(path: Path) -> str:
    """The CUDA versions of the library, the driver and torch, as text."""
    library = ctypes.CDLL(str(path))
    numbers = [library.zf_cuda_runtime(), library.zf_cuda_driver()]
    ours, drivers = (f"{each // 1000}.{each % 1000 // 10}" for each in numbers)
    return f"made with CUDA {ours}, the driver serves {drivers}, torch has {torch.version.cuda}"


def _build(part: str, devices: Sequence[Device], broken: Mapping[Path, Stamp]) -> Path:
    began = time.monotonic()
    log.info("compiling the operators for %s, once for this machine", part)
    path = build.build(part, places.caches()[0], devices, broken=broken)
    log.info("%s after %.0f s", path, time.monotonic() - began)
    return path


def _why_not_built(part: str, devices: Sequence[Device], broken: Mapping[Path, Stamp]) -> Path:
    again = "that happens on first use, or now with python -m zero_full build"
    if broken:
        raise BuildError(again)
    raise BuildError(build.last_failure(part, places.caches()[0], devices) or f"not built yet: {again}")


def rows() -> list[tuple[str, str]]:
    """Rows for the doctor: each part, and what each operator runs."""
    parts = {part: look(part) for part in build.PARTS}
    found = []
    for part, loaded in parts.items():
        where = f"{loaded.path}" if loaded.path else f"not used: {loaded.reason}"
        if part == "cpu" and loaded.path:
            where += f" (x86-64-v{torch.ops.zero_full.cpu_isa(0)})"
        if part == "cuda" and loaded.path:
            where += f" ({_versions(loaded.path)}; the first use starts one kernel to see whether it runs)"
        found.append((part, where))
    for name in ops.SCHEMAS:
        active = [f"{part} {'compiled' if at.path else 'reference'}" for part, at in parts.items()]
        found.append((name, ", ".join(active)))
    return found
