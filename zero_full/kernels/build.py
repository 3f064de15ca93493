"""Compiles csrc/ into two libraries: the CPU's operators, and the GPU's.

Standard library only, and torch is looked for, not imported: the installation runs this where torch is
installed but not importable, and so does the doctor where torch is broken. A library's name has a key in it,
made of all that it is made from, so a file that is there is a file that fits.

[Note: trust] Whoever writes a library runs code in every process that loads it. The package's own folder is
trusted as the package is. The cache is trusted if nobody but this user and root can write to it.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import stat
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILT = HERE / "built"  # where an editable installation puts what it builds
PARTS = ("cpu", "cuda")
MADE_OF = {  # of csrc/
    "cpu": ("core/*", "cpu/*", "io/*", "bind.h", "bind_cpu.cpp", "bind_io.cpp"),
    "cuda": ("core/*", "cuda/*", "bind.h", "bind_cuda.cpp"),
}
ARCHITECTURES = "80;90;100+PTX"
ABI = "0x020a000000000000"  # TORCH_TARGET_VERSION: torch 2.10's stable interface
COMMON = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
KERNEL = ["-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"]
BINDING = [f"-DTORCH_TARGET_VERSION={ABI}"]
LEVELS = ("v2", "v3", "v4")  # of x86-64; other machines have the first, which is what their compiler does


class BuildError(RuntimeError):
    """Why there is no library, and what to do about it."""


class NotTrustedError(BuildError):
    """Why a library that is there is not loaded. See [Note: trust]."""


@dataclass(frozen=True)
class Toolchain:
    """The compilers, and where torch is."""

    cxx: str
    nvcc: str | None
    torch: Path

    @property
    def name(self) -> str:
        """The compilers in words: for messages, and to notice that others are used now."""
        return self.cxx if self.nvcc is None else f"{self.cxx} and {self.nvcc}"

    @property
    def includes(self) -> list[str]:
        """The compiler's options for headers: torch's as a system's, whose warnings are not shown."""
        return ["-isystem", str(self.torch / "include"), f"-I{sources()}"]


def sources() -> Path:
    """The path of csrc/: beside the package in a checkout, inside it in a wheel."""
    places = [HERE.parents[1] / "csrc", HERE.parent / "csrc"]
    for place in places:
        if (place / "bind_cpu.cpp").exists():
            return place
    raise BuildError(f"the C++ sources are missing: there is no {places[0]} and no {places[1]}")


