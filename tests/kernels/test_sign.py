"""Signs with error feedback are those of the reference, wherever pieces end and tensors begin."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.cases import BF16, FP16, FP32, INF, NAN, NUMBERS, SIZES, bits, normal, ops, same_everywhere
from zero_full.kernels import reference

GRAIN = 2**14  # what one thread adds up at a time
GUARD = 7.0
ULP = 1.2e-7  # two fp64 sums that round to neighbouring fp32 numbers


def ends_of(*sizes: int) -> Tensor:
    return torch.tensor(list(accumulate(sizes)), dtype=torch.int64)


def cut(numel: int) -> Tensor:
    """Pieces of uneven sizes, some empty, that leave a little padding."""
    thirds = numel // 3
    return ends_of(0, thirds, 0, min(1, numel - thirds), max(0, numel - thirds - 6))


def spread(scales: Tensor, ends: Tensor, numel: int) -> Tensor:
    """Every element's scale."""
    each = torch.zeros(numel)
    for (a, b), scale in zip(pairwise([0, *ends.tolist()]), scales, strict=True):
        each[a:b] = scale
    return each


def signs_of(packed: Tensor, numel: int) -> Tensor:
    flags = [byte >> place & 1 for byte in packed.tolist() for place in range(8)]
    return torch.tensor(flags[:numel], dtype=FP32) * 2 - 1


def guarded(numel: int, dtype: torch.dtype, offset: int) -> tuple[Tensor, Tensor]:
    """A tensor that begins `offset` elements behind an aligned address, and all the memory around it."""
    room = torch.full((numel + offset + 9,), GUARD, dtype=dtype)
    return room[offset : offset + numel], room


def untouched(room: Tensor, numel: int, offset: int) -> bool:
    return bool((torch.cat([room[:offset], room[offset + numel :]]) == GUARD).all())


