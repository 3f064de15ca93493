"""Data loading: the sharded loader of `initialize`, a repeating loader, and loops that end on all ranks.

[Note: position in the data] In a pass, all ranks together take the next samples of one shuffled order. So
the position is two numbers: the number of the pass, and the samples that all ranks together have taken from
it. They do not depend on the number of ranks or the size of a batch.
"""

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from zero_full._compat import device_of


@dataclass
class DataPosition:
    """Position of all ranks together in the data. See [Note: position in the data]."""

    number: int = 0  # of the pass
    samples: int = 0  # taken from this pass, all ranks


class RankLoader:
    """Yields this rank's micro-batches. Every pass is shuffled anew, with the same order on all ranks.

    Its state is the position after the last batch that it yielded, see [Note: position in the data]. After a
    load the next loop continues there, also in a pass that was left by `break`. Without a load, a loop after
    `break` begins a new pass. An IterableDataset is read from its beginning to reach the position.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        rank: int,
        world: int,
        collate_fn: Callable[..., Any] | None,
        drop_last: bool,
    ) -> None:
        self.dataset, self.batch_size, self.rank, self.world = dataset, batch_size, rank, world
        self.collate_fn, self.drop_last = collate_fn, drop_last
        self.in_order = isinstance(dataset, IterableDataset)
        self.position = DataPosition()
        self.begun = False  # an iterator has started at the position
        self.loads = 0  # calls of load_state_dict
        # torch draws a number whenever an iterator starts. It has a generator of its own: a run that resumes
        # in the middle of a pass starts one iterator more, and would draw other numbers from the global one.
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[Any]:
        while True:
            position, loads = self._begin(), self.loads
            taken, each = position.samples, self.batch_size * self.world
            for batch in self._loader_from(position):
                position.samples = taken = taken + each
                yield batch
                if self.loads != loads and not self.begun:
                    break  # a checkpoint was loaded inside the loop: continue at its position
            else:
                if self.position is position:
                    self.position, self.begun = DataPosition(position.number + 1), False
                return

    def _begin(self) -> DataPosition:
        """Return the position at which a new iterator starts."""
        if self.begun:  # an earlier loop was left in this pass, or is still running
            self.position = DataPosition(self.position.number + 1)
        self.begun = True
        return self.position

    def _loader_from(self, position: DataPosition) -> DataLoader[Any]:
        """Return a loader of this rank's batches from a position to the end of the pass."""
        loader = partial(DataLoader, collate_fn=self.collate_fn, generator=self.generator)
        if isinstance(self.dataset, IterableDataset):
            taken = -(-position.samples // self.world)
            rest = _SkipFirst(self.dataset, taken) if taken else self.dataset
            return loader(rest, batch_size=self.batch_size, drop_last=self.drop_last)
        return loader(self.dataset, batch_sampler=_RankBatchSampler(self, position))

    def __len__(self) -> int:
        """Return the number of batches in a whole pass."""
        return len(self._loader_from(DataPosition()))

    def state_dict(self) -> dict[str, int]:
        """Return the position, which is equal on all ranks after the same number of batches."""
        return {"pass": self.position.number, "samples": self.position.samples, "of": self._samples()}

    def _samples(self) -> int:
        """Return the number of samples; -1 for an IterableDataset."""
        return -1 if isinstance(self.dataset, IterableDataset) else len(self.dataset)  # type: ignore[arg-type]

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a saved position, with this run's number of ranks and batch size."""
        if state["of"] != self._samples():
            raise ValueError(
                f"the dataset had {state['of']} samples when the checkpoint was saved, and has "
                f"{self._samples()} now (-1: an IterableDataset), so the position in it is not valid. To "
                "start from the beginning, set engine.training_dataloader = None before load_checkpoint"
            )
        self.position, self.begun, self.loads = (
            DataPosition(state["pass"], state["samples"]),
            False,
            self.loads + 1,
        )


class _RankBatchSampler(Sampler[list[int]]):
    """Batch sampler of one rank, from a position to the end of the pass."""

    def __init__(self, loader: RankLoader, position: DataPosition) -> None:
        self.loader, self.position = loader, position
        self.numel = len(loader.dataset)  # type: ignore[arg-type]
        rest = max(0, self.numel - position.samples)
        self.each = rest // loader.world if loader.drop_last else -(-rest // loader.world)

    def __len__(self) -> int:
        size = self.loader.batch_size
        return self.each // size if self.loader.drop_last else -(-self.each // size)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._samples().split(self.loader.batch_size)[: len(self)]:
            yield batch.tolist()

    def _samples(self) -> Tensor:
        """Return this rank's samples: every `world`-th one, continued at the beginning if they run out."""
        generator = torch.Generator().manual_seed(self.position.number)
        order = torch.randperm(self.numel, generator=generator, device="cpu")
        turns = torch.arange(self.each, device="cpu") * self.loader.world
        return order[(self.position.samples + self.loader.rank + turns) % max(1, self.numel)]


class _SkipFirst(IterableDataset[Any]):
    """An IterableDataset without its first `count` samples."""

    def __init__(self, dataset: IterableDataset[Any], count: int) -> None:
        self.dataset, self.count = dataset, count

    def __iter__(self) -> Iterator[Any]:
        return islice(self.dataset, self.count, None)


def leave_signals(worker_id: int) -> None:
    """Ignore SIGTERM and SIGUSR1: for `DataLoader(..., worker_init_fn=zero_full.leave_signals)`.

    torchrun and Slurm send their signals to the loader's worker processes as well. If a signal ended a
    worker, its rank could not finish the step after which `on_signal` saves.
    """
    for name in ("SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


class RepeatingLoader:
    """Repeats a loader without end. Attributes that it lacks are looked up in the loader.

    Calls `set_epoch` of the loader's sampler before each new pass, so that it shuffles anew.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.passes = 0
        self.is_empty = True
        self.data_iter = iter(loader)

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __next__(self) -> Any:
        batch = next(self.data_iter, END)
        if batch is END:
            self.passes += 1
            self._begin_epoch()
            self.data_iter = iter(self.loader)
            batch = next(self.data_iter, END)
        if batch is END:
            reason = "is empty" if self.is_empty else "cannot be iterated twice, as a generator cannot"
            raise ValueError(f"RepeatingLoader: the loader {reason}, so there is nothing to repeat")
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
        if name == "loader":  # a copy under construction has no attributes yet
            raise AttributeError(name)
        return getattr(self.loader, name)


END = object()  # of an iterator


def synced(batches: Iterable[Any], group: dist.ProcessGroup | None = None) -> Iterator[tuple[Any, bool]]:
    """Yield (batch, whether it counts) until no rank has a batch left.

    At stage 3 every rank takes part in every forward. A rank that runs out of batches before the others gets
    its last one again, which does not count. An all-reduce before each batch tells how many ranks have
    another one. Over NCCL the host waits for its result, unless the group has gloo as well.
    """
    iterator, batch = iter(batches), END
    while True:
        following = next(iterator, END)
        more, *none = _count_ranks(following is not END, batch is END and following is END, group)
        if not more:
            return
        if any(none):
            raise ValueError(f"rank {none.index(1)} has no batch at all. Give every rank at least one")
        batch = batch if following is END else following
        yield batch, following is not END


def _count_ranks(more: bool, none: bool, group: dist.ProcessGroup | None) -> list[int]:
    """Return how many ranks have another batch, then for each rank whether it never had one."""
    if not dist.is_initialized():
        return [int(more), int(none)]
    everyone = group if group is not None else dist.group.WORLD
    numbers = [int(more)] + [0] * dist.get_world_size(everyone)
    numbers[1 + dist.get_rank(everyone)] = int(none)
    summed = torch.tensor(numbers, dtype=torch.int32, device=device_of(everyone))
    dist.all_reduce(summed, group=everyone)
    return summed.tolist()
