"""What nvcc made of csrc/cuda, to look at: nothing here needs a GPU.

Registers, spills and shared memory are what ptxas says while it compiles. Loads and stores are counted in the
machine code, by NVIDIA's disassembler: two packages of the `dev` extra.
"""

import contextlib
import functools
import importlib.metadata
import os
import re
import shlex
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from zero_full.kernels import architectures, builder, toolchain

KEPT = Path(__file__).resolve().parents[2] / "build/cuda_static"
ARCHITECTURES = tuple(f"sm_{number}" for number in re.findall(r"\d+", architectures.DEFAULT))
PACKAGES = {"cuobjdump": "nvidia-cuda-cuobjdump", "nvdisasm": "nvidia-cuda-nvdisasm"}


class Kernel(NamedTuple):
    """One instantiation of a kernel. `source` is empty where its name does not tell."""

    source: str
    name: str
    types: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.source} {self.name}" + (f"<{', '.join(self.types)}>" if self.types else "")


def kernels_of(mangled: Iterable[str]) -> dict[str, Kernel]:
    """What the names in object files mean."""
    names = sorted(set(mangled))
    said = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return {name: _kernel(name, plain) for name, plain in zip(names, said.stdout.splitlines(), strict=True)}


def _kernel(mangled: str, plain: str) -> Kernel:
    source = re.search(r"_GLOBAL__N__[0-9a-f]+_\d+_(\w+)_cu_", mangled)
    found = re.search(r"(\w+)(?:<([^()]*)>)?\(", plain.replace("(anonymous namespace)::", ""))
    assert found, f"not the name of a kernel: {plain}"
    types = found[2].replace("zf::", "").split(", ") if found[2] else []
    return Kernel(f"{source[1]}.cu" if source else "", found[1], tuple(types))


# Compiling ---------------------------------------------------------------------------------------


class Compiled(NamedTuple):
    """The library as `build` makes it, and what ptxas said of it."""

    library: Path
    said: str


SAID = "ptxas.txt"
NVCC = """#!/bin/sh
{nvcc} -Xptxas -v "$@" 2>"$0.$$.log"
code=$?
grep -v -e '^ptxas info' -e ' bytes stack frame' "$0.$$.log" >&2
exit $code
"""


def compile_cuda(directory: Path) -> Compiled:
    """By `build` itself, whose nvcc is told to say more. The directory must be empty."""
    nvcc = toolchain.toolchain("cuda").nvcc
    assert nvcc is not None
    with tempfile.TemporaryDirectory(prefix="zero_full_nvcc_") as home:
        talking = Path(home) / "bin/nvcc"
        talking.parent.mkdir()
        talking.write_text(NVCC.format(nvcc=shlex.quote(nvcc)))
        talking.chmod(0o755)
        with mock.patch.dict(os.environ, CUDA_HOME=home, ZERO_FULL_CUDA_ARCHS=architectures.DEFAULT):
            library = builder.build("cuda", directory)
        said = "".join(path.read_text() for path in sorted(talking.parent.glob("*.log")))
    (directory / SAID).write_text(said)
    return Compiled(library, said)


@functools.cache
def compiled() -> Compiled:
    """The same, kept until the sources change."""
    with mock.patch.dict(os.environ, ZERO_FULL_CUDA_ARCHS=architectures.DEFAULT):
        kept = KEPT / str(builder.name_for("cuda", toolchain.toolchain("cuda")))
    if not kept.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT, ignore_cleanup_errors=True) as directory:
            compile_cuda(Path(directory))
            with contextlib.suppress(OSError):  # somebody else was faster
                Path(directory).rename(kept)
    return Compiled(next(kept.glob("*.so")), (kept / SAID).read_text())


# Registers ---------------------------------------------------------------------------------------


