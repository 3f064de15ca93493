"""What can be said of the CUDA kernels without a GPU: they compile, link and load; how much they take of a
multiprocessor; and that they move 16 bytes at once."""

import functools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import rotation
from tests.kernels import cubin
from tests.kernels.cubin import ARCHITECTURES, ARRAYS, Access, Compiled, Kernel, Usage
from zero_full.kernels import builder, toolchain


def why_no_nvcc() -> str:
    """In the builder's words; empty if there is one."""
    try:
        toolchain.toolchain("cuda")
    except toolchain.BuildError as error:
        return str(error) if "nvcc" in str(error) else ""
    return ""


pytestmark = pytest.mark.skipif(bool(why_no_nvcc()), reason=why_no_nvcc())
disassembles = pytest.mark.skipif(
    cubin.disassembler() is None, reason=f"not installed: {' and '.join(cubin.PACKAGES.values())}"
)

COMBINING = ("combine_kernel", "scales_kernel")  # a few numbers for each thousands of elements
ASKED = ("answer_kernel",)  # by the loader
MOST_REGISTERS = {**dict.fromkeys(ARRAYS, 64), **dict.fromkeys((*COMBINING, *ASKED), 40)}
STEP_OF_ONE = """
import ctypes, os, sys
import torch
from zero_full.kernels import ops, reference
from zero_full.kernels.load import operators

has = torch._C._dispatch_has_kernel_for_dispatch_key
assert not any(has(f"zero_full::{name}", "CUDA") for name in ops.SCHEMAS)
library = ctypes.CDLL(sys.argv[1], mode=os.RTLD_LAZY)  # torch for CPUs has no streams
assert not any(has(f"zero_full::{name}", "CUDA") for name in ops.SCHEMAS)  # not before a kernel has run
library.zf_cuda_register.restype = ctypes.c_char_p
assert library.zf_cuda_register() is None and library.zf_cuda_register() is None
assert all(has(f"zero_full::{name}", "CUDA") for name in ops.SCHEMAS)

def after(step):
    tensors = [[torch.full((9,), number)] for number in (1.0, 2.0, 3.0, 4.0)]
    step(*tensors, [torch.ones(())], [], 0.1, 0.9, 0.99, 1e-8, 0.0, True, 1.0)
    return torch.stack([tensor for (tensor,) in tensors])

expected = after(reference.adam_step)
assert torch.equal(after(torch.ops.zero_full.adam_step), expected)  # the reference
compiled = operators(torch.device("cpu"))  # for this processor
torch.testing.assert_close(after(compiled.adam_step), expected)
print("loaded")
"""


@pytest.fixture
def compiled() -> Compiled:
    return cubin.compiled()


@pytest.fixture
def usages(compiled: Compiled) -> list[Usage]:
    return cubin.usages(compiled.said)


@pytest.mark.slow
def test_every_kernel_is_compiled_for_every_architecture(usages: list[Usage]) -> None:
    there = Counter(usage.kernel for usage in usages)
    assert set(there.values()) == {len(ARCHITECTURES)}
    assert {usage.architecture for usage in usages} == set(ARCHITECTURES)
    assert {kernel.name for kernel in there} == {*ARRAYS, *COMBINING, *ASKED}
    with_kernels = {path.name for path in (builder.sources() / "cuda").glob("*.cu")}
    assert {kernel.source for kernel in there} == with_kernels


@pytest.mark.slow
def test_no_kernel_spills_or_takes_too_many_registers(usages: list[Usage]) -> None:
    assert cubin.too_much(usages, MOST_REGISTERS) == []


@pytest.mark.slow
@disassembles
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_over_arrays_load_and_store_16_bytes_at_once(architecture: str, usages: list[Usage]) -> None:
    found = cubin.accesses(cubin.disassembled(architecture))
    assert set(found) == {usage.kernel for usage in usages}
    assert cubin.too_narrow(found) == []


# Of a kernel that takes one block, or one payload, at a time. When integers were divided for and each 16-bit
# number was rounded by itself, they had 840 to 1528 and 808 to 1912.
MOST_INSTRUCTIONS = {"quantize_kernel": 870, "dequantize_kernel": 720}


@pytest.mark.slow
@disassembles
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_16_bit_numbers_are_rounded_at_once(architecture: str) -> None:
    for kernel, code in cubin.instructions(cubin.disassembled(architecture)).items():
        if kernel.name in ARRAYS:
            assert code["F2FP"] >= cubin.roundings(kernel), kernel


@pytest.mark.slow
@disassembles
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_block_at_a_time_is_found_without_dividing_and_without_asking_which(architecture: str) -> None:
    found = cubin.instructions(cubin.disassembled(architecture))
    sizes = {kernel: sum(code.values()) for kernel, code in found.items() if kernel.name in MOST_INSTRUCTIONS}
    one = {kernel: size for kernel, size in sizes.items() if "true" not in kernel.types}
    assert len(one) == 24
    for kernel, size in one.items():
        assert size <= MOST_INSTRUCTIONS[kernel.name], kernel
        two = kernel._replace(types=(*kernel.types[:3], "true", *kernel.types[4:]))
        assert kernel.name == "dequantize_kernel" or two not in sizes or size < 0.9 * sizes[two]


