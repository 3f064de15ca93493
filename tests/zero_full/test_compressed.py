"""One bit an element: what has not been said is kept, all ranks hear the same, and each byte is counted."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.worlds import POOL
from tests.zero_full.compressed_cases import BF16, CASES, FP32, GAPS, Case, given, reduce_of, tensors_of
from zero_full.comm import compressed
from zero_full.comm.chunks import Chunks
from zero_full.comm.communicator import Communicator
from zero_full.comm.fake_ranks import FakeGroup
from zero_full.kernels import reference
from zero_full.kernels.load import load

CPU, META = torch.device("cpu"), torch.device("meta")
WORLDS = [2, 3, 4]
ROUNDS = 4
GUARD = 7.0
SOME = CASES[::3]  # for what does not depend on the case


class Outcome(NamedTuple):
    results: list[Tensor]  # of each round
    worker: Tensor
    server: Tensor
    sent: dict[str, int]  # in one round


def outcome(comm: Communicator, case: Case, resumes: bool = False) -> Outcome:
    """All rounds; what is given stays as it is. With `resumes` errors are saved and loaded between."""
    reduce, results = reduce_of(comm, case), []
    errors = reduce.new_errors()
    for number in range(ROUNDS):
        if resumes and number == ROUNDS // 2:
            saved = {name: tensor.clone() for name, tensor in errors.state_dict().items()}
            reduce = reduce_of(comm, case)
            errors = reduce.new_errors()
            errors.load_state_dict(saved)
        mine = given(case, comm.rank, number).to(comm.device)
        x, out = mine.clone(), torch.full((case.numel,), GUARD, device=comm.device)
        if number == 1 and case.dtype == FP32:
            x = out.copy_(x)  # in place
        comm.traffic.clear()
        reduce.average(x, out, errors, "momentum")
        assert x is out or torch.equal(x, mine)
        results.append(out.cpu())
    return Outcome(results, errors.worker.cpu(), errors.server.cpu(), dict(comm.traffic.sent))


def all_ways(comm: Any) -> dict[str, list[Outcome]]:
    """By how it is computed or carried, for all cases or some."""
    near = Communicator(dist.group.WORLD, CPU)
    far = Communicator(dist.group.WORLD, CPU, shared_memory=False)
    assert near.transport is not None and far.transport is not None
    assert (near.transport.name, far.transport.name) == ("shared memory", "exchange")
    assert load(CPU).path is not None
    ways = {
        "plain": [outcome(near, case) for case in CASES],
        "messages": [outcome(far, case) for case in SOME],
        "resumed": [outcome(near, case, resumes=True) for case in SOME],
    }
    with mock.patch.object(compressed, "operators", lambda device: reference):
        ways["reference"] = [outcome(near, case) for case in SOME]
    return ways


@cache
def by_rank(world: int) -> list[dict[str, list[Outcome]]]:
    return POOL.run(all_ways, world)


def outcomes(world: int, case: Case, way: str = "plain") -> list[Outcome]:
    """Of every rank."""
    cases = CASES if way == "plain" else SOME
    return [ways[way][cases.index(case)] for ways in by_rank(world)]


def same_bits(one: Outcome, other: Outcome) -> bool:
    pairs = zip([*one.results, *one[1:3]], [*other.results, *other[1:3]], strict=True)
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


# What is right -----------------------------------------------------------------------------------


def said_of(wanted: Tensor, parts: Tensor, l1: bool) -> Tensor:
    """Scale times sign, in fp64; elements with one number in `parts` have one scale."""
    said = torch.zeros_like(wanted)
    for part in parts.unique():
        here = parts == part
        scale = wanted[here].abs().mean() if l1 else wanted[here].square().mean().sqrt()
        said[here] = torch.where(wanted[here] >= 0, scale, -scale)
    return said


def by_hand(case: Case, world: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Results of all rounds, everyone's worker errors and all server errors, in fp64, as in the papers."""
    tensors = tensors_of(case)
    live = tensors >= 0
    tensors = tensors[live]
    chunk = max(8 * -(-len(tensors) // (8 * world)), 1)
    parts = (torch.arange(len(tensors)) // chunk) * 10_000 + tensors
    worker, server = torch.zeros(world, len(tensors)).double(), torch.zeros(len(tensors)).double()
    results = []
    for number in range(ROUNDS):
        mean = torch.zeros_like(server)
        for rank in range(world):
            wanted = given(case, rank, number).double()[live] + worker[rank]
            said = said_of(wanted, tensors, case.l1)
            worker[rank] = wanted - said
            mean += said / world
        said = said_of(mean + server, parts, case.l1)
        server = mean + server - said
        results.append(torch.zeros(case.numel).double().masked_scatter(live, said))
    return results, worker, server


def agree(case: Case, ranks: Sequence[Outcome]) -> None:
    """With the algorithm, and with each other."""
    results, worker, server = by_hand(case, len(ranks))
    close = {"rtol": 1e-4, "atol": 1e-4 * case.size}
    for rank, found in enumerate(ranks):
        for number, (got, want) in enumerate(zip(found.results, results, strict=True)):
            torch.testing.assert_close(got.double(), want, **close)
            assert torch.equal(got.view(torch.int32), ranks[0].results[number].view(torch.int32))
        torch.testing.assert_close(found.worker.double(), worker[rank], **close)
    torch.testing.assert_close(torch.cat([found.server for found in ranks]).double(), server, **close)


@pytest.mark.rotates
@pytest.mark.parametrize("world", WORLDS)
def test_it_is_the_algorithm_in_fp64_and_every_rank_has_the_same_bits(world: int) -> None:
    for case in CASES:
        agree(case, outcomes(world, case))


@pytest.mark.rotates
@pytest.mark.parametrize("world", WORLDS)
def test_nothing_is_lost_it_only_comes_late(world: int) -> None:
    for case in CASES:
        ranks, live = outcomes(world, case), tensors_of(case) >= 0
        asked = torch.stack([given(case, r, i).double() for r in range(world) for i in range(ROUNDS)])
        heard = torch.stack(ranks[0].results).double().sum(0)
        kept = torch.stack([found.worker for found in ranks]).double().mean(0)
        kept += torch.cat([found.server for found in ranks]).double()
        want = asked.sum(0)[live] / world
        torch.testing.assert_close(heard[live] + kept, want, rtol=1e-5, atol=1e-5 * case.size)
        assert not heard[~live].any()


@pytest.mark.parametrize("way", ["messages", "resumed", "reference"])
@pytest.mark.parametrize("world", WORLDS)
def test_the_bits_do_not_depend_on_the_way(world: int, way: str) -> None:
    for case in SOME:
        for plain, other in zip(outcomes(world, case), outcomes(world, case, way), strict=True):
            assert same_bits(plain, other), case


# Bytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "world", "message"),
    [
        ((1000,), 2, 4 * 2 + 63 + 9),  # 504 elements a chunk; filled up to a multiple of 16
        ((1000,), 4, 4 * 2 + 32 + 8),
        ((300, 300, 301, 1000), 2, 4 * 4 + 63 + 1),  # three tensors in the first chunk
        ((300, 300, 301, 1000), 4, 4 * 4 + 32 + 0),  # in the second
        (tuple(range(1, 41)), 4, 4 * 17 + 2 + 10),  # 16 numbers a chunk: none are in the fourth
        ((1,), 4, 4 * 2 + 1 + 7),
        ((2**27,), 8, 2**21 + 16),
        ((0,), 3, 16),  # a mask that leaves out everything: only whether all is finite
    ],
)
def test_a_message_is_numbers_and_bits(ends: tuple[int, ...], world: int, message: int) -> None:
    chunks = Chunks(ends, world)
    assert (chunks.message, chunks.sent) == (message, 2 * (world - 1) * message)
    parts = [part for of_one in chunks.cuts for part in of_one]
    assert parts == sorted(parts) and (not parts or parts[-1].end == ends[-1])
    assert {part.tensor for part in parts} == {
        i for i, (a, b) in enumerate(zip((0, *ends), ends, strict=False)) if a < b
    }


@pytest.mark.parametrize("world", WORLDS)
def test_the_ledger_has_two_messages_for_each_of_the_others(world: int) -> None:
    for case in CASES:
        tensors = tensors_of(case)
        tensors = tensors[tensors >= 0]
        chunk = 8 * -(-len(tensors) // (8 * world))
        most = max(len(part.unique()) for part in tensors.split(max(chunk, 1))) if len(tensors) else 0
        once = (world - 1) * 16 * -(-(4 * (1 + most) + chunk // 8) // 16)
        want = {"all_to_all": once, "all_gather": once} if case.numel else {}
        assert all(found.sent == want for found in outcomes(world, case)), case


def test_two_bits_an_element_and_nothing_else_that_counts() -> None:
    exact = 2 * 2**27 * 4 * 7 // 8  # an all-reduce of fp32
    assert exact / Chunks((2**27,), 8).sent == pytest.approx(32, rel=1e-4)


def calls_made(comm: Any) -> list[str]:
    by, made = Communicator(dist.group.WORLD, CPU), []
    reduce = reduce_of(by, CASES[-1])
    errors, inner = reduce.new_errors(), by.transport

    class Watched:
        def __getattr__(self, name: str) -> Any:
            made.append(name)
            return getattr(inner, name)

    by.transport = Watched()  # type: ignore[assignment]
    reduce.average(given(CASES[-1], comm.rank, 0), torch.empty(CASES[-1].numel), errors, "momentum")
    return made


def test_a_call_makes_two_collectives() -> None:
    assert POOL.run(calls_made, 2) == [["all_to_all", "all_gather"]] * 2


@pytest.mark.parametrize("mask", ["", "some"])
def test_a_plan_counts_what_a_run_sends(mask: str) -> None:
    case = Case(100, GAPS, mask)
    by = Communicator(FakeGroup(range(4), global_rank=1), META)
    reduce = reduce_of(by, case)
    x, errors = torch.empty(case.numel, device=META, dtype=BF16), reduce.new_errors()
    reduce.average(x, torch.empty(case.numel, device=META), errors, "momentum")
    assert by.traffic.sent == outcomes(4, case)[1].sent
    assert len(errors.worker) == len(outcomes(4, case)[1].worker)
    assert len(errors.server) == len(outcomes(4, case)[1].server)


# One rank ----------------------------------------------------------------------------------------


def test_the_average_of_a_rank_that_is_alone_is_an_exact_copy() -> None:
    for case in CASES:
        found = outcome(Communicator(None, CPU), case)
        for number, got in enumerate(found.results):
            assert torch.equal(got, given(case, 0, number).float() * (tensors_of(case) >= 0)), case
        assert (found.worker.numel(), found.server.numel(), found.sent) == (0, 0, {})
