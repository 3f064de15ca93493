"""A source whose tensors lie in tensors of torch.save's files: one in one, or cut into several."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_full.checkpoint.failure import CheckpointError
from zero_full.checkpoint.source import PARAMETERS, Source, StoredTensor
from zero_full.checkpoint.torch_file import SavedTensor
from zero_full.shard.contents import STEP
from zero_full.trees import mapped


@dataclass(frozen=True)
class Cuts:
    """How a flattened tensor is cut into ranges, each of which lies in one of several parts.

    A parameter's moments are cut as it is: with many ranks this is most of what is known of a checkpoint.
    """

    shape: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...]  # ranges of elements, in order
    places: tuple[tuple[int, int], ...]  # for each of them: which part it is in, and from which element on

    @staticmethod
    def of(shape: Iterable[int], ranges: Iterable[tuple[int, int, int, int]]) -> "Cuts":
        """From part, first element, last one, and place in the part; empty ranges are left out."""
        found = [each for each in ranges if each[1] < each[2]]
        pieces = tuple((start, stop) for _, start, stop, _ in found)
        return Cuts(tuple(shape), pieces, tuple((part, begin) for part, _, _, begin in found))

    @staticmethod
    def whole(shape: Iterable[int], begin: int = 0) -> "Cuts":
        """All in one part."""
        shape = tuple(shape)
        return Cuts.of(shape, [(0, 0, prod(shape), begin)])

    @staticmethod
    def even(shape: Iterable[int], parts: int, begin: int) -> "Cuts":
        """In equal ranges, the last ones shorter or empty, each in its part from `begin` on: stage 3."""
        shape = tuple(shape)
        numel, each = prod(shape), even_share(shape, parts)
        return Cuts.of(shape, [(p, p * each, min((p + 1) * each, numel), begin) for p in range(parts)])

    def fit(self, parts: Sequence[SavedTensor]) -> bool:
        """Whether the ranges are all elements, and lie in these parts."""
        ends = [0, *(stop for _, stop in self.pieces)]
        complete = [start for start, _ in self.pieces] == ends[:-1] and ends[-1] == prod(self.shape)
        placed = zip(self.pieces, self.places, strict=True)
        return complete and all(
            begin + stop - start <= parts[p].numel for (start, stop), (p, begin) in placed
        )


def even_share(shape: Iterable[int], parts: int) -> int:
    """How many elements each of several equal parts has, with padding."""
    return -(-prod(shape) // parts)


class SavedSource(Source):
    """A source that is made by saying of each tensor where it is."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind = path, kind
        self.tensors = {}
        self.aliases = {}
        self.numbers = {}
        self.shared = {}
        self._places: dict[str, tuple[Cuts, Sequence[SavedTensor]]] = {}

    def add(self, key: str, cuts: Cuts, parts: Sequence[SavedTensor]) -> None:
        """A tensor that lies in these parts."""
        if not cuts.fit(parts) or len({part.dtype for part in parts}) != 1:
            raise CheckpointError(
                f"{self.path}: the files do not hold all {prod(cuts.shape)} elements of {key}"
            )
        self.tensors[key] = StoredTensor(cuts.shape, parts[0].dtype, cuts.pieces)
        self._places[key] = cuts, parts

    def note(self, name: str, numbers: Mapping[str, Any]) -> None:
        """What an optimizer keeps of a whole parameter: the step is a tensor, as torch's have it."""
        told = {k: torch.tensor(v) if k == STEP else v for k, v in numbers.items()}
        self.numbers[f"{PARAMETERS}/{name}"] = told

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """These elements, all in one of its pieces."""
        if start == stop:
            return torch.empty(0, dtype=self.tensors[key].dtype)
        part, first = self._place(key, start)
        return part.read(first, first + stop - start)

    def verify(self, key: str, start: int, stop: int) -> None:
        """Compare the storage that they lie in with the checksum that torch.save has written."""
        if start != stop:
            self._place(key, start)[0].check()

    def _place(self, key: str, element: int) -> tuple[SavedTensor, int]:
        """The part that an element is in, and which it is there."""
        cuts, parts = self._places[key]
        number = bisect_right(cuts.pieces, (element, inf)) - 1
        part, begin = cuts.places[number]
        return parts[part], begin + element - cuts.pieces[number][0]


def with_values(nest: Any) -> Any:
    """The nest with tensors in place of what is still in a file."""
    return mapped(lambda leaf: leaf.whole() if isinstance(leaf, SavedTensor) else leaf, nest)


def numbers_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Those entries of an optimizer's state that are one number for the whole parameter."""
    single = {k: v.whole().item() for k, v in state.items() if isinstance(v, SavedTensor) and not v.shape}
    plain = {k: v for k, v in state.items() if isinstance(v, (bool, int, float))}
    return {k: float(v) if k == STEP else v for k, v in {**single, **plain}.items()}


def options_of(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The options of an optimizer's groups, without which parameters they are of, and how far they are."""
    return [{k: with_values(v) for k, v in group.items() if k not in ("params", "step")} for group in groups]
