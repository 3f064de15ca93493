"""Base of the DeepSpeed sources: each tensor is stored in one or several tensors of torch.save files."""

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_full._compat import clean_name
from zero_full.checkpoint.source import Source, StoredTensor
from zero_full.checkpoint.torch_file import SavedTensor
from zero_full.errors import CheckpointError
from zero_full.nested import mapped
from zero_full.shard.contents.keys import STEP


@dataclass(frozen=True)
class StoredRanges:
    """The ranges of a flattened tensor, and the location of each in one of several stored parts.

    A parameter and its moments share one object: with many ranks these are most of a source's memory.
    """

    shape: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...]  # (start, stop) of each range, in elements, in order
    places: tuple[tuple[int, int], ...]  # (part, first element in the part) of each range

    @staticmethod
    def of(shape: Iterable[int], ranges: Iterable[tuple[int, int, int, int]]) -> "StoredRanges":
        """Make ranges from (part, start, stop, first element in the part). Empty ranges are left out."""
        found = [each for each in ranges if each[1] < each[2]]
        pieces = tuple((start, stop) for _, start, stop, _ in found)
        return StoredRanges(tuple(shape), pieces, tuple((part, begin) for part, _, _, begin in found))

    @staticmethod
    def whole(shape: Iterable[int], begin: int = 0) -> "StoredRanges":
        """Make the range of a tensor that is stored in one part."""
        shape = tuple(shape)
        return StoredRanges.of(shape, [(0, 0, prod(shape), begin)])

    @staticmethod
    def even(shape: Iterable[int], parts: int, begin: int) -> "StoredRanges":
        """Make the ranges of stage 3: equal, the last ones shorter or empty, at `begin` of each part."""
        shape = tuple(shape)
        numel, each = prod(shape), even_share(shape, parts)
        return StoredRanges.of(
            shape, [(p, p * each, min((p + 1) * each, numel), begin) for p in range(parts)]
        )

    def are_complete_in(self, parts: Sequence[SavedTensor]) -> bool:
        """Return whether the ranges cover all elements and lie within these parts."""
        ends = [0, *(stop for _, stop in self.pieces)]
        complete = [start for start, _ in self.pieces] == ends[:-1] and ends[-1] == prod(self.shape)
        placed = zip(self.pieces, self.places, strict=True)
        return complete and all(
            begin + stop - start <= parts[p].numel for (start, stop), (p, begin) in placed
        )


def even_share(shape: Iterable[int], parts: int) -> int:
    """Return the number of elements in each of `parts` equal parts, with padding."""
    return -(-prod(shape) // parts)


class SavedSource(Source):
    """A source to which tensors are added with their locations."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind = path, kind
        self.tensors = {}
        self.aliases = {}
        self.numbers = {}
        self.shared = {}
        self._places: dict[str, tuple[StoredRanges, Sequence[SavedTensor]]] = {}

    def add(self, key: str, ranges: StoredRanges, parts: Sequence[SavedTensor]) -> None:
        """Add a tensor that is stored in these parts. Raises CheckpointError if they are incomplete."""
        if not ranges.are_complete_in(parts) or len({part.dtype for part in parts}) != 1:
            raise CheckpointError(
                f"{self.path}: the files do not hold all {prod(ranges.shape)} elements of {key}. Copy all "
                "files of one save here, or load another tag"
            )
        self.tensors[key] = StoredTensor(ranges.shape, parts[0].dtype, ranges.pieces)
        self._places[key] = ranges, parts

    def add_groups(self, groups: list[dict[str, Any]], names: Iterable[Iterable[str]]) -> None:
        """Add the options and the parameter names of the optimizer's groups.

        names  of the parameters by group; at stage 3 by sub-group, of which a group may have several
        """
        # DeepSpeed has flattened the parameters: "params" has one entry for a group, or for each sub-group.
        rest = iter(names)
        self.shared["groups"] = options_of(groups)
        self.shared["members"] = [
            [name for named in islice(rest, len(group["params"])) for name in named] for group in groups
        ]

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Read a range of a flattened tensor, within one piece."""
        if start == stop:
            return torch.empty(0, dtype=self.tensors[key].dtype)
        part, first = self._place(key, start)
        return part.read(first, first + stop - start)

    def verify(self, key: str, start: int, stop: int) -> None:
        """Check that the file still exists. Checksums cover whole storages: see `further_checks`."""
        if start != stop:
            self._place(key, start)[0].archive.confirm()

    def further_checks(self) -> Iterator[Callable[[], object]]:
        """Yield a checksum verification for each storage."""
        parts = {(p.archive.path, p.member): p for _, parts in self._places.values() for p in parts}
        return (part.check for part in parts.values())

    def _place(self, key: str, element: int) -> tuple[SavedTensor, int]:
        """Return the part that holds an element, and the element's index in it."""
        ranges, parts = self._places[key]
        number = bisect_right(ranges.pieces, (element, inf)) - 1
        part, begin = ranges.places[number]
        return parts[part], begin + element - ranges.pieces[number][0]

    def completed(self) -> "SavedSource":
        """Normalize names and compute the checkpoint's identity, once all tensors are added."""
        self.tensors = {clean_name(key): stored for key, stored in self.tensors.items()}
        self._places = {clean_name(key): place for key, place in self._places.items()}
        self.aliases = {clean_name(alias): clean_name(name) for alias, name in self.aliases.items()}
        self.numbers = {clean_name(key): numbers for key, numbers in self.numbers.items()}
        for key in ("frozen", "members"):
            if key in self.shared:
                self.shared[key] = mapped(clean_name, self.shared[key])
        # The CRCs in the zip directories identify the contents, without reading the tensors.
        files = {part.archive.path: part.archive for _, parts in self._places.values() for part in parts}
        checksums = [(path.name, archive.checksum) for path, archive in sorted(files.items())]
        self.identity = f"{zlib.crc32(repr(checksums).encode()):08x}"
        return self


def with_values(nest: Any) -> Any:
    """Return the nested structure with every `SavedTensor` read from its file."""
    return mapped(lambda leaf: leaf.whole() if isinstance(leaf, SavedTensor) else leaf, nest)


def numbers_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a parameter's optimizer state that are single numbers.

    Some of DeepSpeed's optimizers count steps with an int. It becomes a tensor, as in torch.
    """
    single = {k: v.whole() for k, v in state.items() if isinstance(v, SavedTensor) and not v.shape}
    found = {k: v for k, v in state.items() if isinstance(v, (bool, int, float))} | single
    return {k: torch.as_tensor(v, dtype=torch.float32) if k == STEP else v for k, v in found.items()}


def python_values(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers as Python values, for comparison and messages."""
    return {k: v.item() if isinstance(v, Tensor) else v for k, v in numbers.items()}


def states_of(base: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the states in an optimizer's state dict, by group.

    Some of DeepSpeed's optimizers keep one step per group. It is added to each state, as torch's have it.
    """
    found = []
    for group in base["param_groups"]:
        common = {STEP: group[STEP]} if STEP in group else {}
        states = [base["state"].get(place, {}) for place in group["params"]]
        found.append([{**common, **state} if state else {} for state in states])
    return found


def options_of(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the options of an optimizer's groups, without the parameters and the step."""
    return [{k: with_values(v) for k, v in group.items() if k not in ("params", STEP)} for group in groups]
