"""Compile csrc/ into two libraries: operators for the CPU, and for GPUs.

Like `toolchain` and `library_cache` this module needs only the standard library, and not torch.

[Note: names] zf_cuda-CONTENT-80_90+PTX-COMPILERS.so: CONTENT is a hash of everything that any machine knows
of the build (sources, options, torch). The GPU architectures follow. COMPILERS is a hash of the compilers. A
search takes any library with the right CONTENT that serves the devices, so a machine without compilers, or
with others than those of the installation, finds it. A build makes the full name.

[Note: cpp_extension] torch.utils.cpp_extension cannot build this. It imports torch, which an isolated
installation does not have. It needs ninja. It compiles all sources of an extension with the same options,
but each instruction set of csrc/cpu has its own. It ignores nvcc if torch has no CUDA. And its lock stays
when a rank is killed during a build, so that all later runs wait for ever.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from zero_full.cpus import usable_cpus
from zero_full.kernels import architectures, library_cache
from zero_full.kernels.architectures import Device
from zero_full.kernels.toolchain import BuildError, Toolchain, toolchain, torch_home

PACKAGE = Path(__file__).resolve().parents[1]
PARTS = ("cpu", "cuda")
FILES = {  # of csrc/ in each library
    "cpu": ("core/*", "cpu/*", "io/*", "bind.h", "bind_cpu.cpp", "bind_io.cpp"),
    "cuda": ("core/*", "cuda/*", "bind.h", "bind_cuda.cpp"),
}
ABI = "0x020a000000000000"  # TORCH_TARGET_VERSION: torch 2.10's stable interface
COMMON = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
KERNEL = ["-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"]
CUDA = ["-std=c++17", "-O3", "-fmad=false", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
BINDING = [f"-DTORCH_TARGET_VERSION={ABI}"]
LEVELS = ("v2", "v3", "v4")  # of x86-64; on other machines only the first, with the compiler's defaults
Stamp = tuple[int, int]  # a file's identity, which differs for another file of the same name


class CompileError(BuildError):
    """Raised if a compiler or linker fails. `is_lasting`: it would fail again, as the source is wrong."""

    def __init__(self, reason: str, is_lasting: bool) -> None:
        super().__init__(reason)
        self.is_lasting = is_lasting


def sources() -> Path:
    """Return the path of csrc/: beside the package in a checkout, inside it in a wheel."""
    candidates = [PACKAGE.parent / "csrc", PACKAGE / "csrc"]
    for path in candidates:
        if (path / "bind_cpu.cpp").exists():
            return path
    raise BuildError(
        f"the C++ sources are missing: neither {candidates[0]} nor {candidates[1]} exists. Install zero_full "
        "again"
    )


# Names: see [Note: names] --------------------------------------------------------------------------


class Name(NamedTuple):
    """The name of a library. See [Note: names]."""

    part: str
    content: str
    architectures: tuple[str, ...]
    compilers: str

    @classmethod
    def parse(cls, file_name: str) -> "Name | None":
        """Parse a file's name; None if it is not one of a library."""
        pattern = r"zf_([a-z]+)-([0-9a-f]{16})(?:-([0-9a_+PTX]+))?-([0-9a-f]{16})\.so"
        if not (match := re.fullmatch(pattern, file_name)):
            return None
        part, content, wanted, compilers = match.groups(default="")
        return cls(part, content, tuple(filter(None, wanted.split("_"))), compilers)

    def __str__(self) -> str:
        pieces = ("zf_" + self.part, self.content, "_".join(self.architectures), self.compilers)
        return "-".join(filter(None, pieces)) + ".so"


def name_for(part: str, tools: Toolchain, devices: Sequence[Device] = ()) -> Name:
    """Return the name of the library that these compilers make for the GPUs of `architectures.chosen`."""
    wanted = architectures.chosen(tools.architectures, devices) if part == "cuda" else ()
    return Name(part, content_hash(part), wanted, _hash(tools.identity.encode()))


