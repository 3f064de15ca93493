"""Data loading: the sharded loader of `initialize`, a repeating loader, and loops that end on all ranks.

[Note: the place in the data] In a pass, all ranks together take the next samples of one shuffled order. So
the place is two numbers: the number of the pass, and the samples that all ranks together have taken from it.
They do not depend on the number of ranks or the size of a batch.
"""

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from zero_full._compat import device_of


@dataclass
class DataPlace:
    """The place in the data of all ranks together. See [Note: the place in the data]."""

    number: int = 0  # of the pass
    samples: int = 0  # taken from this pass, all ranks


class RankLoader:
    """Yields this rank's micro-batches. Every pass is shuffled anew, with the same order on all ranks.

    Its state is the place after the last batch that it yielded, see [Note: the place in the data]. After a
    load the next loop continues at that place, also in a pass that was left by `break`. Without a load, a
    loop after `break` begins a new pass. An IterableDataset is read from its beginning to reach the place.
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
        self.place = DataPlace()
        self.begun = False  # an iterator has started at the place
        self.loads = 0  # calls of load_state_dict
        # torch draws a number whenever an iterator starts. It has a generator of its own: a run that resumes
        # in the middle of a pass starts one iterator more, and would draw other numbers from the global one.
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[Any]:
        while True:
            place, loads = self._begin(), self.loads
            passed, each = place.samples, self.batch_size * self.world
            for batch in self._rest(place):
                place.samples = passed = passed + each
                yield batch
                if self.loads != loads and not self.begun:
                    break  # a checkpoint was loaded inside the loop: continue from its place
            else:
                if self.place is place:
                    self.place, self.begun = DataPlace(place.number + 1), False
                return

    def _begin(self) -> DataPlace:
        """Return the place at which a new iterator starts."""
        if self.begun:  # an earlier loop was left in this pass, or is still running
            self.place = DataPlace(self.place.number + 1)
        self.begun = True
        return self.place

    def _rest(self, place: DataPlace) -> DataLoader[Any]:
        """Return a loader of this rank's batches from a place to the end of the pass."""
        if isinstance(self.dataset, IterableDataset):
            had = -(-place.samples // self.world)
            rest = _Behind(self.dataset, had) if had else self.dataset
            return self._batches(rest, batch_size=self.batch_size, drop_last=self.drop_last)
        return self._batches(self.dataset, batch_sampler=_Deal(self, place))

    def _batches(self, dataset: Dataset[Any], **how: Any) -> DataLoader[Any]:
        return DataLoader(dataset, collate_fn=self.collate_fn, generator=self.generator, **how)

    def __len__(self) -> int:
        """Return the number of batches in a whole pass."""
        return len(self._rest(DataPlace()))

    def state_dict(self) -> dict[str, int]:
        """Return the place, which is equal on all ranks after the same number of batches."""
        return {"pass": self.place.number, "samples": self.place.samples, "of": self._samples()}

    def _samples(self) -> int:
        """Return the number of samples; -1 for an IterableDataset."""
        return -1 if isinstance(self.dataset, IterableDataset) else len(self.dataset)  # type: ignore[arg-type]

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a saved place, with this run's number of ranks and batch size."""
        if state["of"] != self._samples():
            raise ValueError(
                f"the data had {state['of']} samples when this was saved, and has {self._samples()} now, so "
                "the place in them means nothing (-1: an IterableDataset). To begin the data anew, set "
                "engine.training_dataloader = None before load_checkpoint"
            )
        self.place, self.begun, self.loads = DataPlace(state["pass"], state["samples"]), False, self.loads + 1


class _Deal(Sampler[list[int]]):
    """Batch sampler of one rank, from a place to the end of the pass."""

    def __init__(self, loader: RankLoader, place: DataPlace) -> None:
        self.loader, self.place = loader, place
        self.numel = len(loader.dataset)  # type: ignore[arg-type]
        rest = max(0, self.numel - place.samples)
        self.each = rest // loader.world if loader.drop_last else -(-rest // loader.world)

    def __len__(self) -> int:
        size = self.loader.batch_size
        return self.each // size if self.loader.drop_last else -(-self.each // size)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._numbers().split(self.loader.batch_size)[: len(self)]:
            yield batch.tolist()

    def _numbers(self) -> Tensor:
        """Return this rank's samples, dealt in turn; ranks that would have one less repeat a first one."""
        generator = torch.Generator().manual_seed(self.place.number)
        order = torch.randperm(self.numel, generator=generator, device="cpu")
        turns = torch.arange(self.each, device="cpu") * self.loader.world
        return order[(self.place.samples + self.loader.rank + turns) % max(1, self.numel)]


class _Behind(IterableDataset[Any]):
    """An IterableDataset without its first `had` samples."""

    def __init__(self, dataset: IterableDataset[Any], had: int) -> None:
        self.dataset, self.had = dataset, had

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.dataset), self.had, None)


def leave_signals(worker_id: int) -> None:
    """Ignore SIGTERM and SIGUSR1: for `DataLoader(..., worker_init_fn=zero_full.leave_signals)`.

    torchrun and Slurm send their signals to the loader's worker processes as well. If a signal ended a
    worker, its rank could not finish the step after which `on_signal` saves.
    """
    for name in ("SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


class RepeatingLoader:
    """Repeats a loader without end. Attributes that it does not have are the loader's.

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
        if name == "loader":  # a copy under construction has no attributes yet
            raise AttributeError(name)
        return getattr(self.loader, name)


NOTHING = object()


def synced(batches: Iterable[Any], group: dist.ProcessGroup | None = None) -> Iterator[tuple[Any, bool]]:
    """Yield (batch, whether it counts) until no rank has a batch left.

    At stage 3 every rank takes part in every forward. A rank that runs out of batches before the others gets
    its last one again, which does not count. An all-reduce before each batch tells how many ranks have
    another one. Over NCCL the host waits for its result, unless the group has gloo as well.
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
    """Return how many ranks have another batch, then for each rank whether it never had one."""
    if not dist.is_initialized():
        return [int(more), int(none)]
    everyone = group if group is not None else dist.group.WORLD
    numbers = [int(more)] + [0] * dist.get_world_size(everyone)
    numbers[1 + dist.get_rank(everyone)] = int(none)
    summed = torch.tensor(numbers, dtype=torch.int32, device=device_of(everyone))
    dist.all_reduce(summed, group=everyone)
    return summed.tolist()
