"""Blocks of integers are bit for bit those of the reference, of whatever sizes and at whatever bytes."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.cases import BF16, FP16, FP32, INF, NAN, NUMBERS, SIZES, bits, normal, ops, same_everywhere
from zero_full.kernels import reference
from zero_full.kernels.reference import payload_bytes, value_bytes

WIDTHS = (4, 8)
BLOCKS = (1, 2, 3, 7, 64, 255, 256, 2048, 2**14 + 1)
GUARD = 77  # in the memory around


def room_for(numel: int, offset: int, dtype: torch.dtype = torch.uint8) -> tuple[Tensor, Tensor]:
    """A tensor that begins `offset` elements behind an aligned address, and all the memory around it."""
    room = torch.full((numel + offset + 9,), GUARD, dtype=dtype)
    return room[offset : offset + numel], room


def untouched(room: Tensor, numel: int, offset: int) -> bool:
    return bool((torch.cat([room[:offset], room[offset + numel :]]) == GUARD).all())


def quantized(numbers: Tensor, width: int, block: int, offset: int = 0) -> Tensor:
    """The payload: the reference's bytes, everywhere, and nothing else is written."""
    size = payload_bytes(len(numbers), width, block)
    want, before = torch.zeros(size, dtype=torch.uint8), numbers.clone()
    reference.quantize_blocks(numbers, want, width, block)

    def run() -> Sequence[Tensor]:
        payload, room = room_for(size, offset)
        ops().quantize_blocks(numbers, payload, width, block)
        assert untouched(room, size, offset)
        assert torch.equal(bits(numbers), bits(before))
        return [payload]

    (mine,) = same_everywhere(run)
    assert torch.equal(mine, want)
    return mine


def dequantized(payload: Tensor, before: Tensor, width: int, block: int, add: bool, offset: int) -> Tensor:
    """The numbers: exactly the reference's, everywhere, and nothing else is written."""
    want, kept = before.clone(), payload.clone()
    reference.dequantize_blocks(payload, want, width, block, add)

    def run() -> Sequence[Tensor]:
        mine, room = room_for(len(before), offset, before.dtype)
        mine.copy_(before)
        ops().dequantize_blocks(payload, mine, width, block, add)
        assert untouched(room, len(before), offset)
        assert torch.equal(payload, kept)
        return [mine]

    (mine,) = same_everywhere(run)
    torch.testing.assert_close(mine, want, rtol=0, atol=0, equal_nan=True)
    return mine


def there_and_back(numbers: Tensor, width: int, block: int, offset: int = 0) -> Tensor:
    """Written over what was there, after having been added to it."""
    payload, _ = room_for(payload_bytes(len(numbers), width, block), offset)
    payload.copy_(quantized(numbers, width, block, offset))
    before = normal(len(numbers), numbers.dtype, seed=9)
    dequantized(payload, before, width, block, True, offset)
    return dequantized(payload, before, width, block, False, offset)


def scales_of(payload: Tensor, numel: int, width: int) -> Tensor:
    return payload[value_bytes(numel, width) :].clone().view(FP32)


# Sizes and places --------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("block", [255, 256])
def test_any_number_of_numbers(numel: int, width: int, block: int) -> None:
    there_and_back(normal(numel), width, block)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("width", WIDTHS)
def test_blocks_of_any_size(block: int, width: int) -> None:
    there_and_back(normal(3 * 2**14 - 5), width, block)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_all_types_at_any_place(dtype: torch.dtype, width: int, offset: int) -> None:
    there_and_back(normal(3001, dtype, offset=offset), width, 99, offset)


@given(
    st.integers(0, 300),
    st.integers(1, 80),
    st.sampled_from(WIDTHS),
    st.integers(0, 5),
    st.sampled_from(NUMBERS),
)
def test_every_combination_of_sizes(
    numel: int, block: int, width: int, offset: int, dtype: torch.dtype
) -> None:
    there_and_back(normal(numel, dtype, offset=offset), width, block, offset)


def test_a_block_may_be_larger_than_everything() -> None:
    there_and_back(normal(1001), 4, 10**6)
    payload = torch.zeros(15, dtype=torch.uint8)
    ops().quantize_blocks(torch.full((11,), 127.0), payload, 8, 2**62)
    assert payload[:11].tolist() == [127] * 11 and scales_of(payload, 11, 8).tolist() == [1]


