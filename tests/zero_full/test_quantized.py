"""Integers on the wire: how far off, the same bits everywhere, and not a byte more than is said."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.worlds import POOL, RankError
from zero_full.comm import Communicator, Topology, quantized
from zero_full.comm.quantized import Nodes, Quantized, QuantizedGather, TwoHopReduce, dequantize, quantize
from zero_full.comm.transport import Exchange, own_slice

CPU = torch.device("cpu")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
SLACK = 1 + 1e-4  # what fp32 adds to half a scale
NAN, INF = float("nan"), float("inf")
BITS, DTYPES = st.sampled_from([4, 8]), st.sampled_from([FP32, FP16, BF16])


def numbers(seed: int, numel: int, dtype: torch.dtype = FP32, spread: float = 0) -> Tensor:
    """Normal numbers, times up to e**spread."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(numel, generator=generator).mul(spread).exp()
    return (torch.randn(numel, generator=generator) * sizes).to(dtype)


def back(whole: Quantized, dtype: torch.dtype = FP32) -> Tensor:
    return dequantize(whole, torch.full((whole.numel,), 7.0, dtype=dtype))


def scale_of_each(flat: Tensor, bits: int, block: int) -> Tensor:
    """In fp64, one a number."""
    reaches = [part.double().abs().max().expand(part.numel()) for part in flat.split(block) if part.numel()]
    return torch.cat([*reaches, torch.empty(0)]).double() / (2 ** (bits - 1) - 1)


# Rounding ----------------------------------------------------------------------------------------


