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
from torch import Tensor

from tests.kernels.integers import SLACK, back, numbers, quantize, scale_of_each
from tests.worlds import POOL, RankError
from zero_full.comm import quantized
from zero_full.comm.communicator import Communicator
from zero_full.comm.quantized import Nodes, QuantizedGather, TwoHopReduce
from zero_full.comm.topology import Topology
from zero_full.comm.transport import Exchange, own_slice
from zero_full.kernels import reference

CPU = torch.device("cpu")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAN, INF = float("nan"), float("inf")


# Gathers -----------------------------------------------------------------------------------------


class Case(NamedTuple):
    part: int  # numbers a rank
    dtype: torch.dtype = FP32
    bits: int = 8
    block: int = 16
    locals: int = 1  # ranks on a node


def bytes_of(case: Case) -> int:
    """Integers and scales, filled up to a multiple of 16."""
    return -(-(-(-case.part * case.bits // 8) + 4 * -(-case.part // case.block)) // 16) * 16


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


@pytest.mark.rotates
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_get_the_same_bits_also_of_their_own_slice_for_the_bytes_of_a_payload(world: int) -> None:
    for results in gathers(world):
        for case, (whole, inside, across) in zip(ON_NODES, results, strict=False):
            exact = everyones(case, world)
            rounded = [
                back(reference, quantize(reference, x, case.bits, case.block), case.dtype) for x in exact
            ]
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


# Work --------------------------------------------------------------------------------------------


def counted(comm: Any) -> tuple[Counter[str], Counter[str]]:
    """How often each operator is called in a gather, and in a reduction."""
    nodes, found = nodes_of(2), []
    whole, out = torch.ones(nodes.size * 37, dtype=BF16), torch.empty(37)
    for call in (
        lambda: QuantizedGather(nodes).all_gather(whole, "weights"),
        lambda: TwoHopReduce(nodes).reduce_scatter(whole, out, 4, "gradients"),
    ):
        real = mock.Mock(wraps=quantized.operators(whole.device))
        with mock.patch.object(quantized, "operators", lambda device, real=real: real):
            call()
        found.append(Counter(name for name, _, _ in real.method_calls))
    return found[0], found[1]


def test_the_number_of_calls_does_not_grow_with_the_number_of_ranks() -> None:
    """One for all slices that come; of a hop's, one for those before this rank's and one for those behind."""
    for gather, reduction in POOL.run(counted, 4):
        assert gather == {"quantize_blocks": 1, "dequantize_blocks": 1}
        assert reduction == {"quantize_blocks": 2, "dequantize_blocks": 2}


# What crosses between nodes ----------------------------------------------------------------------

PART, BLOCK = 1000, 256  # numbers a rank; the last block is not full
NODES, INNER = 2, 2


@contextmanager
def watched() -> Iterator[Counter[int]]:
    """Bytes by the rank they go to, seen where torch is asked to send them."""
    sent: Counter[int] = Counter()
    post, exchange = Exchange._post, dist.all_to_all_single

    def seen_post(self: Exchange, send: dict[int, Tensor], receive: dict[int, Tensor]) -> Any:
        for rank, tensor in send.items():
            sent[dist.get_global_rank(self.group, rank)] += tensor.nbytes
        return post(self, send, receive)

    def seen_exchange(received: Tensor, tensor: Tensor, *splits: list[int], group: Any) -> Any:
        for rank, numel in zip(dist.get_process_group_ranks(group), splits[1], strict=True):
            sent[rank] += numel * tensor.element_size()
        return exchange(received, tensor, *splits, group=group)

    with (
        mock.patch.object(Exchange, "_post", seen_post),
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
    column = nodes.inner.slice_of(whole)
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
        scales, slices = 4 * -(-PART // BLOCK), (NODES - 1) * INNER
        eight, four = PART + scales, PART // 2 + scales
        filled = [-size % 16 for size in (eight, four)]
        assert filled == [8, 12]  # 1016 and 516 bytes a slice
        more, less = (slices * (scales + each) for each in filled)
        assert seen["16-bit gather"] == seen["16-bit gradients"] == unit
        step = seen["forward"], seen["backward"], seen["gradients"]
        assert step == (unit // 2 + more, 0, unit // 4 + less)
        assert sum(step) == (2 * seen["16-bit gather"] + seen["16-bit gradients"]) // 4 + more + less


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