class Usage(NamedTuple):
    """What a kernel takes; all but the registers in bytes."""

    kernel: Kernel
    architecture: str
    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int


ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(sm_\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def usages(said: str) -> list[Usage]:
    """What ptxas said, by kernel and architecture; a kernel has also what functions that it calls have."""
    _, *parts = ENTRY.split(said)
    kernels = kernels_of(parts[::3])
    found = []
    for name, architecture, about in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        used = re.search(r"Used (\d+) registers(.*)", about)
        assert used, f"ptxas does not say how many registers {kernels[name]} has"
        shared = sum(map(int, re.findall(r"(\d+) bytes smem", used[2])))
        frames = [list(map(int, frame)) for frame in FRAME.findall(about)]
        stack, stores, loads = map(sum, zip(*frames, strict=True))
        found.append(Usage(kernels[name], architecture, int(used[1]), shared, stack, stores, loads))
    return found


def too_much(usages: Sequence[Usage], most_registers: Mapping[str, int]) -> list[str]:
    """Kernels that spill, use the stack, or more registers than their name may."""
    found = []
    for usage in usages:
        limit = most_registers.get(usage.kernel.name, 0)
        complaints = [
            f"{number} bytes of {what}"
            for number, what in (
                (usage.stack, "stack"),
                (usage.spill_stores, "spill stores"),
                (usage.spill_loads, "spill loads"),
            )
            if number
        ]
        if usage.registers > limit:
            complaints.append(f"{usage.registers} registers, at most {limit} are expected")
        found += [f"{usage.kernel} for {usage.architecture}: {complaint}" for complaint in complaints]
    return found


# Loads and stores --------------------------------------------------------------------------------


class Access(NamedTuple):
    """Of global memory, by one thread at once."""

    what: str  # "load" or "store"
    bits: int


def disassembler() -> dict[str, str] | None:
    """The environment to run cuobjdump in, which wants to find nvdisasm; None if one is not installed."""
    folders = []
    for program, package in PACKAGES.items():
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            return None
        folders += [str(Path(str(file.locate())).parent) for file in files if file.name == program]
    return {**os.environ, "PATH": os.pathsep.join([*folders, os.environ.get("PATH", "")])}


FUNCTION = re.compile(r"^[ \t]*Function : (\w+)$", re.MULTILINE)
INSTRUCTION = re.compile(
    r"^ +/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ +)?(?:(LDG?)|STG?)((?:\.\w+)*) .*$", re.MULTILINE
)
OPCODE = re.compile(r"^ +/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ +)?([A-Z][\w.]*)")
WIDTHS = {"256": 256, "128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}


def disassemble(binary: Path, architecture: str) -> str:
    """The names of its kernels, and behind each its instructions, without what they work on."""
    command = ["cuobjdump", "-sass", "-arch", architecture, str(binary)]
    done = subprocess.run(command, env=disassembler(), capture_output=True, text=True, check=True)
    lines = []
    for line in done.stdout.splitlines():
        if found := OPCODE.match(line):
            lines.append(f"{found[0]} ;")
        elif FUNCTION.match(line):
            lines.append(line)
    return "\n".join(lines)


def disassembled(architecture: str) -> str:
    """What `compiled` has made, kept beside it."""
    library = compiled().library
    kept = library.with_suffix(f".{architecture}")
    if not kept.exists():
        kept.write_text(disassemble(library, architecture))
    return kept.read_text()


def _by_kernel(code: str) -> dict[Kernel, str]:
    _, *parts = FUNCTION.split(code)
    kernels = kernels_of(parts[::2])
    return {kernels[name]: code for name, code in zip(parts[::2], parts[1::2], strict=True)}


def accesses(code: str) -> dict[Kernel, Counter[Access]]:
    """How often each access stands in each kernel's code."""
    return {
        kernel: Counter(_access(found) for found in INSTRUCTION.finditer(part))
        for kernel, part in _by_kernel(code).items()
    }


def instructions(code: str) -> dict[Kernel, Counter[str]]:
    """How often each instruction stands in each kernel's code, without what is behind its first dot."""
    return {
        kernel: Counter(found[1].split(".")[0] for line in part.splitlines() if (found := OPCODE.match(line)))
        for kernel, part in _by_kernel(code).items()
    }


def _access(found: re.Match[str]) -> Access:
    sizes = [WIDTHS[part] for part in found[2].split(".") if part in WIDTHS]
    return Access("load" if found[1] else "store", sizes[0] if sizes else 32)


# Which arrays a kernel walks over, by the types it is made for: those that it reads, those that it writes.
Arrays = tuple[list[str], list[str]]
ARRAYS: dict[str, Callable[..., Arrays]] = {
    "adam_kernel": lambda master, grad, moments, copy: (
        [master, grad, moments, moments],
        [master, moments, moments, copy],
    ),
    "stochastic_kernel": lambda grad, moments: (
        ["bf16", grad, moments, moments],
        ["bf16", moments, moments],
    ),
    "norms_kernel": lambda master, grad, moments: ([master, grad, moments, moments], [moments, moments]),
    "step_kernel": lambda master, moments, copy: ([master, moments, moments], [master, copy]),
    "unscale_kernel": lambda number, scale: ([number], [number] if scale == "true" else []),
    "sums_kernel": lambda value: (["float", value], []),
    "pack_kernel": lambda value: (["float", value], ["float"]),
    "mean_kernel": lambda number: ([number], [number]),
    "quantize_kernel": lambda number, bits, team, two: ([number, number], []),  # for the scale, for integers
    "dequantize_kernel": lambda number, bits, team, two, many: ([number], [number]),
}
BITS = {"float": 32, "bf16": 16, "f16": 16, "nothing": 0}


def wanted(kernel: Kernel) -> Counter[Access]:
    """At least: 16 bytes at once of the largest type, and as many elements of the others."""
    read, written = ARRAYS[kernel.name](*kernel.types)
    elements = 128 // max(BITS[each] for each in read + written)
    both = [("load", each) for each in read] + [("store", each) for each in written]
    return Counter(Access(what, elements * BITS[each]) for what, each in both if BITS[each])


def roundings(kernel: Kernel) -> int:
    """How many instructions at least round the 16-bit numbers of a pack, two at once."""
    read, written = ARRAYS[kernel.name](*kernel.types)
    elements = 128 // max(BITS[each] for each in read + written)
    return sum(elements // 2 for each in written if BITS[each] == 16)


# Kernels whose narrow accesses are only those of the elements before and behind the wide ones.
SWEPT = {"adam_kernel", "stochastic_kernel", "norms_kernel", "step_kernel", "unscale_kernel"}


def too_narrow(found: Mapping[Kernel, Counter[Access]]) -> list[str]:
    """Kernels over arrays whose code has not enough wide loads and stores, or too many narrow ones."""
    complaints = []
    for kernel, code in found.items():
        if kernel.name in ARRAYS:
            complaints += [
                f"{kernel}: {number} arrays want a {access.what} of {access.bits} bits, "
                f"its code has {code[access]}"
                for access, number in wanted(kernel).items()
                if code[access] < number
            ]
        if kernel.name in SWEPT:
            for what in ("load", "store"):
                of_it = {access.bits: number for access, number in code.items() if access.what == what}
                wide = sum(number for bits, number in of_it.items() if bits >= 64)
                narrow = sum(of_it.values()) - wide
                if narrow > 2 * wide + 1:  # compilers copy loops; and one reads the step's number
                    complaints.append(f"{kernel}: {narrow} narrow {what}s beside {wide} wide ones")
    return complaints
