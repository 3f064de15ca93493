"""Reshard a checkpoint: read this rank's ranges of the model's tensors from the ranges that were stored.

Every rank reads only what it needs, so that the cost does not concentrate on one rank at large world sizes.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch

from zero_full.checkpoint.source import Source
from zero_full.shard.contents.state import Chunk, entry_of, state_key


class SourceValues:
    """A `Source` as `Values`, under the model's keys.

    The model may know a tied parameter by another name than the source. `source_keys` must be complete before
    the first use of the other members.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.source_keys: dict[str, str] = {}  # key in the model -> key in the source, of each tensor

    def _entries(self) -> Iterator[tuple[str, str]]:
        """Yield the key in the model and the key in the source of each optimizer state entry."""
        reverse: dict[str, list[str]] = {}
        for key, stored in self.source_keys.items():
            reverse.setdefault(stored, []).append(key)
        for stored in self.source.tensors:
            if found := entry_of(stored):
                for key in reverse.get(found[0], ()):
                    yield state_key(key, found[1]), stored

    @cached_property
    def all_keys(self) -> dict[str, str]:
        """Keys in the source of all readable tensors, by key in the model."""
        return {**self.source_keys, **dict(self._entries())}

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
            for start, stop in self.source.parts(stored, chunk.start, chunk.stop):
                self.source.verify(stored, start, stop)

    def read(self, chunks: Sequence[Chunk]) -> None:
        """Read the values of the chunks, converted to their dtypes."""
        for chunk in chunks:
            stored, values = self.all_keys[chunk.key], chunk.values.detach()
            for start, stop in self.source.parts(stored, chunk.start, chunk.stop):
                self.source.read_into(stored, start, values[start - chunk.start : stop - chunk.start])
