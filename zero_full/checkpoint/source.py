"""Interface of a readable checkpoint: named, flattened tensors, stored in pieces in files.

A tensor's key has its kind and name: see `shard/contents/state.py`.

A reader of another file format subclasses `Source`. Load, export and inspection work with every subclass.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_full.checkpoint.description import DescribedTensor
from zero_full.shard.contents.keys import entry_of, state_key
from zero_full.shard.contents.state import Chunk


@dataclass(frozen=True)
class StoredTensor(DescribedTensor):
    """Description of a tensor in a checkpoint. Its pieces cover all elements without gaps."""

    dtype: torch.dtype
    pieces: tuple[tuple[int, int], ...]  # (start, stop) of each stored range of elements, in order


class Source(ABC):
    """A checkpoint that is open for reading. Raises CheckpointError if it is damaged."""

    path: Path  # of the checkpoint's folder
    identity: str = ""  # differs between two saves to the same path
    savers: Sequence[int] = ()  # ranks with private data, see `private`
    kind: str  # the writer, as text: "zero_full", "DeepSpeed, stage 2"
    tensors: dict[str, StoredTensor]  # by key
    aliases: dict[str, str]  # other name of a tied parameter -> the name under which it is stored
    # Optimizer state per whole parameter, such as {"step": tensor(7.)}, by key parameters/NAME.
    numbers: dict[str, dict[str, Any]]
    # Everything else that is equal on all ranks. Each key may be missing: "counters", "groups" (the options
    # of each parameter group of the optimizer), "members" (the parameter names of each group), "scaler",
    # "lr_scheduler", "schedule" (the scheduler's class name), "client_state", "frozen" (parameter names),
    # "excluded" (frozen parameters that were not saved), "asleep", and "about", a summary for people:
    # "world_size", "stage", "step".
    shared: dict[str, Any]

    @abstractmethod
    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Read a range of a flattened tensor, within one piece, as a one-dimensional tensor on the CPU."""

    def read_into(self, key: str, start: int, target: Tensor) -> None:
        """Fill `target` with the elements from `start` on, converted to its dtype."""
        target.copy_(self.read(key, start, start + target.numel()))

    @abstractmethod
    def verify(self, key: str, start: int, stop: int) -> None:
        """Raise unless this range, within one piece, can be read and is undamaged."""

    def further_checks(self) -> Iterator[Callable[[], object]]:
        """Yield checks that `verify` omits because they read more than the range. Each raises on failure."""
        return iter(())

    def private(self, rank: int) -> dict[str, Any]:
        """Return the private data of one rank, such as its random number generators' states."""
        return {}

    def close(self) -> None:  # noqa: B027 (most sources keep no file open)
        """Close the files."""

    def parts(self, key: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the range split at piece boundaries."""
        for first, last in self.tensors[key].pieces:
            if max(first, start) < min(last, stop):
                yield max(first, start), min(last, stop)

    def read_across(self, key: str, start: int, stop: int) -> Tensor:
        """Read a range of a flattened tensor that may span several pieces."""
        parts = [self.read(key, *part) for part in self.parts(key, start, stop)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.tensors[key].dtype)


class SourceValues:
    """Reshard a `Source`: read this rank's ranges of the model's tensors from the ranges that were stored.

    Every rank reads only what it needs, so that the cost does not concentrate on one rank at large world
    sizes. The model may know a tied parameter by another name than the source. `source_keys` must be
    complete before the first use of the other members.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.source_keys: dict[str, str] = {}  # key in the model -> key in the source, of each tensor

    @cached_property
    def all_keys(self) -> dict[str, str]:
        """Keys in the source of all readable tensors and optimizer state entries, by key in the model."""
        keys, reverse = dict(self.source_keys), dict[str, list[str]]()
        for key, stored in self.source_keys.items():
            reverse.setdefault(stored, []).append(key)
        for stored in self.source.tensors:
            if found := entry_of(stored):
                keys |= {state_key(key, found[1]): stored for key in reverse.get(found[0], ())}
        return keys

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor, by key in the model."""
        return {key: self.source.tensors[stored].shape for key, stored in self.all_keys.items()}

    @cached_property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Stored dtype of each tensor, by key in the model."""
        return {key: self.source.tensors[stored].dtype for key, stored in self.all_keys.items()}

    @cached_property
    def numbers(self) -> Mapping[str, Mapping[str, Any]]:
        """Optimizer state per whole parameter, such as `step`, by key in the model."""
        return {key: self.source.numbers.get(stored, {}) for key, stored in self.source_keys.items()}

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Verify the stored data of these chunks. Raises CheckpointError if some are missing or damaged."""
        for chunk in chunks:
            stored = self.all_keys[chunk.key]
            assert prod(chunk.shape) == self.source.tensors[stored].numel, chunk
            for first, last in chunk.runs():
                for start, stop in self.source.parts(stored, first, last):
                    self.source.verify(stored, start, stop)

    def read(self, chunks: Sequence[Chunk]) -> None:
        """Read the values of the chunks, converted to their dtypes."""
        for chunk in chunks:
            stored, values, done = self.all_keys[chunk.key], chunk.values.detach(), 0
            for first, last in chunk.runs():
                for start, stop in self.source.parts(stored, first, last):
                    self.source.read_into(stored, start, values[done : done + stop - start])
                    done += stop - start
