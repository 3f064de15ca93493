"""Find the compilers and their versions, and torch's directory.

This module uses the standard library only, and finds torch without importing it: the installation may have
torch installed but not importable, and the doctor must work with a broken torch.
"""

import contextlib
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

NVCC_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")  # further options of nvcc


class BuildError(RuntimeError):
    """Raised if the library cannot be built. The message has the reason and a remedy."""


@dataclass(frozen=True)
class Toolchain:
    """The compilers, and the directory of torch."""

    cxx: str
    nvcc: str | None
    torch: Path

    @property
    def identity(self) -> str:
        """The versions of the compilers and of the C library, and variables that change nvcc's options."""
        versions = [_output_of(path, "--version") or "" for path in (self.cxx, self.nvcc) if path is not None]
        with contextlib.suppress(AttributeError, ValueError, OSError):
            versions.append(os.confstr("CS_GNU_LIBC_VERSION") or "")  # a library needs one at least as new
        if self.nvcc is not None:
            versions += [f"{name}={os.environ.get(name, '')}" for name in NVCC_VARIABLES]
        return "\n".join(versions)

    @property
    def architectures(self) -> frozenset[int]:
        """The GPU architectures that nvcc supports, such as 90."""
        assert self.nvcc is not None
        listed = _output_of(self.nvcc, "--list-gpu-arch") or ""
        found = frozenset(map(int, re.findall(r"^compute_(\d+)$", listed, re.MULTILINE)))
        if not found:
            raise BuildError(f"{self.nvcc} does not list architectures (--list-gpu-arch): it is too old")
        return found


def toolchain(part: str) -> Toolchain:
    """Return the compilers of a part: $CXX, else the usual names; nvcc from $CUDA_HOME or from $PATH."""
    chosen = os.environ.get("CXX")
    cxx = _first_that_works([chosen] if chosen else ["c++", "g++", "clang++"])
    if cxx is None:
        raise BuildError(
            f"CXX={chosen} does not work" if chosen else "no C++ compiler: install g++, or set CXX to another"
        )
    nvcc = None
    if part == "cuda":
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        nvcc = _first_that_works([f"{home}/bin/nvcc", "nvcc"] if home else ["nvcc"])
        if nvcc is None:
            raise BuildError("no nvcc: install the CUDA toolkit, or set CUDA_HOME to its directory")
    return Toolchain(cxx, nvcc, torch_home())


def torch_home() -> Path:
    """Return the directory of torch, which an isolated build cannot import but finds in the environment."""
    candidates = [Path(sysconfig.get_path(kind)) / "torch" for kind in ("platlib", "purelib")]
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            candidates.insert(0, Path(spec.origin).parent)
    for path in candidates:
        if (path / "include/torch/csrc/stable/library.h").exists():
            return path
    raise BuildError(
        "no headers of torch 2.11 or newer (torch/csrc/stable/library.h) in "
        f"{', '.join(map(str, candidates))}. Install torch in this environment"
    )


@functools.cache
def _output_of(compiler: str, option: str) -> str | None:
    """Return the output of a compiler for an option; None if it does not run."""
    try:
        done = subprocess.run(
            [compiler, option], capture_output=True, text=True, errors="replace", timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _first_that_works(names: list[str]) -> str | None:
    paths = (shutil.which(name) for name in names)
    return next((path for path in paths if path and _output_of(path, "--version") is not None), None)