SOURCES = sorted(path.name for path in (builder.sources() / "cuda").glob("*.cu"))


@pytest.mark.rotates
@disassembles
def test_a_source_is_compiled_for_an_architecture_without_spills_and_narrow_accesses(tmp_path: Path) -> None:
    """The tests above without the slow part: the source and the architecture whose turn it is."""
    source, architecture = rotation.chosen(SOURCES), rotation.chosen(ARCHITECTURES)
    binary, tools = tmp_path / f"{source}.o", toolchain.toolchain("cuda")
    command = builder.commands("cuda", tools, [architecture.removeprefix("sm_")], tmp_path)[binary]
    done = subprocess.run([*command, "-Xptxas", "-v", "-o", str(binary)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    usages = cubin.usages(done.stderr)
    assert {(usage.kernel.source, usage.architecture) for usage in usages} == {(source, architecture)}
    assert cubin.too_much(usages, MOST_REGISTERS) == []
    assert cubin.too_narrow(cubin.accesses(cubin.disassemble(binary, architecture))) == []


# The library -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_torch_without_cuda_loads_it_and_still_computes_on_the_cpu(compiled: Compiled) -> None:
    command = [sys.executable, "-c", STEP_OF_ONE, str(compiled.library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "loaded\n", done.stderr


ASK = """
import ctypes, os, sys
import torch  # the library wants its symbols
library = ctypes.CDLL(sys.argv[1], mode=os.RTLD_LAZY)
library.zf_cuda_check.restype = ctypes.c_char_p
print(library.zf_cuda_runtime(), library.zf_cuda_driver(), library.zf_cuda_check())
"""


@pytest.mark.slow
def test_it_says_whether_its_kernels_run_here(compiled: Compiled) -> None:
    command = [sys.executable, "-c", ASK, str(compiled.library)]
    runtime, driver, said = subprocess.check_output(command, text=True).split(maxsplit=2)
    version = subprocess.check_output([_nvcc(), "--version"], text=True)
    assert f"release {int(runtime) // 1000}.{int(runtime) % 1000 // 10}," in version
    if int(driver) // 1000 < int(runtime) // 1000:
        assert "driver version is insufficient" in said


@pytest.mark.slow
def test_of_torch_it_wants_only_the_stable_interface(compiled: Compiled) -> None:
    command = ["nm", "--dynamic", "--undefined-only", "--demangle", str(compiled.library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = [line.split(maxsplit=1)[1] for line in lines]
    assert [name for name in names if re.match(r"(c10|at|torch)::", name)] == []
    of_torch = [name for name in names if re.match(r"(aoti_)?torch_", name)]
    assert "aoti_torch_get_current_cuda_stream" in of_torch


# Mistakes ----------------------------------------------------------------------------------------

HEAD = "namespace zf::cuda {"
GREEDY = f"""{HEAD}
// 200 numbers that are needed at once, and a limit of 32 registers.
template <class T, bool scale>
__global__ void __launch_bounds__(1024, 2) unscale_kernel(T* data) {{
  T x[200];
  for (int i = 0; i < 200; ++i) x[i] = data[i * 1024 + threadIdx.x];
  for (int i = 0; i < 200; ++i) data[i * 1024 + threadIdx.x] = x[199 - i];
}}
template __global__ void unscale_kernel<float, true>(float*);
}}"""
WIDE = f"""{HEAD}
struct alignas(16) Pack {{ float at[4]; }};
template <class T, bool scale>
__global__ void unscale_kernel(T* data, T factor) {{
  Pack pack = reinterpret_cast<Pack*>(data)[threadIdx.x];
  for (int i = 0; i < 4; ++i) pack.at[i] *= factor;
  reinterpret_cast<Pack*>(data)[threadIdx.x] = pack;
}}
template __global__ void unscale_kernel<float, true>(float*, float);
}}"""
SCALAR = WIDE.replace("struct alignas(16) Pack", "struct Pack")
HALF = WIDE.replace(
    "reinterpret_cast<Pack*>(data)[threadIdx.x] = pack;",
    "for (int i = 0; i < 4; ++i) data[4 * threadIdx.x + i] = pack.at[i];",
)
UNSCALE = Kernel("", "unscale_kernel", ("float", "true"))


class Small(NamedTuple):
    binary: Path
    usages: list[Usage]


@functools.cache
def _nvcc() -> str:
    nvcc = toolchain.toolchain("cuda").nvcc
    assert nvcc is not None
    return nvcc


def small(directory: Path, source: str) -> Small:
    """Compiled for one architecture."""
    file, binary = directory / "small.cu", directory / "small.cubin"
    file.write_text(source)
    command = [_nvcc(), "-std=c++17", "-arch=sm_90", "-Xptxas", "-v", "-cubin", str(file), "-o", str(binary)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Small(binary, cubin.usages(done.stderr))


def test_a_kernel_that_spills_is_noticed(tmp_path: Path) -> None:
    (usage,) = small(tmp_path, GREEDY).usages
    assert (usage.kernel, usage.architecture) == (UNSCALE, "sm_90")
    complaints = "\n".join(cubin.too_much([usage], {"unscale_kernel": 31}))
    for what in (
        "bytes of stack",
        "bytes of spill stores",
        "bytes of spill loads",
        "32 registers, at most 31",
    ):
        assert what in complaints


def test_shared_memory_and_registers_are_read_right(tmp_path: Path) -> None:
    shared = (
        "__global__ void f(int* x) { __shared__ int y[96]; y[*x] = 1; __syncthreads(); *x = y[threadIdx.x]; }"
    )
    (usage,) = small(tmp_path, shared).usages
    assert (usage.kernel, usage.shared, usage.stack) == (Kernel("", "f", ()), 4 * 96, 0)
    assert 0 < usage.registers < 32
    assert cubin.too_much([usage], {"f": 32}) == []


def test_a_spill_of_a_function_that_a_kernel_calls_is_the_kernels() -> None:
    frame = "    {} bytes stack frame, {} bytes spill stores, {} bytes spill loads\n"
    said = "ptxas info    : Compiling entry function '_Z1fPi' for 'sm_90'\n" + frame.format(0, 0, 0)
    said += "ptxas info    : Used 8 registers, 356 bytes cmem[0]\n" + frame.format(16, 8, 12)
    other = said.replace("1fPi", "1gPi").replace("16 bytes", "0 bytes").replace("12 bytes", "0 bytes")
    f, g = (Kernel("", name, ()) for name in "fg")
    assert cubin.usages(said + other) == [
        Usage(f, "sm_90", 8, 0, 16, 8, 12),
        Usage(g, "sm_90", 8, 0, 0, 8, 0),
    ]


@disassembles
@pytest.mark.parametrize(
    ("source", "complaints"),
    [
        (WIDE, []),
        (
            SCALAR,
            [
                "1 arrays want a load of 128 bits, its code has 0",
                "1 arrays want a store of 128 bits, its code has 0",
                "4 narrow loads beside 0 wide ones",
                "4 narrow stores beside 0 wide ones",
            ],
        ),
        (
            HALF,
            ["1 arrays want a store of 128 bits, its code has 0", "4 narrow stores beside 0 wide ones"],
        ),
    ],
    ids=["wide", "scalar", "stores are scalar"],
)
def test_a_kernel_with_narrow_accesses_is_noticed(source: str, complaints: list[str], tmp_path: Path) -> None:
    found = cubin.accesses(cubin.disassemble(small(tmp_path, source).binary, "sm_90"))
    assert cubin.too_narrow(found) == [f"{UNSCALE}: {complaint}" for complaint in complaints]


PAIRS = """  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y[0]) : "f"(x[1]), "f"(x[0]));
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y[1]) : "f"(x[3]), "f"(x[2]));"""


@disassembles
@pytest.mark.parametrize("rounds", ["", PAIRS])
def test_a_kernel_that_does_not_round_two_numbers_at_once_is_noticed(rounds: str, tmp_path: Path) -> None:
    by_bits = "for (int i = 0; i < 2; ++i) y[i] = (__float_as_uint(x[2 * i]) + 0x8000) >> 16;"
    source = f"""{HEAD}
    struct bf16 {{ short bits; }};
    template <class Number>
    __global__ void pack_kernel(const float* x, unsigned* y) {{
      {rounds or by_bits}
    }}
    template __global__ void pack_kernel<bf16>(const float*, unsigned*);
    }}"""
    ((kernel, code),) = cubin.instructions(cubin.disassemble(small(tmp_path, source).binary, "sm_90")).items()
    assert kernel.name == "pack_kernel"
    assert code["F2FP"] == (2 if rounds else 0) and code["STG"] > 0
    assert cubin.roundings(Kernel("", "adam_kernel", ("float", "bf16", "bf16", "bf16"))) == 6
    assert cubin.roundings(Kernel("", "dequantize_kernel", ("f16", "4", "32", "false", "false"))) == 4


@disassembles
def test_one_array_among_others_that_is_not_walked_over_widely_is_noticed() -> None:
    adam = Kernel("adam.cu", "adam_kernel", ("float", "bf16", "float", "nothing"))
    assert cubin.wanted(adam) == {
        Access("load", 128): 3,
        Access("load", 64): 1,
        Access("store", 128): 3,
    }
    right = cubin.wanted(adam) + Counter({Access("load", 32): 4, Access("load", 16): 1})
    assert cubin.too_narrow({adam: right}) == []
    twice = right + right - Counter({Access("load", 128): 2}) + Counter({Access("load", 32): 8})
    assert cubin.too_narrow({adam: twice}) == [f"{adam}: 18 narrow loads beside 6 wide ones"]
