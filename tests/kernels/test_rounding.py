"""What blocks of integers are, whoever makes them: how far off numbers are, and what stands in which byte."""

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.cases import BF16, FP16, FP32, INF, NAN, ops
from tests.kernels.integers import SLACK, back, numbers, quantize, scale_of_each
from zero_full.kernels import reference

BITS, DTYPES = st.sampled_from([4, 8]), st.sampled_from([FP32, FP16, BF16])
MAKERS = pytest.mark.parametrize("maker", [reference, torch.ops.zero_full], ids=["reference", "compiled"])


@pytest.fixture(autouse=True, scope="module")
def load_the_compiled() -> None:
    ops()


@MAKERS
@given(
    numel=st.integers(0, 150),
    bits=BITS,
    block=st.integers(1, 70),
    dtype=DTYPES,
    spread=st.floats(0, 8),
    seed=st.integers(0, 10**6),
)
def test_no_number_is_off_by_more_than_half_a_scale(
    maker: Any, numel: int, bits: int, block: int, dtype: torch.dtype, spread: float, seed: int
) -> None:
    flat = numbers(seed, numel, dtype, spread)
    whole = quantize(maker, flat, bits, block)
    scales = scale_of_each(flat, bits, block)
    assert whole.payload.numel() == -(-numel * bits // 8) + 4 * -(-numel // block)
    torch.testing.assert_close(whole.scales.double(), scales[::block], rtol=1e-6, atol=0)
    assert bool(((back(maker, whole) - flat).abs().double() <= scales / 2 * SLACK).all())
    with mock.patch.dict(reference.PIECE, cpu=20):
        cut = quantize(reference, flat, bits, block)
        assert torch.equal(cut.payload, whole.payload) and torch.equal(
            back(reference, cut), back(maker, whole)
        )


@MAKERS
@pytest.mark.parametrize("bits, want", [(8, [127, -127, 18, 9, 0]), (4, [7 | (-7 & 15) << 4, 1 | 1 << 4, 0])])
def test_the_bytes_are_the_integers_and_then_the_scale(maker: Any, bits: int, want: list[int]) -> None:
    whole = quantize(maker, torch.tensor([7.0, -7.0, 1.0, 0.51, 0.0]), bits, 5)
    assert whole.values.tolist() == [x - 256 if x > 127 else x for x in want]
    assert whole.payload[-4:].clone().view(FP32).item() == torch.tensor(7 / (2 ** (bits - 1) - 1)).item()


@MAKERS
@pytest.mark.parametrize("bits", [4, 8])
def test_every_integer_comes_back_from_its_byte(maker: Any, bits: int) -> None:
    most = 2 ** (bits - 1) - 1
    every = torch.cartesian_prod(*[torch.arange(-most, most + 1.0)] * 2).flatten()
    assert torch.equal(back(maker, quantize(maker, every, bits, every.numel())), every)


@MAKERS
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_block_with_a_number_that_is_not_finite_is_nan_and_no_other_is(
    maker: Any, bad: float, bits: int
) -> None:
    flat = numbers(0, 17)
    flat[7] = bad
    got, clean = (
        back(maker, quantize(maker, flat, bits, 5)),
        back(maker, quantize(maker, flat.nan_to_num(0, 0, 0), bits, 5)),
    )
    assert got.isnan().nonzero().flatten().tolist() == [5, 6, 7, 8, 9]
    assert torch.equal(got[:5], clean[:5]) and torch.equal(got[10:], clean[10:])


@MAKERS
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_the_largest_and_the_smallest_numbers_stay_finite_and_within_the_bound(
    maker: Any, dtype: torch.dtype, bits: int
) -> None:
    info = torch.finfo(dtype)
    edges = [info.max, -info.max, info.tiny, -info.tiny, info.tiny / 4, 190 * 2**-149, 0, 0]
    flat = torch.tensor(edges, dtype=torch.float64).to(dtype)
    for block in (1, 2, 8):
        whole = quantize(maker, flat, bits, block)
        got = back(maker, whole, dtype).double()
        each = whole.scales.double().repeat_interleave(block)
        assert bool(got.isfinite().all())
        assert bool(((got - flat.double()).abs() <= each / 2 * SLACK + info.eps * flat.double().abs()).all())
    zeros = quantize(maker, flat[6:], bits, 2)
    assert zeros.scales.tolist() == [0] and back(maker, zeros).tolist() == [0, 0]


@MAKERS
def test_numbers_are_written_in_any_dtype_or_added(maker: Any) -> None:
    whole = quantize(maker, numbers(3, 11), 8, 4)
    for dtype in (FP16, BF16):
        assert torch.equal(back(maker, whole, dtype), back(maker, whole).to(dtype))
    added = torch.ones(11)
    maker.dequantize_blocks(whole.payload, added, 8, 4, True)
    assert torch.equal(added, back(maker, whole) + 1)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_the_reference_makes_on_the_way_is_a_piece_at_most(bits: int) -> None:
    flat, out = numbers(0, 10_000, BF16), torch.empty(10_000, dtype=BF16)
    made = mock.Mock(wraps=reference._blocks_of)
    with mock.patch.dict(reference.PIECE, cpu=500), mock.patch.object(reference, "_blocks_of", made):
        payload = quantize(reference, flat, bits, 50).payload
        reference.dequantize_blocks(payload, out, bits, 50, False)
    assert [call.args[0].numel() for call in made.call_args_list] == [500] * 40
