"""What compiling csrc/ gives: what each CUDA kernel takes of a multiprocessor, and how large libraries are.

    python -m tests.bench.kernel_sizes

Everything is compiled anew, which takes a minute or more; no GPU is needed. A kernel is there once for each
combination of types: the table has the least and the most of them. Times are those of a machine that may have
had other work.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench import interleave
from tests.kernels import cubin
from tests.kernels.cubin import Usage
from zero_full.kernels import builder, toolchain

HEAD = [
    "kernel",
    "variants",
    *(f"registers, {name}" for name in cubin.ARCHITECTURES),
    "shared, B",
    "spills, B",
]


def span(numbers: Sequence[int]) -> str:
    """From the least to the most."""
    return f"{min(numbers)}" + (f"-{max(numbers)}" if max(numbers) > min(numbers) else "")


def kernel_rows(usages: Sequence[Usage]) -> list[list[str]]:
    """One for each kernel."""
    rows = []
    for source, name in sorted({usage.kernel[:2] for usage in usages}):
        mine = [usage for usage in usages if usage.kernel[:2] == (source, name)]
        registers = [
            span([usage.registers for usage in mine if usage.architecture == architecture])
            for architecture in cubin.ARCHITECTURES
        ]
        variants = len({usage.kernel for usage in mine})
        shared = span([usage.shared for usage in mine])
        spills = span([usage.spill_stores + usage.spill_loads for usage in mine])
        rows.append([f"{source} {name}", str(variants), *registers, shared, spills])
    return rows


def main() -> None:
    """Compile and print two tables."""
    print(interleave.heading())
    libraries: list[list[str]] = []
    usages: list[Usage] = []
    with tempfile.TemporaryDirectory() as directory:
        for part in builder.PARTS:
            began = time.monotonic()
            try:
                if part == "cuda":
                    library, said = cubin.compile_cuda(Path(directory) / part)
                    usages = cubin.usages(said)
                else:
                    library = builder.build(part, Path(directory) / part)
            except toolchain.BuildError as error:
                sys.exit(f"kernel_sizes: nothing to show, {part} could not be built: {error}")
            seconds = time.monotonic() - began
            libraries.append([f"zf_{part}", f"{library.stat().st_size / 1e6:.1f}", f"{seconds:.0f}"])
    print(interleave.table(HEAD, kernel_rows(usages)))
    print("\n" + interleave.table(["library", "MB", "compiled in, s"], libraries))


if __name__ == "__main__":
    main()
