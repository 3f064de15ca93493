"""The loader that `initialize` makes: what it deals, and how it goes on in the middle of a pass."""

import copy
import os
import signal
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import zero_full
from zero_full.engine.loader import RankLoader

Batches = list[list[int]]


class Dealt(IterableDataset[int]):
    """A stream of which each rank has its part, as such datasets do it themselves."""

    def __init__(self, numel: int, rank: int, world: int) -> None:
        self.numbers = range(rank, numel, world)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)


def loaders(numel: int, world: int, batch: int, drop_last: bool, streams: bool = False) -> list[RankLoader]:
    """Of all ranks."""
    found = []
    for rank in range(world):
        data: Dataset[Any] = Dealt(numel, rank, world) if streams else TensorDataset(torch.arange(numel))
        found.append(RankLoader(data, batch, rank, world, collate, drop_last))
    return found


def collate(samples: list[Any]) -> list[int]:
    return [int(each[0]) if isinstance(each, tuple) else each for each in samples]


def take(loader: RankLoader, number: int | None, passes: int = 3) -> Batches:
    """So many batches of the next passes, as a loop over epochs takes them."""
    return list(islice(chain.from_iterable(loader for _ in range(passes)), number))


def in_turn(ranks: list[Batches]) -> list[int]:
    """What all ranks have had, in the order in which it was dealt."""
    return [
        each[place]
        for step in zip(*ranks, strict=True)
        for place in range(max(map(len, step)))
        for each in step
        if place < len(each)
    ]


def order(numel: int, number: int) -> list[int]:
    """A pass."""
    return torch.randperm(numel, generator=torch.Generator().manual_seed(number)).tolist()


sizes = st.integers(0, 40), st.integers(1, 4), st.integers(1, 5), st.booleans()


@settings(max_examples=60, deadline=None)
@given(*sizes)
def test_ranks_get_what_torchs_sampler_deals(numel: int, world: int, batch: int, drop_last: bool) -> None:
    data = TensorDataset(torch.arange(numel))
    for rank, loader in enumerate(loaders(numel, world, batch, drop_last)):
        sampler: Any = DistributedSampler(data, world, rank, shuffle=True, drop_last=drop_last)
        plain: Any = DataLoader(data, batch, sampler=sampler, collate_fn=collate, drop_last=drop_last)
        for number in range(3):
            sampler.set_epoch(number)
            assert list(loader) == list(plain), (rank, number)
        assert len(loader) == len(plain)


@settings(max_examples=150, deadline=None)
@given(*sizes, st.integers(0, 30), st.booleans())
def test_what_follows_a_load_is_what_would_have_followed(
    numel: int, world: int, batch: int, drop_last: bool, taken: int, streams: bool
) -> None:
    for rank in range(world):
        mine = [loaders(numel, world, batch, drop_last, streams)[rank] for _ in range(3)]
        everything = take(mine[0], None)
        before = chain.from_iterable(mine[1] for _ in range(3))
        assert list(islice(before, taken)) == everything[:taken]  # and the loop is still at it
        state = copy.deepcopy(mine[1].state_dict())
        mine[2].load_state_dict(state)
        assert mine[2].state_dict() == state
        rest = everything[taken:]
        assert take(mine[2], len(rest)) == rest
        mine[1].load_state_dict(state)  # in the middle of a loop, whose passes are counted by itself
        assert list(islice(before, 1)) == rest[:1]


@settings(max_examples=150, deadline=None)
@given(*sizes, st.integers(0, 20), st.integers(1, 4), st.integers(1, 5))
def test_another_number_of_ranks_goes_on_in_the_same_order(
    numel: int, world: int, batch: int, drop_last: bool, taken: int, ranks: int, size: int
) -> None:
    old = loaders(numel, world, batch, drop_last)
    in_pass = taken % (len(old[0]) + 1)
    cut = [take(each, in_pass, 1) if in_pass else [] for each in old]
    states = [each.state_dict() for each in old]
    assert all(state == states[0] for state in states)
    new = loaders(numel, ranks, size, drop_last)
    for each in new:
        each.load_state_dict(states[0])
    dealt = in_turn(cut) + in_turn([list(each) for each in new])
    whole = order(numel, states[0]["pass"])
    if drop_last:
        assert dealt == whole[: len(dealt)] and numel - len(dealt) < max(ranks * size, world * batch)
    else:
        assert dealt[:numel] == whole and len(dealt) < numel + max(ranks, world)
    following = in_turn([list(each) for each in new])[:numel]
    assert following == order(numel, states[0]["pass"] + 1)[: len(following)]


def test_a_loader_that_is_repeated_goes_on_too() -> None:
    whole, cut, new = (zero_full.RepeatingLoader(loaders(11, 2, 2, False)[1]) for _ in range(3))
    everything = list(islice(whole, 12))
    for taken in range(8):
        new.load_state_dict(cut.state_dict())
        assert list(islice(new, 4)) == everything[taken : taken + 4], taken
        next(cut)


def test_a_pass_that_a_loop_has_left_is_over_for_the_next_loop_and_goes_on_after_a_load() -> None:
    loader, other = loaders(10, 1, 2, False)[0], loaders(10, 1, 2, False)[0]
    first = take(loader, 2, 1)
    other.load_state_dict(loader.state_dict())
    assert first + list(other) == [order(10, 0)[i : i + 2] for i in range(0, 10, 2)]
    assert list(loader) == [order(10, 1)[i : i + 2] for i in range(0, 10, 2)]


def test_two_loops_at_once_have_a_pass_each() -> None:
    loader = loaders(10, 1, 5, False)[0]
    pairs = list(zip(loader, loader, strict=True))
    assert [each for each, _ in pairs] == [order(10, 0)[:5], order(10, 0)[5:]]
    assert [each for _, each in pairs] == [order(10, 1)[:5], order(10, 1)[5:]]


def test_the_random_numbers_of_the_loop_are_not_drawn() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    list(loaders(10, 2, 2, False)[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_place_in_other_data_is_refused() -> None:
    state = loaders(10, 1, 2, False)[0].state_dict()
    for other in (loaders(11, 1, 2, False)[0], loaders(10, 1, 2, False, streams=True)[0]):
        with pytest.raises(ValueError, match=r"had 10 samples .*has (11|-1) now"):
            other.load_state_dict(state)


class Signalled(Dataset[int]):
    """The process that loads the third sample gets the signals that torchrun and Slurm send to all."""

    def __init__(self, parent: int) -> None:
        self.parent = parent

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> int:
        if number == 2 and os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)
        return number


def test_a_process_that_loads_data_does_not_end_at_a_signal() -> None:
    data = Signalled(os.getpid())
    init = zero_full.leave_signals
    loader: Any = DataLoader(data, 1, num_workers=1, worker_init_fn=init, multiprocessing_context="fork")
    assert [int(each) for each in loader] == list(range(6))
