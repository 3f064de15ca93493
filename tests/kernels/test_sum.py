"""sum_and_divide adds terms in order, in fp32, and rounds once, as the reference does."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import BF16, FP16, FP32, INF, NAN, NUMBERS, SIZES, normal, ops, same, same_everywhere
from zero_full.kernels import reference


def check(terms: list[Tensor], dtype: torch.dtype, divisor: float, offset: int = 0) -> Tensor:
    """The reference's bits, on every instruction set, and nothing is written beside `out`."""
    numel = terms[0].numel()
    want = torch.empty(numel, dtype=dtype)
    reference.sum_and_divide(terms, want, divisor)

    def run() -> list[Tensor]:
        room = torch.full((numel + offset + 9,), 7.0, dtype=dtype)
        ops().sum_and_divide(terms, room[offset : offset + numel], divisor)
        return [room]

    (room,) = same_everywhere(run)
    assert (room[:offset] == 7).all() and (room[offset + numel :] == 7).all()
    assert same(room[offset : offset + numel], want)
    return want


@pytest.mark.parametrize("out", NUMBERS)
@pytest.mark.parametrize("given", NUMBERS)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_any_size_and_types(count: int, given: torch.dtype, out: torch.dtype) -> None:
    for size in SIZES:
        check([normal(size, given, seed) for seed in range(count)], out, 3.0)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("offset", [1, 3, 7])
def test_any_place(offset: int, dtype: torch.dtype) -> None:
    check([normal(1000, dtype, seed, offset * seed) for seed in range(3)], dtype, 1.0, offset)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0, 1e-3])
def test_special_numbers(dtype: torch.dtype, divisor: float) -> None:
    limits = torch.finfo(dtype)
    special = [
        0.0,
        -0.0,
        limits.tiny,
        limits.smallest_normal / 3,
        6e-8,
        limits.max,
        limits.min,
        INF,
        -INF,
        NAN,
    ]
    first, second = torch.tensor(special).to(dtype).repeat(10), torch.tensor(special).to(dtype)
    for out in NUMBERS:
        check([first, second.repeat_interleave(10), first], out, divisor)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_sum_may_be_written_over_a_term(place: int, dtype: torch.dtype) -> None:
    for size in (1, 255, 256, 1000):
        terms = [normal(size, dtype, seed) for seed in range(3)]
        want = check(terms, dtype, 3.0)
        ops().sum_and_divide(terms, terms[place], 3.0)
        assert same(terms[place], want)


@pytest.mark.parametrize(
    ("terms", "out", "complaint"),
    [
        ([torch.zeros(4)], torch.zeros(4), "two terms at least"),
        ([torch.zeros(4), torch.zeros(5)], torch.zeros(4), "a term has 5 elements, out 4"),
        ([torch.zeros(4), torch.zeros(4, dtype=BF16)], torch.zeros(4), "terms must all be of one type"),
        ([torch.zeros(4, dtype=torch.float64)] * 2, torch.zeros(4), "terms must be float32"),
        ([torch.zeros(4)] * 2, torch.zeros(4, dtype=torch.int32), "out must be float32"),
        ([torch.zeros(8)[::2]] * 2, torch.zeros(4), "terms must be contiguous"),
        ([torch.zeros(4)] * 2, torch.zeros(8)[::2], "out must be contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(terms: list[Tensor], out: Tensor, complaint: str) -> None:
    with pytest.raises(RuntimeError, match=complaint):
        ops().sum_and_divide(terms, out, 1.0)


def test_torch_finds_nothing_wrong_with_the_operator() -> None:
    ops()
    arguments: Any = ([normal(9, FP16), normal(9, FP16, seed=1)], torch.empty(9, dtype=FP32), 2.0)
    torch.library.opcheck(torch.ops.zero_full.sum_and_divide, arguments)
