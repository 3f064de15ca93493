"""Parts of any size to every rank: what arrives is what was sent, by every way that bytes can take."""

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worlds import POOL, RankError
from tests.zero_full.test_transport import CPU, HALF, everyone
from zero_full.comm.communicator import Communicator
from zero_full.comm.fake_ranks import FakeGroup
from zero_full.comm.host_staging import HostStaging
from zero_full.comm.shared_memory import share_memory
from zero_full.comm.topology import new_group, ranks_of
from zero_full.comm.traffic import Traffic
from zero_full.comm.transport import Exchange, Native, Splits

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]
SIZES = [0, 0, 1, 7, 40, 300]  # elements; a half of a window holds 64 bytes


def table(world: int, seed: int) -> list[list[int]]:
    """How much each rank sends to each: nothing at all, or from one to one only, every now and then."""
    drawn = random.Random(seed)
    sizes = [[drawn.choice(SIZES) if a != b else 0 for b in range(world)] for a in range(world)]
    if seed % 5 == 0:
        sizes = [[7 * (a == world - 1 and b == 0) for b in range(world)] for a in range(world)]
    return sizes if seed % 7 else [[0] * world for _ in range(world)]


def splits_of(sizes: list[list[int]], rank: int) -> Splits:
    return Splits(sizes[rank], [row[rank] for row in sizes], max(map(max, sizes)))


def part(sender: int, reader: int, numel: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(numel) * 3 + 17 * sender + 5 * reader).remainder(251).to(dtype)


def wrong_ones(comm: Any, seeds: range) -> list[str]:
    """Calls of each transport, one after the other, with pauses wherever a rank could overtake another."""
    rank, world, mine = comm.rank, comm.world_size, random.Random(comm.rank)
    shared = share_memory(everyone(), half=HALF)
    assert shared is not None
    barrier = shared.barrier

    def dawdle(call: Any) -> None:
        barrier(call)
        time.sleep(mine.choice([0, 0, 0.001]))

    dawdle.turn = barrier.turn  # type: ignore[attr-defined]
    shared.barrier = dawdle  # type: ignore[assignment]
    behind = share_memory(new_group(ranks_of(everyone()), like=everyone()), half=64)
    assert behind is not None
    ways: dict[str, Any] = {"native": Native(everyone()), "exchange": Exchange(everyone()), "shared": shared}
    ways["staged"] = HostStaging(behind, staging=1024)
    found = []
    for seed in seeds:
        sizes, dtype = table(world, seed), DTYPES[seed % len(DTYPES)]
        splits = splits_of(sizes, rank)
        sent = torch.cat([part(rank, other, n, dtype) for other, n in enumerate(splits.sent)])
        want = torch.cat([part(other, rank, n, dtype) for other, n in enumerate(splits.received)])
        for name, by in ways.items():
            received = torch.zeros_like(want)
            by.all_to_all(sent, received, splits)
            found += [f"{name}, seed {seed}"] if not torch.equal(received, want) else []
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_everyone_gets_what_was_meant_for_him(world: int) -> None:
    assert POOL.run(wrong_ones, world, range(24)) == [[]] * world


def counted(comm: Any) -> tuple[dict[str, int], list[float]]:
    traffic = Traffic()
    by = Communicator(everyone(), CPU, traffic)
    sizes = [[0, 3, 5], [0, 0, 2], [0, 0, 0]]
    splits = splits_of(sizes, comm.rank)
    received = torch.zeros(sum(splits.received))
    by.all_to_all_uneven(torch.ones(sum(splits.sent)), received, splits, "a")
    nothing = Splits([0] * 3, [0] * 3, 0)
    by.all_to_all_uneven(torch.ones(0), torch.ones(0), nothing, "nothing, for which nobody waits")
    return dict(traffic.sent), received.tolist()


def test_what_is_sent_is_counted() -> None:
    sent = [{"all_to_all": 4 * 8}, {"all_to_all": 4 * 2}, {}]
    assert POOL.run(counted, 3) == list(zip(sent, [[], [1.0] * 3, [1.0] * 7], strict=True))
    traffic = Traffic()
    by = Communicator(FakeGroup(range(3), 1), torch.device("meta"), traffic)
    sent_nothing = torch.empty(6, dtype=torch.bfloat16, device="meta")
    by.all_to_all_uneven(sent_nothing, sent_nothing[:0], Splits([2, 0, 4], [0, 0, 0], 4), "a")
    assert dict(traffic.sent) == {"all_to_all": 12}
    alone = Communicator(None, CPU)
    alone.all_to_all_uneven(torch.ones(0), torch.ones(0), Splits([0], [0], 0), "a")
    assert alone.traffic.total() == 0


def differ(comm: Any) -> None:
    by = Communicator(everyone(), CPU, check_timeout_s=5.0)
    sizes = [[0, 2], [1, 0]]
    splits = splits_of(sizes, comm.rank)
    by.all_to_all_uneven(torch.ones(sum(splits.sent)), torch.ones(sum(splits.received)), splits, "alike")
    sizes[0][1] += comm.rank
    splits = splits_of(sizes, comm.rank)
    by.all_to_all_uneven(torch.ones(sum(splits.sent)), torch.ones(sum(splits.received)), splits, "different")


def test_ranks_that_mean_other_sizes_are_noticed_by_the_check_of_calls() -> None:
    with pytest.raises(RankError, match=r"rank 1: all_to_all of different, 3 at most between two ranks"):
        POOL.run(differ, 2)
