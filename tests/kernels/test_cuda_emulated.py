"""The CUDA kernels, executed by the emulator, do what `emulated_checks` demands, whatever they are given."""

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch

from tests.kernels import emulation
from tests.kernels.cases import BF16, FP16, FP32, INF, NAN, NUMBERS, normal
from tests.kernels.emulated_checks import (
    ADAM,
    LAMB,
    MANY,
    SIZES,
    check_adam,
    check_blocks,
    check_lamb,
    check_rows,
    check_sign_mean,
    check_sign_pack,
    check_stochastic,
    check_unscale,
    ends_of,
    special,
)
from tests.kernels.emulation import CHUNK, Emulated
from tests.kernels.optimizing import ALIGNED, APART, TOGETHER, lists


@pytest.fixture(scope="module")
def cuda() -> Emulated:
    return Emulated(emulation.library())


# Optimizers --------------------------------------------------------------------------------------


CHECK_OPTIMIZER = pytest.mark.parametrize("check", [check_adam, check_lamb])


@CHECK_OPTIMIZER
@pytest.mark.parametrize("offsets", [ALIGNED, TOGETHER, APART])
def test_an_optimizer_takes_any_size_at_any_place(
    cuda: Emulated, check: Callable[..., None], offsets: Sequence[int]
) -> None:
    check(cuda, lists(SIZES, offsets, grad=BF16))


@pytest.mark.rotates
@CHECK_OPTIMIZER
def test_an_optimizer_takes_more_tensors_than_a_launch(cuda: Emulated, check: Callable[..., None]) -> None:
    check(cuda, lists(MANY, grad=BF16))


@CHECK_OPTIMIZER
@pytest.mark.parametrize("master", [FP32, BF16])
@pytest.mark.parametrize("moments", [FP32, BF16])
@pytest.mark.parametrize("grad", NUMBERS)
@pytest.mark.parametrize("copy", [None, BF16, FP16])
def test_an_optimizer_takes_all_types(
    cuda: Emulated,
    check: Callable[..., None],
    master: torch.dtype,
    moments: torch.dtype,
    grad: torch.dtype,
    copy: torch.dtype | None,
) -> None:
    check(cuda, lists([100], TOGETHER, grad, master, moments, copy))


@CHECK_OPTIMIZER
@pytest.mark.parametrize("option", [False, True])
def test_an_optimizer_takes_its_option_and_special_numbers(
    cuda: Emulated, check: Callable[..., None], option: bool
) -> None:
    before = lists([100], grad=FP32)
    special(before.grads[0])
    check(cuda, before, option)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("moments", [FP32, BF16])
@pytest.mark.parametrize("grad", NUMBERS)
@pytest.mark.parametrize("offsets", [ALIGNED, TOGETHER, APART])
def test_stochastic_rounding_gives_the_cpus_bits(
    cuda: Emulated, offsets: Sequence[int], grad: torch.dtype, moments: torch.dtype, decoupled: bool
) -> None:
    check_stochastic(cuda, lists([100, 0, CHUNK + 1], offsets, grad, BF16, moments, None), decoupled)


def test_stochastic_rounding_takes_more_tensors_than_a_launch(cuda: Emulated) -> None:
    check_stochastic(cuda, lists(MANY, ALIGNED, BF16, BF16, BF16, None))


def test_no_tensors_are_no_work(cuda: Emulated) -> None:
    cuda.adam_step(*lists([]), **ADAM, decoupled=True)
    assert cuda.lamb_norms([], [], [], [], **LAMB).shape == (0, 2)


# Gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("offset", [0, 1])
def test_gradients_of_any_size_at_any_place(
    cuda: Emulated, dtype: torch.dtype, factor: float, offset: int
) -> None:
    check_unscale(cuda, [normal(n, dtype, n, offset) for n in SIZES], factor)


def test_more_gradients_than_a_launch(cuda: Emulated) -> None:
    check_unscale(cuda, [normal(n, seed=n) for n in MANY], 0.5)


@pytest.mark.parametrize("scale", [1e-30, 1e30, 0.0])
def test_squares_beyond_fp32_are_in_the_norm(cuda: Emulated, scale: float) -> None:
    check_unscale(cuda, [normal(1000, scale=scale)], 1.0)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("places", [(0,), (999,), (1000, 1001), (1000 + CHUNK, 1003), (1000 + CHUNK + 6,)])
