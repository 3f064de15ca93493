"""Integers and means that the GPU finds without dividing are those that a division gives.

All that happens on the way is multiplied by a power of two if the number and its divisor are, so the divisors
from 1 to 2 stand for all that are usual. The fast tests try some of the numbers, the slow ones all.
"""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import INF, NAN, levels
from zero_full.kernels.builder import KERNEL, sources, toolchain

SOURCE = Path(__file__).parent / "divisions.cpp"
ONE, MANTISSAS = 0x3F800000, 2**23  # the bits of 1, and how many numbers there are up to 2
Count, Bits = ctypes.c_int64, ctypes.c_uint32


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("divisions"), sources())


def compiled(directory: Path, csrc: Path) -> ctypes.CDLL:
    path = directory / "divisions.so"
    fma = [f"-march=x86-64-v{max(levels())}"] if max(levels()) > 2 else []  # else a function computes it
    flags = ["-std=c++17", "-O3", "-ffp-contract=off", *KERNEL, *fma, "-shared", "-fPIC", f"-I{csrc}"]
    subprocess.run([toolchain("cpu").cxx, *flags, str(SOURCE), "-o", str(path)], check=True)
    found = ctypes.CDLL(str(path))
    for name in ("wrong_near_middles", "wrong_integers", "wrong_means"):
        getattr(found, name).restype = Count
    for name in ("usual_scale", "usual_total", "few_rows"):
        getattr(found, name).restype = ctypes.c_bool
    return found


def near_middles(library: ctypes.CDLL, step: int, first: int = ONE) -> int:
    return int(library.wrong_near_middles(Bits(first), Bits(step), Count(MANTISSAS // step)))


def means(library: ctypes.CDLL, step: int, rows: int, first: int = ONE) -> int:
    return int(library.wrong_means(Bits(first), Bits(step), Count(MANTISSAS // step), Count(rows)))


def wrong_integers(library: ctypes.CDLL, numbers: Tensor, scales: Tensor) -> int:
    pointers = (ctypes.c_void_p(each.data_ptr()) for each in (numbers, scales))
    return int(library.wrong_integers(*pointers, Count(numbers.numel())))


@pytest.mark.parametrize("exponent", [-96, -60, -1, 0, 1, 60, 95])
def test_numbers_near_the_middle_of_two_integers_become_the_same(library: ctypes.CDLL, exponent: int) -> None:
    assert near_middles(library, 2003, ONE + exponent * MANTISSAS) == 0


@pytest.mark.slow
def test_so_they_do_for_every_scale(library: ctypes.CDLL) -> None:
    assert near_middles(library, 1) == 0


def test_any_numbers_of_any_block_become_the_same(library: ctypes.CDLL) -> None:
    generator = torch.Generator().manual_seed(0)
    for bound in (7, 127):
        scales = torch.randn(2**20, generator=generator).exp2() * 2.0 ** torch.randint(
            -95, 95, (2**20,), generator=generator
        )
        numbers = scales * (torch.rand(2**20, generator=generator) * 2 - 1) * bound
        tiny = numbers * 2.0 ** -torch.randint(0, 60, (2**20,), generator=generator)
        for some in (numbers, tiny, torch.zeros(2**20), -torch.zeros(2**20), scales * bound, -scales * bound):
            assert wrong_integers(library, some, scales) == 0


def test_scales_outside_of_the_range_are_divided_by(library: ctypes.CDLL) -> None:
    usual = {scale: library.usual_scale(ctypes.c_float(scale)) for scale in (2.0**-96, 1.0, 2.0**96)}
    assert all(usual.values()), usual
    for scale in (0.0, NAN, INF, -1.0, 2.0**-97, 2.0**-126, 1e-42, 2.0**96 * 1.0001, 3e38):
        assert not library.usual_scale(ctypes.c_float(scale))


@pytest.mark.parametrize("exponent", [-60, 0, 99])
def test_means_over_any_number_of_rows_are_the_same(library: ctypes.CDLL, exponent: int) -> None:
    for rows in (*range(1, 130), 512, 1000, 1023, 1025, 3999, 4095, 4096):
        assert means(library, 4001, rows, ONE + exponent * MANTISSAS) == 0
        assert means(library, 4001, rows, 2**31 + ONE + exponent * MANTISSAS) == 0  # of negative totals
        assert library.wrong_means(Bits(0), Bits(1), Count(1), Count(rows)) == 0  # of 0


@pytest.mark.slow
def test_so_they_are_for_every_total(library: ctypes.CDLL) -> None:
    assert sum(means(library, 1, rows) for rows in range(1, 4097)) == 0


def test_totals_outside_of_the_range_and_more_rows_are_divided(library: ctypes.CDLL) -> None:
    assert all(library.usual_total(ctypes.c_float(x)) for x in (0.0, 2.0**-60, -1.0, 1.0, -(2.0**100)))
    for total in (NAN, INF, -INF, 2.0**-61, -(2.0**101), 1e-42):
        assert not library.usual_total(ctypes.c_float(total))
    assert library.few_rows(Count(4096)) and not library.few_rows(Count(4097))


def test_without_what_is_left_over_they_would_differ(tmp_path: Path) -> None:
    core = tmp_path / "core"
    core.mkdir()
    for path in (sources() / "core").glob("*.h"):
        text = path.read_text().replace("fmaf(fmaf(", "rough; (void)fmaf(fmaf(")
        (core / path.name).write_text(text.replace("return rough; (void)", "return rough + 0 *"))
    wrong = compiled(tmp_path, tmp_path)
    assert near_middles(wrong, 2003) > 0 and means(wrong, 4001, 7) > 0
