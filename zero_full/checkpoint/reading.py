"""Open a checkpoint folder as a `Source`: of zero_full's own format, or of DeepSpeed's."""

from collections.abc import Iterator, Mapping, Sequence
from heapq import merge
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from zero_full.checkpoint.deepspeed import is_deepspeeds, open_deepspeed
from zero_full.checkpoint.folder import MANIFEST, complete, digest_of, folder_of, latest_tag, read_manifest
from zero_full.checkpoint.rank_file import Range, RankFile
from zero_full.checkpoint.source import Source, StoredTensor
from zero_full.errors import CheckpointError
from zero_full.formatting import listed

KINDS: dict[str, type] = {  # required types of plain data, by name
    **dict.fromkeys(("aliases", "client_state", "counters", "others", "scaler", "stepper"), dict),
    **dict.fromkeys(("asleep", "excluded", "frozen", "groups", "members"), list),
    **dict.fromkeys(("buffers", "kept", "random"), dict),  # private data of each rank
}


class NativeSource(Source):
    """A checkpoint in zero_full's own format. `folder.py` describes the files."""

    def __init__(self, folder: Path) -> None:
        self.path, self.kind = folder, "zero_full"
        self.manifest = read_manifest(folder)
        self.identity, self.savers = digest_of(self.manifest), self.manifest["ranks"]
        self.files: list[RankFile] = []
        try:
            for rank in self.manifest["ranks"]:
                self.files.append(RankFile(folder, int(rank), self.manifest["files"]))
            self._merge()
        except BaseException as error:
            self.close()
            if isinstance(error, Exception) and not isinstance(error, CheckpointError):
                raise CheckpointError(f"{folder} is damaged: {error!r}. Load another tag") from error
            raise

    def _merge(self) -> None:
        self.ranges: dict[str, list[Range]] = {}
        self.numbers, self.shared = {}, {}
        for file in self.files:
            for each in file.ranges:
                self.ranges.setdefault(each.key, []).append(each)
            _check_kinds(file.plain["private"])
            self.numbers |= file.plain["numbers"]
            self.shared |= file.plain["shared"]
        _check_kinds(self.shared)
        self.tensors = {key: _whole(key, ranges, self.path) for key, ranges in self.ranges.items()}
        self.aliases = self.shared.get("aliases", {})
        about: Mapping[str, Any] = self.manifest["about"]
        self.shared["about"] = dict(about)

    def private(self, rank: int) -> dict[str, Any]:
        """Return the private data of one rank."""
        return next((dict(file.plain["private"]) for file in self.files if file.rank == rank), {})

    def parts(self, key: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the range split where the data of a file ends, or a row of a block."""
        if self.ranges[key][0].block is None:
            yield from super().parts(key, start, stop)
        else:
            yield from merge(*(each.within(start, stop) for each in self.ranges[key]))

    def _range(self, key: str, start: int, stop: int) -> Range:
        for each in self.ranges[key]:
            if start == stop or next(each.within(start, stop), None) == (start, stop):
                return each
        raise AssertionError(f"{key}: {start} to {stop} are not in one range")

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Verify and read a range of elements that one rank has written."""
        self.verify(key, start, stop)
        found = self._range(key, start, stop)
        return found.file.tensor_at(found.bytes_of(start, stop)[0], stop - start, found.dtype)

    def read_into(self, key: str, start: int, target: Tensor) -> None:
        """Read directly into `target` if it is contiguous, on the CPU and of the stored dtype."""
        found = self._range(key, start, start + target.numel())
        if target.device.type != "cpu" or not target.is_contiguous() or target.dtype != found.dtype:
            return super().read_into(key, start, target)
        self.verify(key, start, start + target.numel())
        found.file.fill(target, found.bytes_of(start, start + target.numel())[0])
        increment_version(target)  # autograd must notice the write, which bypasses torch

    def verify(self, key: str, start: int, stop: int) -> None:
        """Verify the checksums of the blocks that hold these elements."""
        found = self._range(key, start, stop)
        found.file.verify(*found.bytes_of(start, stop))

    def close(self) -> None:
        """Close all files."""
        for file in self.files:
            file.close()


def _check_kinds(values: Mapping[str, Any]) -> None:
    wrong = [name for name, kind in KINDS.items() if not isinstance(values.get(name, kind()), kind)]
    if wrong or not all(isinstance(group, dict) for group in values.get("groups", ())):
        raise ValueError(f"the type of {listed(wrong or ['groups'])} is wrong")


def _whole(key: str, ranges: list[Range], path: Path) -> StoredTensor:
    """Return the tensor that the ranges form. Raises CheckpointError if they leave gaps or disagree."""
    ranges.sort(key=lambda each: (0 if each.block is None else each.block.offset, each.start))
    first = ranges[0]
    blocks = [*dict.fromkeys(each.block for each in ranges)]
    if blocks == [None]:
        pieces = tuple((each.start, each.stop) for each in ranges)
        complete = _is_complete(pieces, prod(first.shape))
    else:  # read by `NativeSource.parts`
        pieces = ((0, prod(first.shape)),)
        cut = [block for block in blocks if block is not None and block.size]
        complete = cut == [block for block in blocks if block is None or block.size]
        complete = complete and len({block.dim for block in cut}) == 1 and cut[0].dim < len(first.shape)
        ends = [(block.offset, block.offset + block.size) for block in cut]
        complete = complete and _is_complete(ends, first.shape[cut[0].dim])
        for block in cut if complete else ():
            theirs = [(each.start, each.stop) for each in ranges if each.block == block]
            complete = complete and _is_complete(theirs, prod(block.shape) // block.pitch * block.row)
    tensor = StoredTensor(first.shape, first.dtype, pieces)
    if not complete:
        elements = [(each.start, each.stop) for each in ranges]
        raise CheckpointError(
            f"{path} is damaged: the files have elements {elements} of {key}, which has {tensor.numel}. "
            "Load another tag"
        )
    for each in ranges:
        if (each.shape, each.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{path} is damaged: {key} has shape {first.shape} and {first.dtype} in {first.file.path}, "
                f"but {each.shape} and {each.dtype} in {each.file.path}. Load another tag"
            )
    return tensor


def _is_complete(ranges: Sequence[tuple[int, int]], length: int) -> bool:
    """Return whether sorted ranges cover everything from 0 to `length`, and nothing twice."""
    ends = ranges[0][0] == 0 and ranges[-1][1] == length
    return ends and all(one[1] == other[0] for one, other in pairwise(ranges))


def _is_native(directory: Path, tag: str) -> bool:
    """Return whether a complete checkpoint of zero_full with this tag exists, also while it is replaced."""
    try:
        return (folder_of(directory, tag) / MANIFEST).exists()
    except CheckpointError:
        return False


def holds_latest(directory: Path) -> bool:
    """Return whether the folder has a checkpoint that can be opened without a tag; False: it has none at all.

    Raises CheckpointError if the folder has complete checkpoints, but none can be opened without a tag.
    """
    if (directory / MANIFEST).exists() or latest_tag(directory) is not None or is_deepspeeds(directory):
        return True
    tags = [*complete(directory)]
    if directory.is_dir():
        tags += [each.name for each in sorted(directory.iterdir()) if is_deepspeeds(each)]
    if tags:
        raise CheckpointError(
            f"{directory} has checkpoints ({listed(tags)}), but no file `latest` that names the one to load. "
            "Pass its tag, or write it into that file. Nothing was loaded"
        )
    return False


def open_checkpoint(directory: Path, tag: str | None = None) -> Source:
    """Open the checkpoint with this tag, or the latest one, or `directory` if it is itself a checkpoint."""
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} does not exist or is not a folder. Pass the folder of save_checkpoint"
        )
    wanted = latest_tag(directory) if tag is None else tag
    if wanted is None and (directory / MANIFEST).exists():
        return NativeSource(directory)
    if wanted is None or not _is_native(directory, wanted):
        foreign = open_deepspeed(directory, tag)
        if foreign is not None:
            return foreign
    if wanted is None:
        raise CheckpointError(f"{directory} has no file `latest`. Pass a tag, or the checkpoint's own folder")
    return NativeSource(folder_of(directory, wanted))