# Rows --------------------------------------------------------------------------------------------

LIE = {  # how rows of numbers lie in memory, and how those of payloads do
    "beside each other": lambda rows, gap: torch.zeros(*rows.shape, dtype=rows.dtype),
    "with gaps": lambda rows, gap: torch.zeros(*rows.shape[:-1], rows.shape[-1] + gap, dtype=rows.dtype)[
        ..., : rows.shape[-1]
    ],
    "the other way around": lambda rows, gap: torch.zeros(
        rows.shape[1], rows.shape[0], rows.shape[2] + gap, dtype=rows.dtype
    ).transpose(0, 1)[..., : rows.shape[-1]],
}


@pytest.mark.parametrize("lie", LIE)
@pytest.mark.parametrize("shape", [(2, 3, 1001), (1, 5, 64), (4, 1, 7), (0, 3, 9), (2, 2, 0)])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_rows_are_what_each_is_alone(
    lie: str, shape: tuple[int, int, int], width: int, dtype: torch.dtype
) -> None:
    numbers = LIE[lie](torch.empty(shape, dtype=dtype), 3)
    numbers.copy_(normal(numbers.numel(), dtype).view(shape))
    payload = torch.zeros(*shape[:2], payload_bytes(shape[2], width, 33), dtype=torch.uint8)
    for maker in (ops(), reference):
        there = LIE[lie](payload, 5)
        same_everywhere(lambda m=maker, to=there: [m.quantize_blocks(numbers, to, width, 33) or to])
        back = LIE[lie](torch.empty(shape, dtype=dtype), 1)
        same_everywhere(
            lambda m=maker, of=there, to=back: [m.dequantize_blocks(of, to, width, 33, False) or to]
        )
        for i, j in torch.cartesian_prod(*map(torch.arange, shape[:2])).tolist():
            alone, wanted = payload[i, j].clone(), torch.zeros(shape[2], dtype=dtype)
            reference.quantize_blocks(numbers[i, j], alone, width, 33)
            reference.dequantize_blocks(alone, wanted, width, 33, False)
            assert torch.equal(there[i, j], alone) and torch.equal(back[i, j], wanted)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("shape", [(3, 1001), (4, 2, 700), (1, 300)])
def test_terms_are_added_up_one_after_the_other(width: int, add: bool, shape: tuple[int, ...]) -> None:
    numbers = normal(torch.Size(shape).numel()).view(shape)
    payload = torch.zeros(*shape[:-1], payload_bytes(shape[-1], width, 50) + 9, dtype=torch.uint8)[..., :-9]
    ops().quantize_blocks(numbers, payload, width, 50)
    before = normal(numbers[0].numel(), seed=9).view(shape[1:])
    want = before.clone() if add else torch.zeros(shape[1:])
    for number, term in enumerate(payload):
        reference.dequantize_blocks(term, want, width, 50, add or number > 0)

    def run() -> Sequence[Tensor]:
        out = before.clone()
        ops().dequantize_blocks(payload, out, width, 50, add)
        return [out]

    plain = before.clone()
    reference.dequantize_blocks(payload, plain, width, 50, add)
    assert torch.equal(plain, want)
    assert torch.equal(same_everywhere(run)[0], want)
    with pytest.raises(RuntimeError, match="payloads are added up in float32 only"):
        ops().dequantize_blocks(payload, before.to(BF16), width, 50, add)


WRONG_ROWS: list[tuple[tuple[int, ...], tuple[int, ...], str]] = [
    ((2, 10), (3, 22), "2 rows of numbers, but 3 payloads"),
    ((2, 10), (22,), "numbers of 2 dimensions, but payloads of 1"),
    ((10,), (2, 2, 22), "numbers of 1 dimensions, but payloads of 3"),
    ((2, 2, 2, 10), (2, 2, 2, 22), "numbers of 4 dimensions"),
    ((2, 10), (2, 23), "10 numbers become 22 bytes, but payload has 23"),
]


@pytest.mark.parametrize(("numbers", "payload", "complaint"), WRONG_ROWS)
def test_rows_that_do_not_fit_are_refused(
    numbers: tuple[int, ...], payload: tuple[int, ...], complaint: str
) -> None:
    flat, packed = torch.zeros(numbers), torch.zeros(payload, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=complaint):
        ops().quantize_blocks(flat, packed, 8, 4)
    with pytest.raises(RuntimeError, match=complaint):
        ops().dequantize_blocks(packed, flat, 8, 4, False)