def content_hash(part: str) -> str:
    """Return a hash of the sources, the commands that compile and link them, torch and the machine."""
    tools = Toolchain("c++", "nvcc" if part == "cuda" else None, torch_home())
    jobs = commands(part, tools, (), Path())
    every = [*jobs.values(), link_command(part, tools, list(jobs), Path("library"))]
    text = "\n".join(" ".join(command) for command in every)
    text = text.replace(str(sources()), "csrc").replace(str(tools.torch), "torch")
    files = sorted(path for each in FILES[part] for path in sources().glob(each))
    contents = [path.relative_to(sources()).as_posix().encode() + path.read_bytes() for path in files]
    version = tools.torch / "version.py"
    machine = f"{part} {platform.system()} {platform.machine()}"
    return _hash(
        *contents, text.encode(), machine.encode(), version.read_bytes() if version.exists() else b""
    )


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def find(part: str, devices: Sequence[Device] = ()) -> list[Path]:
    """Return the libraries that serve all devices, the best first: native machine code, then the newest.

    NotTrustedError if there is only one that other users can have written; see `library_cache`.
    """
    prefix = f"zf_{part}-{content_hash(part)}-"
    fitting: list[tuple[bool, float, Path]] = []
    found, not_trusted = list[Path](), None
    for directory in (library_cache.BUILT, *library_cache.caches()):
        try:
            found += library_cache.libraries(directory, prefix)
        except library_cache.NotTrustedError as error:
            not_trusted = error
    if not_trusted is not None and not found:
        raise not_trusted
    for path in found:
        name = Name.parse(path.name)
        if name is not None and all(architectures.serves(name.architectures, device) for device in devices):
            is_native = all(architectures.is_native(name.architectures, device) for device in devices)
            fitting.append((is_native, path.stat().st_mtime, path))
    return [path for *_, path in sorted(fitting, reverse=True)]


def stamp(path: Path) -> Stamp:
    """Return the identity of a file, which differs for a file that replaces it."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


# Compiling -----------------------------------------------------------------------------------------


def build(
    part: str,
    directory: Path,
    devices: Sequence[Device] = (),
    again: bool = False,
    broken: Mapping[Path, Stamp] | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Path:
    """Compile the library in `directory`, unless another process has just done it, and return its path.

    One process compiles and the others wait for it, so all ranks of a run may call this. If the same
    compilers have failed before with a lasting error, it is raised again, unless `again`. Files in `broken`
    are replaced. `report` is called with messages about the progress.
    """
    library_cache.check_platform()
    began = time.time()
    tools = toolchain(part)
    target = directory / str(name_for(part, tools, devices))
    try:
        library_cache.make_directory(directory)
        with library_cache.locked(target.with_suffix(".lock")):
            if library_cache.libraries(directory, target.name) and stamp(target) != (broken or {}).get(
                target
            ):
                return target
            failure = None if again else _recorded_failure(target, began)
            if failure:
                raise BuildError(failure)
            try:
                _compile_and_link(part, tools, devices, target, report)
            except CompileError as error:
                _record_failure(target, error)
                raise
    except OSError as error:
        raise BuildError(
            f"{directory} cannot be written to ({error}): set ZERO_FULL_CACHE to another directory"
        ) from error
    return target


def last_failure(part: str, directory: Path, devices: Sequence[Device] = ()) -> str | None:
    """Return the error with which the same compilers have failed to make the same library before."""
    return _recorded_failure(directory / str(name_for(part, toolchain(part), devices)), time.time())


def _recorded_failure(target: Path, began: float) -> str | None:
    """Return the recorded failure if it is lasting, or newer than `began`: another process has just tried."""
    try:
        record = json.loads(target.with_suffix(".failed").read_text())
        return str(record["reason"]) if record["lasting"] or record["at"] >= began else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _record_failure(target: Path, error: CompileError) -> None:
    record = {"lasting": error.is_lasting, "at": time.time(), "reason": str(error)}
    with contextlib.suppress(OSError):  # a full disk is no reason to hide the error
        target.with_suffix(".failed").write_text(json.dumps(record))


def commands(part: str, tools: Toolchain, wanted: Sequence[str], directory: Path) -> dict[Path, list[str]]:
    """Return the command for each object file, for GPUs with the architectures in `wanted`."""
    csrc, found = sources(), {}
    bindings = ["bind_cuda.cpp"] if part == "cuda" else ["bind_cpu.cpp", "bind_io.cpp"]
    for name in bindings:
        flags = [*COMMON, *BINDING, *includes(tools)]
        found[directory / f"{name}.o"] = [tools.cxx, *flags, "-c", str(csrc / name)]
    if part == "cuda":
        assert tools.nvcc is not None
        flags = [*CUDA, f"-I{csrc}", *architectures.options(wanted)]
        for source in sorted((csrc / "cuda").glob("*.cu")):
            out = directory / f"{source.name}.o"
            found[out] = [tools.nvcc, "-ccbin", tools.cxx, *flags, "-c", str(source)]
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


def includes(tools: Toolchain) -> list[str]:
    """Return the compiler's options to find headers. Warnings about torch's own headers are hidden."""
    return ["-isystem", str(tools.torch / "include"), f"-I{sources()}"]


def link_command(part: str, tools: Toolchain, objects: list[Path], target: Path) -> list[str]:
    """Return the command that links the objects. torch's libraries are resolved at load time."""
    names = [str(each) for each in objects]
    lib = tools.torch / "lib"
    if part == "cpu":
        complete = ["-Wl,-z,defs"] if platform.system() == "Linux" else []
        libraries = [f"-L{lib}", "-ltorch_cpu", "-lc10", "-pthread"]
        return [tools.cxx, "-shared", *complete, "-o", str(target), *names, *libraries]
    assert tools.nvcc is not None
    libraries = ["-ltorch_cpu", "-lc10"]
    # Linking works with a torch without CUDA, so that a machine without a GPU can test the build.
    libraries += ["-ltorch_cuda"] if (lib / "libtorch_cuda.so").exists() else []
    return [tools.nvcc, "-ccbin", tools.cxx, "-shared", "-o", str(target), *names, f"-L{lib}", *libraries]


