"""Where a load gets its values from: named tensors, flattened, in pieces that lie in files.

A tensor's key says what it is: see `shard/contents/state.py`.

Whoever writes files of another kind makes a `Source` of them: what is loaded, exported and inspected is the
same for all.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in files."""

    shape: tuple[int, ...]  # of the whole
    dtype: torch.dtype
    pieces: tuple[tuple[int, int], ...]  # ranges of its elements, in order: together all of them

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes its elements take."""
        return self.numel * self.dtype.itemsize


class Source(ABC):
    """A checkpoint that is open for reading. What is wrong with it is a `CheckpointError`."""

    path: Path  # of the folder
    identity: str = ""  # what tells it from another one that may take its place
    savers: Sequence[int] = ()  # the ranks that have saved something for themselves
    kind: str  # who has written it, in words: "zero_full", "DeepSpeed, stage 2"
    tensors: dict[str, StoredTensor]  # by key
    aliases: dict[str, str]  # further names of tied parameters, with the name under which they are stored
    # What the optimizer keeps of a parameter as a whole, such as {"step": tensor(7.)}, by parameters/NAME.
    numbers: dict[str, dict[str, Any]]
    # The rest, the same for all ranks, as far as it is there: "counters", "groups" (a list of options of the
    # optimizer's parameter groups), "members" (the names of each group's parameters), "scaler",
    # "lr_scheduler", "schedule" (the name of its class), "client_state", "frozen" (names of parameters),
    # "excluded" (those of them that were left out), "asleep", and in "about" what a person wants to know:
    # "world_size", "stage", "step".
    shared: dict[str, Any]

    @abstractmethod
    def read(self, key: str, start: int, stop: int) -> Tensor:
        """These elements of a flattened tensor, all in one of its pieces: one dimension, on the CPU."""

    def read_into(self, key: str, start: int, target: Tensor) -> None:
        """Put as many elements from `start` on as fit into a tensor there, converted to its type."""
        target.copy_(self.read(key, start, start + target.numel()))

    @abstractmethod
    def verify(self, key: str, start: int, stop: int) -> None:
        """Raise unless these elements, all in one piece, can be read and are what was written."""

    def further_checks(self) -> Iterator[Callable[[], object]]:
        """What `verify` leaves out, as it would read more than what is asked for. Each raises if it fails."""
        return iter(())

    def private(self, rank: int) -> dict[str, Any]:
        """What one rank has saved for itself, such as random numbers' states."""
        return {}

    def close(self) -> None:  # noqa: B027 (most have nothing to let go of)
        """Let go of files."""

    def parts(self, key: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The range, cut where one piece ends and another begins."""
        for first, last in self.tensors[key].pieces:
            if max(first, start) < min(last, stop):
                yield max(first, start), min(last, stop)

    def read_across(self, key: str, start: int, stop: int) -> Tensor:
        """These elements of a flattened tensor, wherever they lie."""
        parts = [self.read(key, *part) for part in self.parts(key, start, stop)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.tensors[key].dtype)
