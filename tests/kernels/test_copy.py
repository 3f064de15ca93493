"""nontemporal_copy copies every byte to its place, and none beside it."""

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import BF16, FP32, ops, same, same_everywhere

SIZES = (0, 1, 15, 16, 63, 64, 65, 200, 1000, 2**17 + 5, 2**19)  # bytes


@pytest.mark.parametrize("offset", [0, 1, 16, 37, 63])
@pytest.mark.parametrize("size", SIZES)
def test_any_size_and_place(size: int, offset: int) -> None:
    source = torch.arange(size + 3, dtype=torch.int64).mul_(167).to(torch.uint8)[3:]

    def run() -> list[Tensor]:
        room = torch.full((size + offset + 70,), 7, dtype=torch.uint8)
        ops().nontemporal_copy(source, room[offset : offset + size])
        return [room]

    (room,) = same_everywhere(run)
    assert (room[:offset] == 7).all() and (room[offset + size :] == 7).all()
    assert torch.equal(room[offset : offset + size], source)


@pytest.mark.parametrize("dtype", [torch.float64, FP32, BF16, torch.int16, torch.bool])
def test_any_type(dtype: torch.dtype) -> None:
    source, out = torch.arange(1001).to(dtype), torch.zeros(1001, dtype=dtype)
    ops().nontemporal_copy(source, out)
    assert same(out, source)


@pytest.mark.parametrize(
    ("source", "out", "complaint"),
    [
        (torch.zeros(4), torch.zeros(5), "source has 4 elements, out 5"),
        (torch.zeros(4), torch.zeros(4, dtype=BF16), "must be of one type"),
        (torch.zeros(8)[::2], torch.zeros(4), "source must be contiguous"),
        (torch.zeros(4), torch.zeros(8)[::2], "out must be contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(source: Tensor, out: Tensor, complaint: str) -> None:
    with pytest.raises(RuntimeError, match=complaint):
        ops().nontemporal_copy(source, out)


def test_torch_finds_nothing_wrong_with_the_operator() -> None:
    ops()
    torch.library.opcheck(torch.ops.zero_full.nontemporal_copy, (torch.ones(9), torch.empty(9)))