def cache() -> Path:
    """The folder for builds on first use: ZERO_FULL_CACHE, or zero_full in the user's cache."""
    if chosen := os.environ.get("ZERO_FULL_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zero_full"


def torch_home() -> Path:
    """Torch's directory. An isolated build cannot import torch, but sees where the environment keeps it."""
    places = [Path(sysconfig.get_path(kind)) / "torch" for kind in ("platlib", "purelib")]
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            places.insert(0, Path(spec.origin).parent)
    for place in places:
        if (place / "include/torch/csrc/stable/library.h").exists():
            return place
    raise BuildError("torch (with its headers) is not installed in this environment yet")


def toolchain(part: str) -> Toolchain:
    """The compilers that a part needs: $CXX, else the usual names; $CUDA_HOME's nvcc, else the path's."""
    cxx = _first_that_works([os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"])
    if cxx is None:
        wanted = os.environ.get("CXX")
        raise BuildError(
            f"CXX={wanted} does not work" if wanted else "no C++ compiler: install g++, or set CXX to another"
        )
    nvcc = None
    if part == "cuda":
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        nvcc = _first_that_works([f"{home}/bin/nvcc", "nvcc"] if home else ["nvcc"])
        if nvcc is None:
            raise BuildError("no nvcc: install the CUDA toolkit, or set CUDA_HOME to where it is")
    return Toolchain(cxx, nvcc, torch_home())


@functools.cache
def _works(path: str) -> bool:
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _first_that_works(names: list[str]) -> str | None:
    found = (shutil.which(name) for name in names)
    return next((path for path in found if path is not None and _works(path)), None)


def architectures() -> list[str]:
    """nvcc's options for ZERO_FULL_CUDA_ARCHS, as in "80;90+PTX". PTX serves newer devices, too."""
    text = os.environ.get("ZERO_FULL_CUDA_ARCHS", ARCHITECTURES)
    flags = []
    for each in re.split(r"[;, ]+", text.strip()):
        found = re.fullmatch(r"(\d+)\.?(\d?)(a?)(\+PTX)?", each)
        if not found:
            raise BuildError(f"ZERO_FULL_CUDA_ARCHS={text!r}: {each!r} is not like 90, 9.0, 90a or 90+PTX")
        number = "".join(found.groups()[:3])
        flags += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
        if found[4]:
            flags += ["-gencode", f"arch=compute_{number},code=compute_{number}"]
    return flags


def key(part: str) -> str:
    """A hash of all that the library is made from: sources, flags, torch, machine, architectures."""
    digest = hashlib.sha256()
    for path in sorted(path for each in MADE_OF[part] for path in sources().glob(each)):
        digest.update(path.relative_to(sources()).as_posix().encode() + path.read_bytes())
    version = torch_home() / "version.py"
    about = [part, platform.system(), platform.machine(), ABI, *COMMON, *KERNEL]
    about += architectures() if part == "cuda" else LEVELS
    digest.update("\n".join(about).encode() + (version.read_bytes() if version.exists() else b""))
    return digest.hexdigest()[:16]


def file_name(part: str) -> str:
    """The file name of the library that fits this environment."""
    return f"zf_{part}-{key(part)}.so"


def find(part: str) -> Path | None:
    """The library's path if it has been built, by the installation or on first use. See [Note: trust]."""
    name = file_name(part)
    if (BUILT / name).exists():
        return BUILT / name
    return _trusted(cache() / name)


def _trusted(path: Path) -> Path | None:
    """The path if a library is there; NotTrustedError if somebody else may have put it there."""
    try:
        folder = path.parent.resolve(strict=True)
        inside = {place: place.lstat() for place in (path.parent, folder)}
        inside |= {path: path.lstat()} if os.path.lexists(path) else {}
        above = {place: place.lstat() for place in folder.parents}
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BuildError(f"{path} cannot be looked at ({error}): set ZERO_FULL_CACHE") from error
    for place, status in inside.items():
        if reason := _why_not_trusted(status, place == path):
            raise NotTrustedError(f"{place} is not trusted: it {reason}. Remove it, or set ZERO_FULL_CACHE")
    for place, status in above.items():
        if _others_may_write(status) and not status.st_mode & stat.S_ISVTX:  # /tmp is fine
            told = f"{path} is not trusted: others may write to {place}. Set ZERO_FULL_CACHE"
            raise NotTrustedError(told)
    return path if path in inside else None


def _why_not_trusted(status: os.stat_result, must_be_file: bool) -> str:
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    if must_be_file and not stat.S_ISREG(status.st_mode):
        return "is a link or something else that is no file"
    return (
        f"has mode {status.st_mode & 0o7777:04o}, so others may write it" if _others_may_write(status) else ""
    )


def _others_may_write(status: os.stat_result) -> bool:
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)) and not stat.S_ISLNK(status.st_mode)


def _make_private(directory: Path) -> None:
    """Make the folder and those above it; new ones are this user's only."""
    for place in (*reversed(directory.parents), directory):
        if not place.exists():
            with contextlib.suppress(FileExistsError):  # another rank was faster
                place.mkdir(mode=0o700)


def build(part: str, directory: Path, again: bool = False) -> Path:
    """The path of the library in `directory`, compiled now unless another process has just done it.

    One process compiles and the others wait for it, so all ranks of a run may call this. What has failed is
    not tried again with the same compiler, unless `again`.
    """
    tools = toolchain(part)
    target = directory / file_name(part)
    try:
        if directory == BUILT:
            directory.mkdir(parents=True, exist_ok=True)
        else:
            _make_private(directory)
            _trusted(target)
        with _locked(target.with_suffix(".lock")):
            if target.exists():
                return target
            failure = None if again else last_failure(part, directory, tools)
            if failure:
                raise BuildError(failure)
            try:
                _compile_and_link(part, tools, target)
            except BuildError as error:
                target.with_suffix(".failed").write_text(f"{tools.name}\n{error}")
                raise
    except OSError as error:
        raise BuildError(f"{directory} cannot be written to ({error}): set ZERO_FULL_CACHE") from error
    return target


def last_failure(part: str, directory: Path, tools: Toolchain) -> str | None:
    """Why the same compiler could not build the same library before."""
    record = (directory / file_name(part)).with_suffix(".failed")
    name, _, reason = record.read_text().partition("\n") if record.exists() else ("", "", "")
    return reason if name == tools.name else None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Inside, this process holds a lock on the file. The lock ends with the process; the file stays."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def commands(part: str, tools: Toolchain, directory: Path) -> dict[Path, list[str]]:
    """The command that makes each object file."""
    csrc, found = sources(), {}
    bindings = ["bind_cuda.cpp"] if part == "cuda" else ["bind_cpu.cpp", "bind_io.cpp"]
    for name in bindings:
        found[directory / f"{name}.o"] = [
            tools.cxx,
            *COMMON,
            *BINDING,
            *tools.includes,
            "-c",
            str(csrc / name),
        ]
    if part == "cuda":
        assert tools.nvcc is not None
        flags = ["-std=c++17", "-O3", "-fmad=false", "-Xcompiler", "-fPIC,-fvisibility=hidden", f"-I{csrc}"]
        for source in sorted((csrc / "cuda").glob("*.cu")):
            out = directory / f"{source.name}.o"
            found[out] = [tools.nvcc, "-ccbin", tools.cxx, *flags, *architectures(), "-c", str(source)]
        return found
    for source in [csrc / "cpu/dispatch.cpp", *sorted((csrc / "io").glob("*.cpp"))]:
        found[directory / f"{source.name}.o"] = [tools.cxx, *COMMON, f"-I{csrc}", "-c", str(source)]
    on_x86 = platform.machine() in ("x86_64", "AMD64")
    for source in sorted((csrc / "cpu").glob("*.cpp")):
        if source.name != "dispatch.cpp":
            for level in LEVELS if on_x86 else LEVELS[:1]:
                march = [f"-march=x86-64-{level}"] if on_x86 else []
                flags = [*COMMON, *KERNEL, *march, f"-DZF_ISA={level}", f"-I{csrc}"]
                found[directory / f"{source.name}.{level}.o"] = [tools.cxx, *flags, "-c", str(source)]
    return found


def link_command(part: str, tools: Toolchain, objects: list[Path], target: Path) -> list[str]:
    """The command that links the objects. Torch itself is found when the library is loaded."""
    names = [str(each) for each in objects]
    lib = tools.torch / "lib"
    if part == "cpu":
        complete = ["-Wl,-z,defs"] if platform.system() == "Linux" else []
        libraries = [f"-L{lib}", "-ltorch_cpu", "-lc10", "-pthread"]
        return [tools.cxx, "-shared", *complete, "-o", str(target), *names, *libraries]
    assert tools.nvcc is not None
    libraries = ["-ltorch_cpu", "-lc10"]
    # A torch without CUDA can still be linked with, so that a machine without a GPU can check all of this.
    libraries += ["-ltorch_cuda"] if (lib / "libtorch_cuda.so").exists() else []
    return [tools.nvcc, "-ccbin", tools.cxx, "-shared", "-o", str(target), *names, f"-L{lib}", *libraries]


def _compile_and_link(part: str, tools: Toolchain, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="zero_full_") as scratch:
        jobs = commands(part, tools, Path(scratch))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda job: _run([*job[1], "-o", str(job[0])]), jobs.items()))
        partial = target.with_suffix(f".{os.getpid()}")
        try:
            _run(link_command(part, tools, list(jobs), partial))
            partial.chmod(0o755)
            partial.replace(target)  # who looks sees all of it, or nothing
        finally:
            partial.unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[:20])
        raise BuildError(f"this command failed with code {done.returncode}:\n{' '.join(command)}\n{said}")
