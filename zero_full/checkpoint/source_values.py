"""A source as what a load fills a run from: under the names that the model has."""

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
    """A source as `Values`: under the names that the model has, which may be others of tied parameters.

    `place` must be complete before anything is asked for.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.place: dict[str, str] = {}  # of each tensor of the model, by key: its key in the source

    def _entries(self) -> Iterator[tuple[str, str]]:
        """Each entry of the optimizer's state: its key here, and there."""
        reverse: dict[str, list[str]] = {}
        for mine, theirs in self.place.items():
            reverse.setdefault(theirs, []).append(mine)
        for key in self.source.tensors:
            if found := entry_of(key):
                for mine in reverse.get(found[0], ()):
                    yield state_key(mine, found[1]), key

    @cached_property
    def places(self) -> dict[str, str]:
        """Of everything that can be read, by its key here."""
        return {**self.place, **dict(self._entries())}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of each tensor."""
        return {mine: self.source.tensors[theirs].shape for mine, theirs in self.places.items()}

    @cached_property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """In which they are stored."""
        return {mine: self.source.tensors[theirs].dtype for mine, theirs in self.places.items()}

    @cached_property
    def numbers(self) -> Mapping[str, Mapping[str, Any]]:
        """What the optimizer keeps of each parameter as a whole."""
        return {mine: self.source.numbers.get(theirs, {}) for mine, theirs in self.place.items()}

    def check(self, chunks: Sequence[Chunk]) -> None:
        """CheckpointError unless all of it is there, as it was written."""
        places = self.places
        for chunk in chunks:
            stored = places[chunk.key]
            assert prod(chunk.shape) == self.source.tensors[stored].numel, chunk
            for start, stop in self.source.parts(stored, chunk.start, chunk.stop):
                self.source.verify(stored, start, stop)

    def read(self, chunks: Sequence[Chunk]) -> None:
        """Put values into the chunks, converted to their types."""
        places = self.places
        fill(
            self.source,
            [replace(chunk, key=places[chunk.key]) for chunk in chunks],
        )


def is_of(key: str, parts: Iterable[str]) -> bool:
    """Whether it is a parameter or a buffer that concerns a rank with these parts of the model."""
    kind, _, part = key.partition("/")[0].partition("@")
    return kind in (PARAMETERS, BUFFERS) and part in parts


def differences(name: str, tensor: Tensor, stored: StoredTensor) -> Iterator[str]:
    """In words, why what is stored is not this tensor's."""
    if tuple(tensor.shape) != stored.shape:
        yield f"{name} has shape {tuple(tensor.shape)}, but {stored.shape} in the checkpoint"
    if tensor.dtype != stored.dtype and not (tensor.is_floating_point() and stored.dtype.is_floating_point):
        yield f"{name} is {tensor.dtype}, but {stored.dtype} in the checkpoint"
