"""Where a load gets its values from: named tensors, flattened, in pieces that lie in files.

A tensor's key says what it is:

    parameters/NAME        a parameter, in the best precision that there is: the master, where there is one
    state/ENTRY/NAME       what the optimizer keeps of it, element by element: state/exp_avg/layers.0.weight
    buffers/NAME           a buffer, or another tensor of the module's state dict

Whoever writes files of another kind makes a `Source` of them: what is loaded, exported and inspected is the
same for all.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PARAMETERS, STATE, BUFFERS = "parameters", "state", "buffers"


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
    kind: str  # who has written it, in words: "zero_full", "DeepSpeed, stage 2"
    tensors: dict[str, StoredTensor]  # by key
    aliases: dict[str, str]  # further names of tied parameters, with the name under which they are stored
    # What the optimizer keeps of a parameter as a whole, such as {"step": 7.0}, by the parameter's name.
    numbers: dict[str, dict[str, Any]]
    # The rest, the same for all ranks, as far as it is there: "counters", "groups" (a list of options of the
    # optimizer's parameter groups), "scaler", "lr_scheduler", "client_state", "frozen" (names of parameters),
    # "excluded" (those of them that were left out), "asleep", and in "about" what a person wants to know:
    # "world_size", "stage", "step".
    shared: dict[str, Any]

    @abstractmethod
    def read(self, key: str, start: int, stop: int) -> Tensor:
        """These elements of a flattened tensor, all in one of its pieces: one dimension, on the CPU."""

    @abstractmethod
    def verify(self, key: str, start: int, stop: int) -> None:
        """Raise unless these elements, all in one piece, can be read and are what was written."""

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