def pack(
    values: Tensor | None, error: Tensor, ends: Tensor, l1: bool, offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Bits, scales and new errors: the same bits everywhere, and nothing else is written."""

    def run() -> Sequence[Tensor]:
        mine, room = guarded(len(error), FP32, offset)
        mine.copy_(error)
        before = None if values is None else values.clone()
        found = ops().sign_pack(values, mine, ends, l1)
        assert untouched(room, len(error), offset)
        if values is not None and before is not None:
            assert torch.equal(bits(values), bits(before))
        return *found, mine

    packed, scales, left = same_everywhere(run)
    return packed, scales, left


def check_pack(values: Tensor | None, error: Tensor, ends: Tensor, l1: bool = True, offset: int = 0) -> None:
    """Bits exactly, scales to an ulp, and exactly the error that these scales leave."""
    want = reference.sign_pack(values, error.clone(), ends, l1)
    packed, scales, left = pack(values, error, ends, l1, offset)
    assert torch.equal(packed, want[0])
    torch.testing.assert_close(scales, want[1], rtol=ULP, atol=0, equal_nan=True)
    wanted = error if values is None else values.float() + error
    wrong = wanted - spread(scales, ends, len(error)) * signs_of(packed, len(error))
    torch.testing.assert_close(left, wrong, rtol=0, atol=0, equal_nan=True)


# Packing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_signs_of_any_number_of_elements_at_any_place(numel: int, offset: int) -> None:
    check_pack(normal(numel, offset=offset), normal(numel, seed=1), cut(numel), offset=offset)


@pytest.mark.parametrize("dtype", [None, *NUMBERS])
@pytest.mark.parametrize("l1", [True, False])
def test_all_types_with_either_scale(dtype: torch.dtype | None, l1: bool) -> None:
    values = None if dtype is None else normal(3001, dtype, offset=1)
    check_pack(values, normal(3001, seed=1), cut(3001), l1, offset=1)


def test_a_scale_is_the_mean_size_or_the_root_mean_square_and_0_for_an_empty_piece() -> None:
    error = torch.tensor([3.0, -4.0, 12.0, -5.0, 100.0])
    ends = ends_of(2, 0, 2)
    assert pack(None, error, ends, True, 0)[1].tolist() == [3.5, 0, 8.5]
    root = torch.tensor([12.5, 0, 84.5]).sqrt()
    assert torch.equal(pack(None, error, ends, False, 0)[1], root)


def test_the_first_number_has_the_lowest_bit_and_zeros_of_either_sign_are_plus() -> None:
    error = torch.tensor([-1.0, 0.0, -0.0, 1, -1, -1, -1, -1, 1, -1])
    packed, _, left = pack(None, error, ends_of(10), True, 0)
    assert packed.tolist() == [0b00001110, 0b01]
    assert left.tolist()[:3] == pytest.approx([-0.2, -0.8, -0.8])


def test_padding_keeps_its_error_and_has_bits() -> None:
    values, error = normal(100), normal(100, seed=1)
    packed, _, left = pack(values, error, ends_of(50, 3), True, 0)
    wanted = values + error
    assert torch.equal(left[53:], wanted[53:])
    assert torch.equal(signs_of(packed, 100), (wanted >= 0).float() * 2 - 1)


@pytest.mark.parametrize("l1", [True, False])
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-30, 1e19, 1e38])
def test_denormal_and_huge_numbers_have_their_scales(size: float, l1: bool) -> None:
    error = normal(1000) * size
    check_pack(None, error, cut(1000), l1)
    scale = pack(None, torch.full((999,), size), ends_of(999), l1, 0)[1]
    torch.testing.assert_close(scale, torch.tensor([size]), rtol=ULP, atol=0)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("l1", [True, False])
def test_a_number_that_is_not_finite_spoils_its_piece_and_no_other(bad: float, l1: bool) -> None:
    values, ends = normal(1001), ends_of(333, 333, 335)
    values[400] = bad
    check_pack(values, normal(1001, seed=1), ends, l1)
    _, scales, left = pack(values, normal(1001, seed=1), ends, l1, 0)
    assert scales.isfinite().tolist() == [True, False, True]
    assert bool(left[:333].isfinite().all()) and bool(left[666:].isfinite().all())


def test_a_long_sum_of_small_numbers_loses_none_of_them() -> None:
    error = torch.full((40 * GRAIN + 1,), 0.1)
    error[0] = 1e6
    exact = error.double().sum() / len(error)
    scales = pack(None, error, ends_of(len(error)), True, 0)[1]
    assert float(scales[0]) == pytest.approx(float(exact), rel=ULP)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30),
    st.integers(0, 20),
    st.integers(0, 3),
    st.booleans(),
)
def test_pieces_may_end_anywhere(sizes: list[int], padding: int, offset: int, l1: bool) -> None:
    numel = sum(sizes) + padding
    check_pack(normal(numel, BF16, offset=offset), normal(numel, seed=1), ends_of(*sizes), l1, offset)


@pytest.mark.parametrize("first", [GRAIN - 9, GRAIN - 1, GRAIN, GRAIN + 1, 2 * GRAIN + 3])
def test_pieces_may_end_near_where_a_thread_ends(first: int) -> None:
    ends = ends_of(first, 5, 2, 2 * GRAIN)
    check_pack(normal(5 * GRAIN), normal(5 * GRAIN, seed=1), ends)


# Unpacking ---------------------------------------------------------------------------------------


def check_mean(
    numel: int, ends: Tensor, rows: int, dtype: torch.dtype = FP32, add: bool = False, offset: int = 0
) -> None:
    """Exactly the reference's numbers, and nothing else is written."""
    generator = torch.Generator().manual_seed(rows)
    packed = torch.randint(0, 256, (rows, -(-numel // 8)), generator=generator).to(torch.uint8)
    scales = torch.rand(rows, len(ends), generator=generator)
    before = normal(numel, dtype, seed=2)
    want = before.clone()
    reference.sign_unpack_mean(packed, scales, ends, want, add)

    def run() -> Sequence[Tensor]:
        mine, room = guarded(numel, dtype, offset)
        mine.copy_(before)
        ops().sign_unpack_mean(packed, scales, ends, mine, add)
        assert untouched(room, numel, offset)
        return [mine]

    (mine,) = same_everywhere(run)
    assert torch.equal(mine, want)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_means_of_any_number_of_elements_at_any_place(numel: int, offset: int) -> None:
    check_mean(numel, cut(numel), rows=2, offset=offset)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_means_of_any_number_of_rows_are_written_or_added_in_any_type(
    dtype: torch.dtype, add: bool, rows: int
) -> None:
    check_mean(3001, cut(3001), rows, dtype, add, offset=1)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30),
    st.integers(0, 20),
    st.integers(1, 4),
    st.booleans(),
)
def test_means_where_pieces_end_anywhere(sizes: list[int], padding: int, rows: int, add: bool) -> None:
    check_mean(sum(sizes) + padding, ends_of(*sizes), rows, add=add)


@pytest.mark.parametrize("first", [GRAIN - 1, GRAIN + 1])
def test_means_where_pieces_end_near_where_a_thread_ends(first: int) -> None:
    check_mean(5 * GRAIN, ends_of(first, 5, 2, 2 * GRAIN), rows=3)


@pytest.mark.parametrize(("add", "padding"), [(False, 0.0), (True, GUARD)])
def test_padding_becomes_0_or_stays(add: bool, padding: float) -> None:
    out = torch.full((20,), GUARD)
    ops().sign_unpack_mean(torch.zeros(2, 3, dtype=torch.uint8), torch.ones(2, 2), ends_of(5, 4), out, add)
    assert out.tolist() == [(GUARD if add else 0) - 1] * 9 + [padding] * 11


@pytest.mark.parametrize("dtype", NUMBERS)
def test_a_scale_that_is_not_finite_spoils_its_piece_and_no_other(dtype: torch.dtype) -> None:
    out = torch.zeros(27, dtype=dtype)
    scales = torch.tensor([[1.0, NAN, 1], [1.0, 1, INF]])
    packed = torch.full((2, 4), 255, dtype=torch.uint8)
    ops().sign_unpack_mean(packed, scales, ends_of(9, 9, 9), out, False)
    assert out[:9].tolist() == [1.0] * 9
    assert bool(out[9:18].isnan().all()) and bool((out[18:] == INF).all())


# All of it ---------------------------------------------------------------------------------------

RANKS, ROUNDS, PART = 3, 12, 44  # numbers that a rank serves
NUMEL = RANKS * PART
LAYOUT = [(0, 50), (50, 119), (119, 130)]  # tensors, and two numbers of padding


def rounds() -> list[list[Tensor]]:
    """For each round what the ranks want to have averaged: a drift and noise."""
    drift = normal(NUMEL, seed=1000)
    drift[130:] = 0
    each = [[drift + normal(NUMEL, seed=RANKS * i + rank) for rank in range(RANKS)] for i in range(ROUNDS)]
    for inputs in each:
        for values in inputs:
            values[130:] = 0
    return each


def served_ends(rank: int) -> Tensor:
    """Where the tensors end in what `rank` serves."""
    return torch.tensor([min(max(b - rank * PART, 0), PART) for _, b in LAYOUT])


def mean_by_operators(inputs: list[Tensor], errors: list[Tensor], served: list[Tensor]) -> Tensor:
    """A compressed all-reduce: everyone packs, owners average and pack again, everyone unpacks."""
    ends, out = torch.tensor([b for _, b in LAYOUT]), torch.full((NUMEL,), GUARD)
    sent = []
    for values, error in zip(inputs, errors, strict=True):
        packed, scales = ops().sign_pack(values, error, ends, True)
        sent.append((signs_of(packed, NUMEL), scales))
    for rank in range(RANKS):
        low, high = rank * PART, (rank + 1) * PART
        rows = torch.stack([bytes_of(signs[low:high]) for signs, _ in sent])
        cuts, scales = served_ends(rank), torch.stack([scales for _, scales in sent])
        ops().sign_unpack_mean(rows, scales, cuts, served[rank], True)
        packed, scale = ops().sign_pack(None, served[rank], cuts, True)
        ops().sign_unpack_mean(packed[None], scale[None], cuts, out[low:high], False)
    return out


def bytes_of(signs: Tensor) -> Tensor:
    flags = torch.nn.functional.pad((signs > 0).int(), (0, -len(signs) % 8)).view(-1, 8)
    return (flags << torch.arange(8)).sum(1).to(torch.uint8)


def rounded_by_hand(wanted: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """In fp64: scale times sign, and what is wrong with it; `start` is where in all numbers this is."""
    said = torch.zeros_like(wanted)
    for a, b in LAYOUT:
        low, high = max(a - start, 0), min(b - start, len(wanted))
        if low < high:
            piece = wanted[low:high]
            said[low:high] = piece.abs().mean() * ((piece >= 0).double() * 2 - 1)
    return said, wanted - said


def mean_by_hand(inputs: list[Tensor], errors: list[Tensor], served: list[Tensor]) -> Tensor:
    """The same in fp64, as it is written down in the paper."""
    total = torch.zeros(NUMEL, dtype=torch.float64)
    for rank, values in enumerate(inputs):
        said, errors[rank] = rounded_by_hand(values.double() + errors[rank], 0)
        total += said / RANKS
    out = []
    for rank in range(RANKS):
        part = total[rank * PART : (rank + 1) * PART]
        said, served[rank] = rounded_by_hand(part + served[rank], rank * PART)
        out.append(said)
    return torch.cat(out)


def states(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    errors = [torch.zeros(NUMEL, dtype=dtype) for _ in range(RANKS)]
    return errors, [torch.zeros(PART, dtype=dtype) for _ in range(RANKS)]


def test_a_compressed_mean_is_the_one_by_hand_round_after_round() -> None:
    mine, hand = states(FP32), states(torch.float64)
    for inputs in rounds():
        got, want = mean_by_operators(inputs, *mine), mean_by_hand(inputs, *hand)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip([*mine[0], *mine[1]], [*hand[0], *hand[1]], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


def test_what_came_out_so_far_follows_what_went_in_but_for_the_errors_kept() -> None:
    errors, served = states(FP32)
    went_in, came_out = torch.zeros(2, NUMEL, dtype=torch.float64)
    far = []
    for inputs in rounds():
        went_in += torch.stack(inputs).double().mean(0)
        came_out += mean_by_operators(inputs, errors, served).double()
        kept = torch.stack(errors).double().mean(0) + torch.cat(served).double()
        torch.testing.assert_close(came_out + kept, went_in, rtol=1e-5, atol=1e-5)
        far.append(float((came_out - went_in).norm() / went_in.norm()))
    assert far[-1] < 0.5 * far[0], far


# Torch and mistakes ------------------------------------------------------------------------------


def test_torch_finds_nothing_wrong_with_the_operators() -> None:
    ends, out = ends_of(5, 4), torch.zeros(11)
    both = ops()
    torch.library.opcheck(torch.ops.zero_full.sign_pack, (normal(11, BF16), normal(11), ends, True))
    torch.library.opcheck(torch.ops.zero_full.sign_pack, (None, normal(11), ends, False))
    packed, scales = both.sign_pack(None, normal(11), ends, True)
    torch.library.opcheck(torch.ops.zero_full.sign_unpack_mean, (packed[None], scales[None], ends, out, True))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"values": torch.zeros(9)}, "9 values, but 10 errors"),
        ({"values": torch.zeros(10, dtype=torch.float64)}, "values must be float32, bfloat16 or float16"),
        ({"values": torch.zeros(20)[::2]}, "values must be contiguous"),
        ({"error": torch.zeros(10, dtype=BF16)}, "error must be float32"),
        ({"error": torch.zeros(20)[::2]}, "error must be contiguous"),
        ({"ends": torch.tensor([10], dtype=torch.int32)}, "ends must be int64"),
    ],
)
def test_what_cannot_be_packed_is_refused(changes: dict[str, Any], complaint: str) -> None:
    right = {"values": torch.zeros(10), "error": torch.zeros(10), "ends": ends_of(10), "l1": True}
    with pytest.raises(RuntimeError, match=complaint):
        ops().sign_pack(**{**right, **changes})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"packed": torch.zeros(2, 2, dtype=torch.int8)}, "packed must be uint8"),
        ({"packed": torch.zeros(2, 3, dtype=torch.uint8)}, "packed must have a row or more of 2 bytes"),
        ({"packed": torch.zeros(3, 2, dtype=torch.uint8)}, "and scales as many of 1 numbers"),
        ({"packed": torch.zeros(0, 2, dtype=torch.uint8), "scales": torch.zeros(0, 1)}, "a row or more"),
        ({"scales": torch.zeros(2, 1, dtype=FP16)}, "scales must be float32"),
        ({"scales": torch.zeros(2, 2)}, "and scales as many of 1 numbers"),
        ({"ends": torch.tensor([10.0])}, "ends must be int64"),
        ({"out": torch.zeros(20)[::2]}, "must be contiguous"),
        ({"out": torch.zeros(10, dtype=torch.int64)}, "out must be float32, bfloat16 or float16"),
    ],
)
def test_what_cannot_be_unpacked_is_refused(changes: dict[str, Any], complaint: str) -> None:
    right = {
        "packed": torch.zeros(2, 2, dtype=torch.uint8),
        "scales": torch.zeros(2, 1),
        "ends": ends_of(10),
        "out": torch.zeros(10),
        "add": False,
    }
    with pytest.raises(RuntimeError, match=complaint):
        ops().sign_unpack_mean(**{**right, **changes})
