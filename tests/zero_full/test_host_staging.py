"""Collectives that are staged in host memory: the bits of CPU ranks, and errors on every rank."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.worlds import POOL
from tests.zero_full.test_transport import CASES, Case, every_call, everyone, numbers
from zero_full.comm.communicator import Communicator, Transport
from zero_full.comm.host_staging import HostStaging
from zero_full.comm.shared_memory import share_memory
from zero_full.comm.topology import new_group, ranks_of
from zero_full.comm.transport import Exchange, Splits
from zero_full.errors import CommunicationError, DesyncError

WORLDS = [2, 3, 4]
STAGING = 1024  # bytes: most calls take several pieces


def in_host_memory(messages: bool = False) -> Any:
    """A transport for host memory over a group of its own, with small windows."""
    group = new_group(ranks_of(everyone()), like=everyone())
    return Exchange(group) if messages else share_memory(group, half=64)


def others(by: Transport, rank: int, world: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Calls that add nothing up in small types, and numbers in odd shapes."""
    parts = numbers(rank, 35 * world, torch.float32).mul(9).to(dtype)
    received = torch.zeros_like(parts)
    by.all_to_all(parts, received, Splits.even(len(parts), world))
    told = parts.clone()
    by.broadcast(told)
    gathered = torch.zeros(world * 301, dtype=dtype)
    gathered[rank * 301 : (rank + 1) * 301] = numbers(rank, 301, torch.float32).mul(9).to(dtype)
    by.all_gather(gathered)
    sums = {}
    for shape in [(), (5,), (0,), (700,)]:
        some = numbers(rank, 700, torch.float64)[: torch.Size(shape).numel()].clone().view(shape)
        by.sum_numbers(some)
        sums[f"sum {shape}"] = some
    counts = torch.arange(2**53, 2**53 + 7) + rank  # which no float holds
    by.sum_numbers(counts)
    for empty in (torch.empty(0), torch.empty(0, dtype=dtype)):
        by.broadcast(empty)
        by.all_to_all(empty, empty.clone(), Splits.even(0, world))
    return {"parts": received, "told": told, "gathered": gathered, "counts": counts, **sums}


def calls_of(by: Transport, rank: int, world: int, case: Case | torch.dtype) -> dict[str, Tensor]:
    """The results of a transport's calls."""
    return (
        others(by, rank, world, case) if isinstance(case, torch.dtype) else every_call(by, rank, world, case)
    )


EVERYTHING = [*CASES, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8]


def differing(comm: Any, messages: bool) -> list[str]:
    """Calls of a staged transport that do not give the bits of shared memory."""
    by, plain = HostStaging(in_host_memory(messages), STAGING), in_host_memory()
    wrong = [] if by.gather_objects(comm.rank) == list(range(comm.world_size)) else ["objects"]
    for case in EVERYTHING:
        got = calls_of(by, comm.rank, comm.world_size, case)  # type: ignore[arg-type]
        want = calls_of(plain, comm.rank, comm.world_size, case)  # type: ignore[arg-type]
        wrong += [f"{case} {name}" for name in want if not same_bits(got[name], want[name])]
    return wrong


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("world", WORLDS)
def test_results_are_those_of_shared_memory_bit_for_bit(world: int) -> None:
    assert POOL.run(differing, world, False) == [[]] * world


def test_where_there_is_no_shared_memory_pieces_are_sent_as_messages() -> None:
    assert POOL.run(differing, 2, True) == [[]] * 2


# Failure -----------------------------------------------------------------------------------------


def on_an_accelerator() -> Communicator:
    """As an engine opens it for tensors on an accelerator, whose backend is gloo."""
    made = Communicator(new_group(ranks_of(everyone()), like=everyone()), torch.device("cuda"))
    assert isinstance(made.transport, HostStaging)
    return made


def what_fails(act: Callable[[], object]) -> str:
    try:
        act()
    except CommunicationError as error:
        return str(error).partition("\n")[0]
    return "nothing"


def fails_alone(comm: Any) -> list[str]:
    """The errors of two collectives, if a copy to the host fails on rank 1."""
    by = on_an_accelerator()
    inner: Any = by.transport.inner  # type: ignore[union-attr]
    inner.barrier.timeout_s = 0.3
    if comm.rank == 1:
        inner.all_reduce = mock.Mock(side_effect=RuntimeError("out of memory"))
    whole = torch.ones(4)
    return [what_fails(lambda name=name: by.all_reduce(whole, 1, name)) for name in ("first", "second")]


def test_every_rank_raises_and_none_makes_a_call_after_one_that_failed() -> None:
    for rank, heard in enumerate(POOL.run(fails_alone, 2)):
        why = "out of memory" if rank else "timed out: rank 1"
        assert heard[0].startswith(f"rank {rank}: all_reduce of first on 2 ranks failed: {why}")
        earlier = f"an earlier collective of this group failed: {why}"
        assert f"all_reduce of second on 2 ranks failed: {earlier}" in heard[1]


def parts_ways(comm: Any) -> str:
    by = on_an_accelerator()
    try:
        by.all_reduce(torch.ones(4), 1, f"gradients {comm.rank}")
    except DesyncError as error:
        return str(error)
    return "nothing"


def test_ranks_that_make_different_calls_are_named() -> None:
    for text in POOL.run(parts_ways, 2):
        assert "all_reduce of gradients 0" in text and "all_reduce of gradients 1" in text