@given(st.integers(0, 150), BITS, st.integers(1, 70), DTYPES, st.floats(0, 8), st.integers(0, 10**6))
def test_no_number_is_off_by_more_than_half_a_scale(
    numel: int, bits: int, block: int, dtype: torch.dtype, spread: float, seed: int
) -> None:
    flat = numbers(seed, numel, dtype, spread)
    whole = quantize(flat, bits, block)
    scales = scale_of_each(flat, bits, block)
    assert whole.payload.numel() == -(-numel * bits // 8) + 4 * -(-numel // block)
    torch.testing.assert_close(whole.scales.double(), scales[::block], rtol=1e-6, atol=0)
    assert bool(((back(whole) - flat).abs().double() <= scales / 2 * SLACK).all())
    with mock.patch.dict(quantized.PIECE, cpu=20):
        cut = quantize(flat, bits, block)
        assert torch.equal(cut.payload, whole.payload) and torch.equal(back(cut), back(whole))


@pytest.mark.parametrize("bits, want", [(8, [127, -127, 18, 9, 0]), (4, [7 | (-7 & 15) << 4, 1 | 1 << 4, 0])])
def test_the_bytes_are_the_integers_and_then_the_scale(bits: int, want: list[int]) -> None:
    whole = quantize(torch.tensor([7.0, -7.0, 1.0, 0.51, 0.0]), bits, 5)
    assert whole.values.tolist() == [x - 256 if x > 127 else x for x in want]
    assert whole.payload[-4:].clone().view(FP32).item() == torch.tensor(7 / (2 ** (bits - 1) - 1)).item()


@pytest.mark.parametrize("bits", [4, 8])
def test_every_integer_comes_back_from_its_byte(bits: int) -> None:
    most = 2 ** (bits - 1) - 1
    every = torch.cartesian_prod(*[torch.arange(-most, most + 1.0)] * 2).flatten()
    assert torch.equal(back(quantize(every, bits, every.numel())), every)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_block_with_a_number_that_is_not_finite_is_nan_and_no_other_is(bad: float, bits: int) -> None:
    flat = numbers(0, 17)
    flat[7] = bad
    got, clean = back(quantize(flat, bits, 5)), back(quantize(flat.nan_to_num(0, 0, 0), bits, 5))
    assert got.isnan().nonzero().flatten().tolist() == [5, 6, 7, 8, 9]
    assert torch.equal(got[:5], clean[:5]) and torch.equal(got[10:], clean[10:])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_the_largest_and_the_smallest_numbers_stay_finite_and_within_the_bound(
    dtype: torch.dtype, bits: int
) -> None:
    info = torch.finfo(dtype)
    edges = [info.max, -info.max, info.tiny, -info.tiny, info.tiny / 4, 190 * 2**-149, 0, 0]
    flat = torch.tensor(edges, dtype=torch.float64).to(dtype)
    for block in (1, 2, 8):
        whole = quantize(flat, bits, block)
        got = back(whole, dtype).double()
        each = whole.scales.double().repeat_interleave(block)
        assert bool(got.isfinite().all())
        assert bool(((got - flat.double()).abs() <= each / 2 * SLACK + info.eps * flat.double().abs()).all())
    zeros = quantize(flat[6:], bits, 2)
    assert zeros.scales.tolist() == [0] and back(zeros).tolist() == [0, 0]


def test_numbers_are_written_in_any_dtype_or_added() -> None:
    whole = quantize(numbers(3, 11), 8, 4)
    for dtype in (FP16, BF16):
        assert torch.equal(back(whole, dtype), back(whole).to(dtype))
    assert torch.equal(dequantize(whole, torch.ones(11), add=True), back(whole) + 1)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_made_on_the_way_is_a_piece_at_most(bits: int) -> None:
    flat, out = numbers(0, 10_000, BF16), torch.empty(10_000, dtype=BF16)
    made = mock.Mock(wraps=quantized._in_rows)
    with mock.patch.dict(quantized.PIECE, cpu=500), mock.patch.object(quantized, "_in_rows", made):
        dequantize(quantize(flat, bits, 50), out)
    assert [call.args[0].numel() for call in made.call_args_list] == [500] * 40


@pytest.mark.parametrize("bits, block", [(3, 8), (8, 0)])
def test_what_cannot_be_is_refused(bits: int, block: int) -> None:
    with pytest.raises(ValueError, match="bits are 4 or 8, and a block has a number or more"):
        quantize(torch.ones(3), bits, block)


# Gathers -----------------------------------------------------------------------------------------


class Case(NamedTuple):
    part: int  # numbers a rank
    dtype: torch.dtype = FP32
    bits: int = 8
    block: int = 16
    locals: int = 1  # ranks on a node


def bytes_of(case: Case) -> int:
    return -(-case.part * case.bits // 8) + 4 * -(-case.part // case.block)


CASES = [
    *(Case(part, dtype, bits) for part in (0, 1, 37) for dtype in (FP32, FP16, BF16) for bits in (4, 8)),
    Case(33, block=5),
    Case(33, bits=4, block=5),
]
ON_NODES = [*CASES, *(case._replace(locals=inner) for case in CASES for inner in (2, 4))]


def nodes_of(inner: int) -> Nodes:
    """`inner` neighbours are on a node; each communicator counts for itself."""
    topology = Topology().with_sub_groups(inner)
    return Nodes(Communicator(topology.shard, CPU), Communicator(topology.replicate, CPU))


def everyones(case: Case, world: int, seed: int = 0) -> list[Tensor]:
    return [numbers(100 * seed + rank, case.part, case.dtype) for rank in range(world)]


def gathered(comm: Any, cases: list[Case]) -> list[tuple[Tensor, int, int]]:
    """The whole, and the bytes sent in the node and across."""
    results = []
    world = Communicator(dist.group.WORLD, CPU)
    for case in cases:
        nodes = Nodes.flat(world) if case.locals == 1 else nodes_of(case.locals)
        nodes.outer.traffic.clear()
        whole = torch.full((nodes.size * case.part,), 7.0, dtype=case.dtype)
        own_slice(whole, nodes.rank, nodes.size).copy_(everyones(case, nodes.size)[nodes.rank])
        QuantizedGather(nodes, case.bits, case.block).all_gather(whole, "weights")
        results.append((whole, nodes.inner.traffic.total(), nodes.outer.traffic.total()))
    return results


@cache
def gathers(world: int) -> list[list[tuple[Tensor, int, int]]]:
    return POOL.run(gathered, world, ON_NODES if world == 4 else CASES)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_get_the_same_bits_also_of_their_own_slice_for_the_bytes_of_a_payload(world: int) -> None:
    for results in gathers(world):
        for case, (whole, inside, across) in zip(ON_NODES, results, strict=False):
            exact = everyones(case, world)
            rounded = [back(quantize(x, case.bits, case.block), case.dtype) for x in exact]
            assert torch.equal(whole, torch.cat(rounded if world > 1 else exact)), case
            payload, nodes = bytes_of(case), world // case.locals
            assert across == (nodes - 1) * payload  # flat: every rank is a node
            assert inside == (case.locals - 1) * nodes * payload


def poisoned(comm: Any) -> list[bool]:
    nodes = nodes_of(1)
    whole = torch.ones(nodes.size * 6, dtype=BF16)
    if comm.rank == 1:
        whole[6] = INF
    QuantizedGather(nodes, block=3).all_gather(whole, "weights")
    return whole.isnan().tolist()


def test_everyone_sees_that_one_rank_has_an_inf() -> None:
    want = [False] * 6 + [True] * 3 + [False] * 9
    assert POOL.run(poisoned, 3) == [want] * 3


# Reductions --------------------------------------------------------------------------------------

SHAPES = [(1, 1), (1, 3), (3, 1), (2, 2)]  # nodes, ranks on each
FOUR_BITS = [Case(0), Case(1), Case(37), Case(37, BF16), Case(64, FP16, block=64), Case(33, FP16, block=5)]
REDUCTIONS = [*(case._replace(bits=4) for case in FOUR_BITS), Case(33)]
DIVISOR = 3.0


def gradients(case: Case, rank: int, world: int) -> Tensor:
    return numbers(50 + rank, world * case.part, case.dtype)


def reduced(comm: Any, inner: int) -> list[tuple[Tensor, Tensor, int, int]]:
    """This rank's sum, the same written into the whole, and the bytes sent in the node and across."""
    results = []
    nodes = nodes_of(inner)
    for case in REDUCTIONS:
        nodes.inner.traffic.clear()
        nodes.outer.traffic.clear()
        reduce = TwoHopReduce(nodes, case.bits, case.block)
        whole, out = gradients(case, nodes.rank, nodes.size), torch.full((case.part,), 7.0)
        reduce.reduce_scatter(whole, out, DIVISOR, "gradients")
        sent = nodes.inner.traffic.total(), nodes.outer.traffic.total()
        inside = own_slice(whole, nodes.rank, nodes.size)
        reduce.reduce_scatter(whole, inside, DIVISOR, "gradients")
        results.append((out, inside.clone(), *sent))
    return results


@cache
def reductions(shape: tuple[int, int]) -> list[list[tuple[Tensor, Tensor, int, int]]]:
    return POOL.run(reduced, shape[0] * shape[1], shape[1])


def exact_and_bound(case: Case, shape: tuple[int, int], rank: int) -> tuple[Tensor, Tensor]:
    """The sum for this rank in fp64, and half of every scale that was used on its way."""
    world = shape[0] * shape[1]
    slices = [own_slice(gradients(case, r, world), rank, world) for r in range(world)]
    exact, bound = torch.zeros(2, case.part, dtype=torch.float64)
    for node in range(shape[0]):
        members = range(node * shape[1], (node + 1) * shape[1])
        total = torch.stack([slices[r].double() for r in members]).sum(0)
        halves = [scale_of_each(slices[r], case.bits, case.block) / 2 for r in members]
        halves[rank % shape[1]].zero_()  # the one who sums has it exactly
        first = torch.stack(halves).sum(0)
        again = scale_of_each(total.abs() + first, case.bits, case.block) / 2
        exact, bound = exact + total, bound + first + (again if rank not in members else 0)
    return exact / DIVISOR, bound / DIVISOR


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_off_by_no_more_than_half_of_each_scale_used(shape: tuple[int, int]) -> None:
    for rank, results in enumerate(reductions(shape)):
        for case, (out, inside, _, _) in zip(REDUCTIONS, results, strict=True):
            exact, bound = exact_and_bound(case, shape, rank)
            off = (out.double() - exact).abs()
            assert bool((off <= bound * SLACK + 1e-6).all()), (case, float(off.max()))
            assert torch.equal(inside, out.to(case.dtype))
            if case.part > 1:  # neither empty nor wide enough for anything
                assert float(off.max()) > 0 and bool((bound < 1.0).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_bound_tells_a_wrong_slice_or_a_missing_rank(shape: tuple[int, int]) -> None:
    world, case = shape[0] * shape[1], REDUCTIONS[2]
    outs = [results[2][0].double() for results in reductions(shape)]
    for rank, out in enumerate(outs):
        exact, bound = exact_and_bound(case, shape, rank)
        others = [x for r, x in enumerate(outs) if r != rank]
        parts = [own_slice(gradients(case, r, world), rank, world) / DIVISOR for r in range(world)]
        for wrong in [*others, *(out - part for part in parts), out * DIVISOR]:
            assert bool(((wrong - exact).abs() > bound * SLACK + 1e-6).any())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_reduction_sends_a_payload_to_each_other_rank_of_a_hop(shape: tuple[int, int]) -> None:
    nodes, inner = shape
    for results in reductions(shape):
        for case, (_, _, inside, across) in zip(REDUCTIONS, results, strict=True):
            payload = bytes_of(case)
            assert (inside, across) == ((inner - 1) * nodes * payload, (nodes - 1) * payload)


def one_bad_gradient(comm: Any) -> list[bool]:
    nodes = nodes_of(2)
    whole, out = torch.ones(nodes.size * 6, dtype=FP16), torch.empty(6)
    if comm.rank == 0:
        whole[3 * 6] = NAN  # rank 3's: on the other node, and another number there
    TwoHopReduce(nodes, block=3).reduce_scatter(whole, out, 4, "gradients")
    return out.isnan().tolist()


def test_a_nan_passes_both_hops_to_the_rank_whose_slice_it_is_in() -> None:
    assert POOL.run(one_bad_gradient, 4) == [[False] * 6] * 3 + [[True] * 3 + [False] * 3]


# What crosses between nodes ----------------------------------------------------------------------

PART, BLOCK = 1000, 256  # numbers a rank; the last block is not full
NODES, INNER = 2, 2


@contextmanager
def watched() -> Iterator[Counter[int]]:
    """Bytes by the rank they go to, seen where torch is asked to send them."""
    sent: Counter[int] = Counter()
    swap, exchange = dist.batch_isend_irecv, dist.all_to_all_single

    def seen_swap(ops: list[Any]) -> Any:
        for op in ops:
            sent[op.peer] += op.tensor.nbytes if op.op is dist.isend else 0
        return swap(ops)

    def seen_exchange(received: Tensor, tensor: Tensor, group: Any) -> Any:
        for rank in dist.get_process_group_ranks(group):
            sent[rank] += tensor.nbytes // group.size()
        return exchange(received, tensor, group=group)

    with (
        mock.patch.object(dist, "batch_isend_irecv", seen_swap),
        mock.patch.object(dist, "all_to_all_single", seen_exchange),
    ):
        yield sent


def crossing(comm: Any) -> dict[str, tuple[int, int]]:
    """By what is done in a step of ZeRO-3: bytes this rank counts across, and bytes seen to go there."""
    nodes = nodes_of(INNER)
    world = Nodes.flat(Communicator(dist.group.WORLD, CPU))
    for by in (nodes.inner, nodes.outer, world.outer):
        assert by.group is not None
        by.transport = Exchange(by.group)
    whole, out = torch.ones(nodes.size * PART, dtype=BF16), torch.empty(PART)
    column = nodes.inner.own(whole)
    calls = {
        "forward": lambda: QuantizedGather(nodes, block=BLOCK).all_gather(whole, "weights"),
        "backward": lambda: nodes.inner.all_gather(whole, "weights kept in the node"),
        "gradients": lambda: TwoHopReduce(nodes, block=BLOCK).reduce_scatter(whole, out, 4, "gradients"),
        "16-bit gather": lambda: nodes.outer.all_gather(column, "weights"),
        "16-bit gradients": lambda: nodes.outer.reduce_scatter(column, out, 1, "gradients"),
        "flat": lambda: QuantizedGather(world, block=BLOCK).all_gather(whole, "weights"),
    }
    results = {}
    for name, call in calls.items():
        nodes.outer.traffic.clear()
        with watched() as sent:
            call()
        across = sum(n for rank, n in sent.items() if rank // INNER != comm.rank // INNER)
        results[name] = nodes.outer.traffic.total(), across
    return results


@cache
def crossings() -> list[dict[str, tuple[int, int]]]:
    return POOL.run(crossing, NODES * INNER)


def test_what_is_counted_is_what_is_seen_to_cross() -> None:
    for results in crossings():
        assert all(counted == seen for name, (counted, seen) in results.items() if name != "flat"), results
        assert results["flat"][1] == INNER * results["forward"][1]  # to every rank of the other node


def test_a_node_sends_a_quarter_of_what_sixteen_bits_take_and_the_scales() -> None:
    for node in range(NODES):
        ranks = crossings()[node * INNER : (node + 1) * INNER]
        seen = {name: sum(results[name][1] for results in ranks) for name in ranks[0]}
        unit = 2 * NODES * INNER * PART * (NODES - 1) // NODES  # "M" of the paper, in bytes
        scales = 4 * -(-PART // BLOCK) * (NODES - 1) * INNER
        assert seen["16-bit gather"] == seen["16-bit gradients"] == unit
        step = seen["forward"], seen["backward"], seen["gradients"]
        assert step == (unit // 2 + scales, 0, unit // 4 + scales)
        assert sum(step) == (2 * seen["16-bit gather"] + seen["16-bit gradients"]) // 4 + 2 * scales


# Errors ------------------------------------------------------------------------------------------


def of_two_sizes(comm: Any) -> None:
    world = Communicator(dist.group.WORLD, CPU, check_timeout_s=10)
    sent = torch.zeros(2 * (1 + comm.rank), dtype=torch.uint8)
    world.all_to_all(sent, torch.empty_like(sent), "gradients")


def test_ranks_that_exchange_different_sizes_are_told_so() -> None:
    with pytest.raises(RankError, match=r"DesyncError.*\n.*rank 0: all_to_all of gradients: 2 x uint8"):
        POOL.run(of_two_sizes, 2)


def test_a_rank_that_is_alone_exchanges_with_itself() -> None:
    sent, received = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    (alone := Communicator(None, CPU)).all_to_all(sent, received, "a")
    assert received.tolist() == [0, 1, 2] and alone.traffic.total() == 0
