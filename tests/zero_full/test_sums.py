"""Sums of slices: first to last, in fp32 or wider, wherever the result is written."""

from unittest import mock

import pytest
import torch

from tests.kernels.cases import ops as compiled
from tests.zero_full.test_transport import DTYPES, in_rank_order, numbers
from zero_full.comm import transport
from zero_full.comm.transport import add_up
from zero_full.kernels import reference


@pytest.fixture(params=[True, False], ids=["compiled", "reference"], autouse=True)
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compiled operator, or by torch's operations."""
    if request.param:
        compiled()
    else:
        monkeypatch.setattr(transport, "compiled_for", lambda device: False)


def test_sixteen_bit_numbers_are_summed_in_fp32_and_rounded_once() -> None:
    pieces = [torch.tensor([256.0], dtype=torch.bfloat16)] + [torch.ones(1, dtype=torch.bfloat16)] * 3
    out = torch.empty(1, dtype=torch.bfloat16)
    add_up(pieces, out, 1)
    assert out.item() == torch.tensor(259.0).bfloat16().item() != 256  # bit by bit it would stay at 256
    add_up([torch.tensor([60000.0], dtype=torch.float16)] * 2, half := torch.empty(1).half(), 2)
    assert half.item() == 60000  # the sum alone does not fit


def test_a_sum_starts_with_the_first_piece() -> None:
    pieces = [torch.tensor([x]) for x in (1e8, 1.0, -1e8)]
    forth, back = torch.empty(1), torch.empty(1)
    add_up(pieces, forth, 1)
    add_up(pieces[::-1], back, 1)
    assert (forth.item(), back.item()) == (0.0, 0.0)
    add_up([pieces[0], pieces[2], pieces[1]], forth, 1)
    assert forth.item() == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "place"), [(count, place) for count in (2, 3, 4) for place in range(count)]
)
def test_a_sum_may_be_written_over_any_of_its_pieces_wherever_it_is_cut(
    count: int, place: int, dtype: torch.dtype
) -> None:
    for numel in (0, 1, 2, 3, 4, 7):
        pieces = [numbers(rank, numel, dtype) for rank in range(count)]
        with mock.patch.dict(reference.PIECE, cpu=3):
            add_up(pieces, pieces[place], 2.0)
        assert torch.equal(pieces[place], in_rank_order(count, numel, dtype, 2.0).to(dtype))
        others = [rank for rank in range(count) if rank != place]
        assert all(torch.equal(pieces[rank], numbers(rank, numel, dtype)) for rank in others)


@pytest.mark.parametrize("out", [torch.float32, torch.float64])
@pytest.mark.parametrize("given", DTYPES)
def test_a_sum_takes_the_precision_of_its_place(given: torch.dtype, out: torch.dtype) -> None:
    pieces = [numbers(rank, 9, given) for rank in range(3)]
    total = torch.empty(9, dtype=out)
    add_up(pieces, total, 3.0)
    first, second, third = (piece.to(torch.promote_types(given, out)) for piece in pieces)
    assert torch.equal(total, ((first + second + third) / 3.0).to(out))
