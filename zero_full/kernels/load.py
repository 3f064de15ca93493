"""Loads the compiled operators, or builds them on first use, or says why not."""

import functools
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_full.kernels import build, ops

log = logging.getLogger("zero_full")
CHOICES = ("auto", "all", "off")


@dataclass(frozen=True)
class Loaded:
    """One part's library, or the reason why there is none and the reference is used."""

    path: Path | None
    reason: str = ""


def operators() -> Any:
    """`torch.ops.zero_full`, with the compiled versions loaded where that is possible."""
    load()
    return torch.ops.zero_full


@functools.cache
def load() -> dict[str, Loaded]:
    """Find or build the libraries, and load them, once in a process. Building takes up to a minute."""
    return {part: _load(part, _build) for part in build.PARTS}


def look() -> dict[str, Loaded]:
    """What `load` would find, without building anything: for the doctor."""
    return {part: _load(part, _why_not_built) for part in build.PARTS}


_meant: ContextVar[torch.device | None] = ContextVar("the device that meta tensors stand for", default=None)


@contextmanager
def meta_means(device: torch.device) -> Iterator[None]:
    """Meanwhile `compiled_for` says of the meta device what it says of this one."""
    token = _meant.set(device)
    try:
        yield
    finally:
        _meant.reset(token)


def compiled_for(device: torch.device) -> bool:
    """Whether operators on such a device are the compiled ones."""
    if device.type == "meta":
        device = _meant.get() or device
    return device.type in build.PARTS and load()[device.type].path is not None


def _load(part: str, otherwise: Any) -> Loaded:
    """[Note: CUDA] No GPU has run those kernels yet, so they are used only by who asks for them."""
    wanted = os.environ.get("ZERO_FULL_KERNELS", "auto").lower()
    if wanted not in CHOICES:
        raise ValueError(f"ZERO_FULL_KERNELS={wanted!r}: it can be {', '.join(CHOICES)}")
    if wanted == "off":
        return Loaded(None, "switched off by ZERO_FULL_KERNELS=off")
    if part == "cuda" and not torch.cuda.is_available():
        return Loaded(None, "no CUDA device")
    if part == "cuda" and wanted != "all":
        return Loaded(None, "not yet tried on a GPU: ZERO_FULL_KERNELS=all uses it")
    try:
        path = build.find(part) or otherwise(part)
        torch.ops.load_library(path)
    except (build.BuildError, OSError) as error:
        level = logging.WARNING if isinstance(error, build.NotTrustedError) else logging.INFO
        log.log(level, "no compiled operators for %s, torch's own are used: %s", part, error)
        return Loaded(None, str(error.__cause__ or error))  # torch's own words leave the cause out
    return Loaded(path)


def _build(part: str) -> Path:
    began = time.monotonic()
    log.info("compiling the operators for %s, once for this machine", part)
    path = build.build(part, build.cache())
    log.info("%s after %.0f s", path, time.monotonic() - began)
    return path


def _why_not_built(part: str) -> Path:
    tools = build.toolchain(part)
    raise build.BuildError(
        build.last_failure(part, build.cache(), tools)
        or "not built yet: that happens on first use, or now with python -m zero_full build"
    )


def rows() -> list[tuple[str, str]]:
    """Rows for the doctor: each part, and what each operator runs."""
    parts = look()
    found = []
    for part, loaded in parts.items():
        where = f"{loaded.path}" if loaded.path else f"not used: {loaded.reason}"
        if part == "cpu" and loaded.path:
            where += f" (x86-64-v{torch.ops.zero_full.cpu_isa(0)})"
        found.append((part, where))
    for name in ops.SCHEMAS:
        active = [f"{part} {'compiled' if at.path else 'reference'}" for part, at in parts.items()]
        found.append((name, ", ".join(active)))
    return found
