"""Data for ranks: the loader that `initialize` makes, loaders without an end, and loops that end together."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zero_full._compat import device_of


class RankLoader:
    """Micro-batches of this rank; every pass over it is shuffled anew, the same way on all ranks."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        rank: int,
        world: int,
        collate_fn: Callable[..., Any] | None,
        drop_last: bool,
    ) -> None:
        self.sampler: DistributedSampler[Any] | None = None
        if not isinstance(dataset, IterableDataset):
            self.sampler = DistributedSampler(dataset, world, rank, shuffle=True, drop_last=drop_last)
        self.loader: DataLoader[Any] = DataLoader(
            dataset, batch_size, sampler=self.sampler, collate_fn=collate_fn, drop_last=drop_last
        )
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        if self.sampler is not None:
            self.sampler.set_epoch(self.passes)
        self.passes += 1
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


class RepeatingLoader:
    """Repeats a loader for ever. Attributes that it does not have are the loader's.

    A sampler with `set_epoch` is told each new pass, so that it shuffles anew.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.passes = 0
        self.is_empty = True
        self.data_iter = iter(loader)

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __next__(self) -> Any:
        batch = next(self.data_iter, NOTHING)
        if batch is NOTHING:
            self.passes += 1
            self._begin_epoch()
            self.data_iter = iter(self.loader)
            batch = next(self.data_iter, NOTHING)
        if batch is NOTHING:
            told = "has no batch at all" if self.is_empty else "cannot begin anew: it may be a generator"
            raise ValueError(f"the loader {told}, so there is nothing to repeat")
        self.is_empty = False
        return batch

    def _begin_epoch(self) -> None:
        for name in ("sampler", "batch_sampler"):
            sampler: Any = getattr(self.loader, name, None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(getattr(sampler, "epoch", self.passes - 1) + 1)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while it is copied, there is none
            raise AttributeError(name)
        return getattr(self.loader, name)


NOTHING = object()


def synced(batches: Iterable[Any], group: dist.ProcessGroup | None = None) -> Iterator[tuple[Any, bool]]:
    """Yield (batch, whether it counts) until no rank has a batch left.

    At stage 3 every rank takes part in every forward. A rank that runs out of batches before the others gets
    its last one again, which does not count. The ranks ask each other before each batch; over NCCL alone,
    without gloo beside it, the host waits for the device to hear the answer.
    """
    iterator, batch = iter(batches), NOTHING
    while True:
        following = next(iterator, NOTHING)
        more, *none = _everyones(following is not NOTHING, batch is NOTHING and following is NOTHING, group)
        if not more:
            return
        if any(none):
            raise ValueError(f"rank {none.index(1)} has no batch at all: give every rank at least one")
        batch = batch if following is NOTHING else following
        yield batch, following is not NOTHING


def _everyones(more: bool, none: bool, group: dist.ProcessGroup | None) -> list[int]:
    """How many ranks have another batch; and of each rank, by number, whether it has had none at all."""
    if not dist.is_initialized():
        return [int(more), int(none)]
    everyone = group if group is not None else dist.group.WORLD
    numbers = [int(more)] + [0] * dist.get_world_size(everyone)
    numbers[1 + dist.get_rank(everyone)] = int(none)
    summed = torch.tensor(numbers, dtype=torch.int32, device=device_of(everyone))
    dist.all_reduce(summed, group=everyone)
    return summed.tolist()
