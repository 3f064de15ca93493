"""Adapter of a `Source` for loading: translates the model's keys to those of the checkpoint."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from zero_full.checkpoint.resharding import fill
from zero_full.checkpoint.source import Source, StoredTensor
from zero_full.shard.contents.state import BUFFERS, PARAMETERS, Chunk, entry_of, state_key


class SourceValues:
    """A `Source` as `Values`, under the model's keys.

    The model may know a tied parameter by another name than the source. `place` must be complete before the
    first use of the other members.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.place: dict[str, str] = {}  # key in the model -> key in the source, of each tensor

    def _entries(self) -> Iterator[tuple[str, str]]:
        """Yield the key in the model and the key in the source of each optimizer state entry."""
        reverse: dict[str, list[str]] = {}
        for mine, theirs in self.place.items():
            reverse.setdefault(theirs, []).append(mine)
        for key in self.source.tensors:
            if found := entry_of(key):
                for mine in reverse.get(found[0], ()):
                    yield state_key(mine, found[1]), key

    @cached_property
    def places(self) -> dict[str, str]:
        """Keys in the source of all readable tensors, by key in the model."""
        return {**self.place, **dict(self._entries())}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor, by key in the model."""
        return {mine: self.source.tensors[theirs].shape for mine, theirs in self.places.items()}

    @cached_property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Stored dtype of each tensor, by key in the model."""
        return {mine: self.source.tensors[theirs].dtype for mine, theirs in self.places.items()}

    @cached_property
    def numbers(self) -> Mapping[str, Mapping[str, Any]]:
        """Optimizer state per whole parameter, such as `step`, by key in the model."""
        return {mine: self.source.numbers.get(theirs, {}) for mine, theirs in self.place.items()}

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Verify the stored data of these chunks. Raises CheckpointError if some are missing or damaged."""
        places = self.places
        for chunk in chunks:
            stored = places[chunk.key]
            assert prod(chunk.shape) == self.source.tensors[stored].numel, chunk
            for start, stop in self.source.parts(stored, chunk.start, chunk.stop):
                self.source.verify(stored, start, stop)

    def read(self, chunks: Sequence[Chunk]) -> None:
        """Read the values of the chunks, converted to their dtypes."""
        places = self.places
        fill(
            self.source,
            [replace(chunk, key=places[chunk.key]) for chunk in chunks],
        )


def is_of(key: str, parts: Iterable[str]) -> bool:
    """Return whether the key is of a parameter or buffer in one of these parts of the model."""
    kind, _, part = key.partition("/")[0].partition("@")
    return kind in (PARAMETERS, BUFFERS) and part in parts


def differences(name: str, tensor: Tensor, stored: StoredTensor) -> Iterator[str]:
    """Yield a message for each mismatch, in shape or dtype, of a tensor and its stored counterpart."""
    if tuple(tensor.shape) != stored.shape:
        yield f"{name} has shape {tuple(tensor.shape)}, but {stored.shape} in the checkpoint"
    if tensor.dtype != stored.dtype and not (tensor.is_floating_point() and stored.dtype.is_floating_point):
        yield f"{name} is {tensor.dtype}, but {stored.dtype} in the checkpoint"
