"""unscale_norm_check scales in place and finds the norm and the first bad element, as the reference does."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import BF16, FP16, FP32, INF, NAN, NUMBERS, SIZES, bits, normal, ops, same_everywhere
from zero_full.kernels import reference

GRAIN = 2**15  # elements whose squares are one sum
AROUND_GRAINS = (GRAIN - 1, GRAIN, GRAIN + 1, 3 * GRAIN + 17)


def copies(gradients: Sequence[Tensor], offset: int = 0) -> list[Tensor]:
    """Copies that begin `offset` elements behind an aligned address."""
    found = []
    for gradient in gradients:
        room = torch.zeros(gradient.numel() + offset, dtype=gradient.dtype)
        found.append(room[offset:].copy_(gradient))
    return found


def check(gradients: Sequence[Tensor], factor: float = 0.3, offset: int = 0) -> tuple[float, int]:
    """The reference's gradients bit for bit, its place and its sum; the same bits everywhere."""
    want = copies(gradients)
    want_sum, want_first = reference.unscale_norm_check(want, factor)

    def run() -> list[Tensor]:
        mine = copies(gradients, offset)
        return [*mine, *ops().unscale_norm_check(mine, factor)]

    *mine, total, first = same_everywhere(run)
    for one, other in zip(mine, want, strict=True):
        assert torch.equal(*(bits(each.masked_fill(each.isnan(), NAN)) for each in (one, other)))
    torch.testing.assert_close(total, want_sum, rtol=1e-13, atol=0, equal_nan=True)
    assert first == want_first
    assert total.isfinite() == (first < 0)
    return float(total), int(first)


@pytest.mark.parametrize("size", sorted({*SIZES, *AROUND_GRAINS}))
@pytest.mark.parametrize("dtype", NUMBERS)
def test_any_size_and_type(size: int, dtype: torch.dtype) -> None:
    assert check([normal(size, dtype)])[1] == -1


@pytest.mark.parametrize("offset", [1, 3, 7])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_any_place(offset: int, dtype: torch.dtype) -> None:
    gradients = [normal(size, dtype, seed=size) for size in (9, 1000, GRAIN + 5)]
    aligned = check(gradients)
    assert check(gradients, offset=offset) == aligned


def test_many_tensors_of_all_sizes_in_one_call() -> None:
    sizes = [0, 1, 5, 40_000, 0, 17, 70_001, 3, 0] * 4
    check([normal(size, seed=i) for i, size in enumerate(sizes)])


@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 0]])
def test_of_nothing_the_sum_is_zero_and_all_is_finite(sizes: list[int]) -> None:
    total, first = ops().unscale_norm_check([torch.zeros(size) for size in sizes], 0.5)
    assert (total.dtype, first.dtype) == (torch.float64, torch.int64)
    assert (float(total), int(first)) == (0.0, -1)


def test_the_sum_is_exact_to_fp64() -> None:
    gradient = normal(20_000) * torch.logspace(-30, 30, 20_000)
    exact = math.fsum(float(x) ** 2 for x in gradient)
    assert check([gradient], factor=1.0)[0] == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize("bad", [NAN, -INF])
@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("factor", [1.0, 2.0**-16])
def test_the_first_bad_element_is_found_wherever_it_is(bad: float, dtype: torch.dtype, factor: float) -> None:
    sizes = [0, 9, 0, GRAIN + 3, 31]
    places = [(1, 0), (1, 8), (3, 0), (3, GRAIN - 9), (3, GRAIN - 10), (3, GRAIN + 2), (4, 0), (4, 30)]
    for tensor, at in places:
        gradients = [normal(size, dtype) for size in sizes]
        gradients[tensor][at] = bad
        _, first = check(gradients, factor)
        assert first == sum(sizes[:tensor]) + at


def test_of_several_bad_elements_the_first_counts() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 5, 40):
        places = torch.randint(0, 4 * GRAIN, (count,), generator=generator)
        gradient = normal(4 * GRAIN)
        gradient[places] = NAN
        assert check(list(gradient.split([7, 0, GRAIN, GRAIN + 2, 2 * GRAIN - 9])))[1] == int(places.min())


def test_no_finite_number_is_too_large_for_the_sum() -> None:
    largest = torch.finfo(FP32).max
    total, first = check([torch.full((100_000,), largest)], factor=1.0)
    assert first == -1
    assert total == pytest.approx(1e5 * largest**2, rel=1e-12)


@pytest.mark.parametrize(
    ("dtype", "value", "factor"),
    [(FP32, 1e30, 1e10), (BF16, 3e38, 2.0), (FP16, 6e4, 2.0), (FP16, 65504, 1.001)],
)
def test_what_scaling_makes_infinite_is_bad(dtype: torch.dtype, value: float, factor: float) -> None:
    gradient = torch.ones(100, dtype=dtype)
    gradient[71] = value
    assert check([gradient], factor)[1] == 71


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("factor", [0.5, 3.0, 1.0 / 3.0])
def test_denormals_zeros_and_limits_are_scaled_as_torch_does(dtype: torch.dtype, factor: float) -> None:
    limits = torch.finfo(dtype)
    special = [
        0.0,
        -0.0,
        limits.tiny,
        -limits.tiny,
        limits.smallest_normal / 3,
        1e-45,
        6e-8,
        9e-8,
        limits.eps,
    ]
    special += [limits.max / 3, limits.min / 3]
    spread = normal(2000) * torch.logspace(-45, 4, 2000)
    check([torch.tensor(special).to(dtype), spread.to(dtype)], factor)


def test_all_16_bit_numbers_are_scaled_as_torch_does() -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    for dtype in (BF16, FP16):
        numbers = every.view(dtype)
        numbers = numbers[numbers.isfinite()]
        assert check([numbers], 1 / 3)[1] == -1
        assert check([numbers], 1.0)[1] == -1


def test_a_factor_of_one_writes_nothing() -> None:
    payload = torch.tensor([0x7FA5, 0x7F81, 0x0001, 0x3F80], dtype=torch.int16).repeat(
        50
    )  # writing NaNs changes them
    gradient = payload.clone().view(BF16)
    _, first = ops().unscale_norm_check([gradient], 1.0)
    assert int(first) == 0
    assert torch.equal(gradient.view(torch.int16), payload)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_what_lies_beside_a_gradient_stays(dtype: torch.dtype) -> None:
    for size in (1, 63, 64, 65, 1000):
        room = torch.ones(size + 200, dtype=dtype)
        ops().unscale_norm_check([room[100 : 100 + size]], 4.0)
        assert torch.equal(room == 4, torch.arange(size + 200).sub(100).div(size, rounding_mode="floor") == 0)


@pytest.mark.parametrize(
    ("gradients", "complaint"),
    [
        ([torch.zeros(4), torch.zeros(4, dtype=BF16)], "gradients must all be of one type"),
        ([torch.zeros(4, dtype=torch.float64)], "gradients must be float32, bfloat16 or float16"),
        ([torch.zeros(4, dtype=torch.int32)], "gradients must be float32, bfloat16 or float16"),
        ([torch.zeros(8)[::2]], "gradients must be contiguous"),
        ([torch.zeros(3, 4).t()], "gradients must be contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(gradients: list[Tensor], complaint: str) -> None:
    with pytest.raises(RuntimeError, match=complaint):
        ops().unscale_norm_check(gradients, 0.5)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_torch_finds_nothing_wrong_with_the_operator(factor: float) -> None:
    ops()
    arguments: Any = ([normal(9), normal(0), normal(40, seed=1).view(5, 8)], factor)
    torch.library.opcheck(torch.ops.zero_full.unscale_norm_check, arguments)
