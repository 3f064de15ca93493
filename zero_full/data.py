"""The data loader that `initialize` makes: each rank sees its own part of the data."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset


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