def test_rows_that_are_written_may_not_share_memory() -> None:
    numbers, payload = torch.zeros(3, 10), torch.zeros(3, 22, dtype=torch.uint8)
    for rows in (torch.zeros(10).expand(3, 10), torch.zeros(28).as_strided((3, 10), (9, 1))):
        with pytest.raises(RuntimeError, match="rows that are written share memory"):
            ops().dequantize_blocks(payload, rows, 8, 4, False)
        ops().quantize_blocks(rows, payload, 8, 4)
    with pytest.raises(RuntimeError, match="rows that are written share memory"):
        ops().quantize_blocks(numbers, torch.zeros(22, dtype=torch.uint8).expand(3, 22), 8, 4)
    for shape, strides in (((2, 3, 10), (10, 10, 1)), ((2, 3, 10), (25, 10, 1)), ((2, 3, 10), (10, 15, 1))):
        with pytest.raises(RuntimeError, match="rows that are written share memory"):
            out = torch.zeros(200).as_strided(shape, strides)
            ops().dequantize_blocks(torch.zeros(2, 3, 22, dtype=torch.uint8), out, 8, 4, False)
    with pytest.raises(RuntimeError, match="there are no payloads to add up"):
        ops().dequantize_blocks(payload[:0], torch.zeros(10), 8, 4, False)


# Numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "want"),
    [
        (8, [127, 64, -64, 0, 0, 2, 2, -127]),
        (4, [7 | 4 << 4, 12 | 0 << 4, 0 | 2 << 4, 2 | 9 << 4]),
    ],
)
def test_ties_go_to_the_even_integer_and_a_bytes_low_half_is_the_first(width: int, want: list[int]) -> None:
    most = 2 ** (width - 1) - 1
    numbers = torch.tensor([most, most // 2 + 0.5, -(most // 2) - 0.5, 0.5, -0.5, 1.5, 2.5, -most])
    payload = quantized(numbers, width, 8)
    assert payload[: len(want)].tolist() == [x % 256 for x in want]
    assert scales_of(payload, 8, width).tolist() == [1]


@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_half_way_between_two_integers_fall_as_a_true_division_says(width: int) -> None:
    most = 2 ** (width - 1) - 1
    scales = normal(500).abs() + 0.01
    steps = torch.cat([torch.tensor([most]), torch.arange(-most, most) + 0.5])
    numbers = (scales[:, None] * steps).flatten()
    quantized(numbers, width, len(steps))


@pytest.mark.parametrize("width", WIDTHS)
def test_every_byte_means_what_it_means_to_the_reference(width: int) -> None:
    numel = 256 * 8 // width
    payload = torch.cat([torch.arange(256).to(torch.uint8), torch.tensor([0.3, 1e-3]).view(torch.uint8)])
    for add in (False, True):
        dequantized(payload, normal(numel), width, numel // 2, add, 0)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_the_largest_and_the_smallest_numbers(width: int, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    edges = [info.max, -info.max, info.max / 3, info.tiny, -info.tiny, info.tiny / 4, 2.0**-149, -0.0, 0]
    numbers = torch.tensor([x for edge in edges for x in (edge, edge / 2)], dtype=torch.float64).to(dtype)
    for block in (1, 2, 3, 18):
        assert bool(there_and_back(numbers, width, block).isfinite().all())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("size", [2.0**-149, 1e-40, 1e-38, 1e-36, 1e-30, 1e30, 3e38])
def test_blocks_of_denormal_and_huge_numbers(width: int, size: float) -> None:
    there_and_back(normal(1000).clamp(-1, 1) * size, width, 64)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [35, 41, 69])
def test_a_number_that_is_not_finite_makes_its_block_nan_and_no_other(
    width: int, dtype: torch.dtype, bad: float, place: int
) -> None:
    numbers = normal(105, dtype)
    clean = there_and_back(numbers, width, 35)
    numbers[place] = bad
    got = there_and_back(numbers, width, 35)
    assert bool(got[35:70].isnan().all())
    assert torch.equal(got[:35], clean[:35]) and torch.equal(got[70:], clean[70:])


def test_nan_is_found_whatever_its_bits_are() -> None:
    for pattern in (0x7F800001, 0x7FFFFFFF, -1, -0x007FFFFF):
        numbers = torch.cat([normal(40), torch.tensor([pattern], dtype=torch.int32).view(FP32), normal(40)])
        payload = quantized(numbers, 8, 100)
        assert payload[:81].tolist() == [0] * 81 and bool(scales_of(payload, 81, 8).isnan().all())


@pytest.mark.parametrize("width", WIDTHS)
def test_blocks_of_zeros_have_the_scale_0_and_stay_zeros(width: int) -> None:
    zeros = torch.tensor([0.0, -0.0] * 20)
    assert scales_of(quantized(zeros, width, 15), 40, width).tolist() == [0, 0, 0]
    assert torch.equal(bits(there_and_back(zeros, width, 15)), bits(torch.zeros(40)))


@pytest.mark.parametrize("width", WIDTHS)
def test_no_number_is_off_by_more_than_half_a_scale(width: int) -> None:
    numbers = normal(5000) * torch.logspace(-20, 20, 5000)
    each = scales_of(quantized(numbers, width, 50), 5000, width).repeat_interleave(50)
    off = (there_and_back(numbers, width, 50) - numbers).abs()
    assert bool((off <= each / 2 * (1 + 1e-5)).all())
    assert float((off / each).max()) > 0.4


def test_what_is_added_is_rounded_once() -> None:
    numbers, out = torch.tensor([1.0, -1]), torch.tensor([256.0, 1 + 2**-7], dtype=BF16)
    payload = quantized(numbers, 8, 2)
    assert dequantized(payload, out, 8, 2, True, 0).tolist() == [256, 2**-7]


@pytest.mark.parametrize("add", [False, True])
def test_numbers_too_large_for_the_type_become_inf(add: bool) -> None:
    payload = quantized(torch.tensor([1e6, -1e6, 60000, 0]), 8, 4)
    out = dequantized(payload, torch.ones(4, dtype=FP16), 8, 4, add, 0)
    assert out.tolist() == [INF, -INF, float(out[2]), float(add)] and 5e4 < float(out[2]) < INF


# Torch and mistakes ------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_torch_finds_nothing_wrong_with_the_operators(width: int) -> None:
    ops()
    payload = torch.zeros(payload_bytes(21, width, 8), dtype=torch.uint8)
    there, back = torch.ops.zero_full.quantize_blocks, torch.ops.zero_full.dequantize_blocks
    torch.library.opcheck(there, (normal(21, BF16), payload, width, 8))
    torch.library.opcheck(back, (payload, normal(21), width, 8, True))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"bits": 3}, "3 bits in blocks of 4: bits are 4 or 8, and a block has a number or more"),
    ({"block": 0}, "8 bits in blocks of 0: bits are 4 or 8"),
    ({"payload": torch.zeros(21, dtype=torch.uint8)}, "10 numbers become 22 bytes, but payload has 21"),
    ({"payload": torch.zeros(22, dtype=torch.int8)}, "payload must be uint8"),
    ({"payload": torch.zeros(44, dtype=torch.uint8)[::2]}, "must be contiguous"),
]
WRONG_NUMBERS = [
    (torch.zeros(10, dtype=torch.float64), "must be float32, bfloat16 or float16"),
    (torch.zeros(20)[::2], "must be contiguous"),
]


@pytest.mark.parametrize(
    ("changes", "complaint"), [*REFUSED, *(({"numbers": x}, words) for x, words in WRONG_NUMBERS)]
)
def test_what_cannot_be_quantized_is_refused(changes: dict[str, Any], complaint: str) -> None:
    right = {"numbers": torch.zeros(10), "payload": torch.zeros(22, dtype=torch.uint8), "bits": 8, "block": 4}
    with pytest.raises(RuntimeError, match=complaint):
        ops().quantize_blocks(**{**right, **changes})


@pytest.mark.parametrize(
    ("changes", "complaint"), [*REFUSED, *(({"out": x}, words) for x, words in WRONG_NUMBERS)]
)
def test_what_cannot_be_dequantized_is_refused(changes: dict[str, Any], complaint: str) -> None:
    payload = torch.zeros(22, dtype=torch.uint8)
    right = {"payload": payload, "out": torch.zeros(10), "bits": 8, "block": 4, "add": False}
    with pytest.raises(RuntimeError, match=complaint):
        ops().dequantize_blocks(**{**right, **changes})