def test_the_first_gradient_that_is_not_finite_is_found(
    cuda: Emulated, bad: float, places: Sequence[int]
) -> None:
    everything = normal(1000 + CHUNK + 7)
    everything[list(places)] = bad
    check_unscale(cuda, everything.split([1000, CHUNK + 7]), 0.5)


def test_an_element_that_overflows_when_it_is_multiplied_is_found(cuda: Emulated) -> None:
    check_unscale(cuda, [torch.tensor([1.0, 60000.0, 2.0], dtype=FP16)], 2.0)


# One bit a number --------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [*SIZES, 2 * CHUNK + 33])
@pytest.mark.parametrize("offset", [0, 1])
def test_signs_of_any_number_of_elements_at_any_place(cuda: Emulated, numel: int, offset: int) -> None:
    error, ends = normal(numel, offset=offset), ends_of(numel)
    for l1, values in product((False, True), (None, normal(numel, BF16, 1, offset))):
        check_sign_pack(cuda, values, error, ends, l1)
    for add, rows in product((False, True), (1, 3)):
        check_sign_mean(cuda, rows, ends, error, add)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("offset", [0, 1])
def test_signs_of_all_types(cuda: Emulated, dtype: torch.dtype, offset: int) -> None:
    values, ends = normal(1000, dtype, 1, offset), ends_of(1000)
    check_sign_pack(cuda, values, normal(1000), ends, False)
    check_sign_mean(cuda, 5, ends, values, True)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("numel", [CHUNK, 2 * CHUNK + 40, 33])
@pytest.mark.parametrize("offset", [0, 1])
def test_means_of_signs_of_one_piece(cuda: Emulated, dtype: torch.dtype, numel: int, offset: int) -> None:
    """Signs are read a word at a time where all rows begin with one, and a byte at a time elsewhere."""
    for rows in (1, 2, 5):
        check_sign_mean(cuda, rows, torch.tensor([numel]), normal(numel, dtype, 0, offset), rows == 2)


@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-20, 1e38, INF])
def test_means_of_scales_near_the_ends_of_fp32(cuda: Emulated, scale: float) -> None:
    check_sign_mean(cuda, 3, torch.tensor([90]), torch.zeros(96), False, scale)


def test_signs_of_special_numbers(cuda: Emulated) -> None:
    check_sign_pack(cuda, special(normal(100)), torch.zeros(100), torch.tensor([50, 100]), True)


def test_a_piece_for_each_element(cuda: Emulated) -> None:
    check_sign_pack(cuda, None, normal(300), torch.arange(1, 301), False)
    check_sign_mean(cuda, 2, torch.arange(1, 301), normal(300), False)


# Blocks of integers ------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("block", [1, 7, 64, 255, 256, 257, 2048, CHUNK + 3])
def test_blocks_of_any_size(cuda: Emulated, numel: int, width: int, block: int) -> None:
    if numel > 20 * block:
        numel = 20 * block + numel % 10  # tiny blocks: fewer
    check_blocks(cuda, normal(numel), width, block)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("offset", [0, 1, 2])
@pytest.mark.parametrize("block", [64, 300, 301])
def test_blocks_of_all_types_at_any_place(
    cuda: Emulated, dtype: torch.dtype, width: int, offset: int, block: int
) -> None:
    check_blocks(cuda, normal(1000, dtype, 0, offset), width, block, offset)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("numel", [8, 601])
@pytest.mark.parametrize("block", [64, 301])
def test_rows_of_blocks_that_lie_anywhere(
    cuda: Emulated, dtype: torch.dtype, width: int, numel: int, block: int
) -> None:
    for gap in (0, 8, 5):
        numbers = normal(6 * (numel + gap), dtype).view(2, 3, numel + gap).transpose(0, 1)[..., :numel]
        check_rows(cuda, numbers, width, block, gap)


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("bad", [NAN, INF, -INF, 3e38, 1e-44, 0.0])
def test_blocks_with_special_numbers(cuda: Emulated, width: int, bad: float) -> None:
    numbers = normal(100)
    numbers[30:40] = bad
    numbers[80:] = bad
    check_blocks(cuda, numbers, width, 10)