def _compile_and_link(
    part: str, tools: Toolchain, devices: Sequence[Device], target: Path, report: Callable[[str], None]
) -> None:
    wanted = name_for(part, tools, devices).architectures
    with tempfile.TemporaryDirectory(prefix="zero_full_") as scratch:
        jobs = commands(part, tools, wanted, Path(scratch))
        at_once = usable_cpus()  # more compilers would only need more memory
        report(f"{len(jobs)} files to compile, {at_once} at a time")
        with ThreadPoolExecutor(at_once) as pool:
            running = {pool.submit(_run, [*command, "-o", str(made)]): made for made, command in jobs.items()}
            try:
                for number, done in enumerate(as_completed(running), 1):
                    done.result()
                    report(f"{number} of {len(jobs)}: {running[done].stem}")
            finally:
                for waiting in running:
                    waiting.cancel()
        handle, partial = tempfile.mkstemp(".partial", target.stem, target.parent)
        os.close(handle)
        try:
            _run(link_command(part, tools, list(jobs), Path(partial)))
            Path(partial).chmod(0o755)
            Path(partial).replace(target)  # atomic: other processes see a complete library or none
        finally:
            Path(partial).unlink(missing_ok=True)


# A lasting error has a line of a source, or is the linker's or nvcc's. A lack of resources is not lasting.
LASTING = re.compile(
    r"^.+:\d+:(\d+:)? (fatal )?error: |^.+\(\d+\): (catastrophic )?error|^(nvcc|ptxas) (fatal|error)"
    r"|undefined reference|unrecognized (command.line )?option|cannot find -l",
    re.MULTILINE,
)
TRANSIENT = re.compile(
    r"no space left|quota exceeded|out of memory|memory exhausted|cannot allocate memory|killed|kill signal"
    r"|died due to signal|input/output error|stale file handle|temporarily unavailable|internal compiler",
    re.IGNORECASE,
)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        output = (done.stderr or done.stdout).strip()
        is_lasting = done.returncode > 0 and bool(LASTING.search(output)) and not TRANSIENT.search(output)
        shown = "\n".join(output.splitlines()[:20])
        reason = f"this command failed with code {done.returncode}:\n{' '.join(command)}\n{shown}"
        raise CompileError(reason, is_lasting)
