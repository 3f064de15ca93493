"""One rank's files of a checkpoint: tensor ranges as safetensors, and JSON that describes them."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_full.checkpoint import disk
from zero_full.checkpoint.json_values import Encoder, decode
from zero_full.checkpoint.safetensors_writer import CODES, DTYPES, TensorEntry, bytes_of, header_of
from zero_full.errors import CheckpointError
from zero_full.kernels.crc32 import crc32_function
from zero_full.layout import LocalBlock
from zero_full.shard.contents.state import Chunk

COPY_BYTES = 1 << 24  # per copy from an accelerator
PLAIN = "plain"  # key prefix of tensors within plain data


def names_of(rank: int) -> tuple[str, str]:
    """Return the names of a rank's two files: tensor data, and JSON that describes them."""
    return f"rank_{rank:05}.safetensors", f"rank_{rank:05}.json"


@dataclass(frozen=True)
class Payload:
    """The data that one rank will save."""

    rank: int
    chunks: Sequence[Chunk]  # this rank's share of each tensor
    plain: Any  # plain data, encoded as JSON values
    plain_tensors: Sequence[Tensor]  # the tensors within the plain data


def payload_of(rank: int, chunks: Iterable[Chunk], plain: Mapping[str, Any]) -> Payload:
    """Encode the data that a rank saves: its share of each tensor, and plain data.

    plain  "numbers" and "private" of this rank, and on the first rank also "shared"

    Raises CheckpointError if `plain` holds other objects.
    """
    encoder = Encoder()
    shared = {k: encoder.encode(v, k) for k, v in plain.get("shared", {}).items()}
    rest = {k: encoder.encode(v, k) for k, v in plain.items() if k != "shared"}
    mine = [chunk for chunk in chunks if chunk.values.numel() or 0 in chunk.shape]
    return Payload(rank, mine, {**rest, "shared": shared}, encoder.tensors)


def layout_of(payload: Payload) -> tuple[dict[str, Tensor], bytes, dict[str, int]]:
    """Return the tensors of a rank's file by name, the file's header, and where each tensor begins."""
    named = {chunk.key: chunk.values for chunk in payload.chunks if chunk.values.numel()}
    named |= {f"{PLAIN}/{number}": tensor.reshape(-1) for number, tensor in enumerate(payload.plain_tensors)}
    entries = [TensorEntry(key, t.dtype, tuple(t.shape)) for key, t in named.items()]
    return named, *header_of(entries, {"format": "pt", "note": "ranges of flattened tensors"})


def write(
    folder: Path, payload: Payload, check: Callable[[], None] = lambda: None
) -> dict[str, dict[str, int]]:
    """Write both files, wait until they are on the disk, and return their rows for the manifest.

    `check` is called before each tensor. An exception that it raises ends the writing.
    """
    data_name, json_name = names_of(payload.rank)
    named, header, places = layout_of(payload)
    file = disk.FileWriter(folder / data_name, crc32_function())
    try:
        file.write(header)
        for key in sorted(named, key=lambda key: places[key]):
            check()
            tensor = named[key]
            step = max(1, tensor.numel()) if tensor.is_cpu else COPY_BYTES // tensor.itemsize
            for begin in range(0, tensor.numel(), step):
                file.write(bytes_of(tensor[begin : begin + step].detach().cpu().contiguous()))
        blocks = file.finish()
    finally:
        file.close()
    description = {
        "tensors": {
            c.key: [
                *(CODES[c.values.dtype], list(c.shape), c.start, c.values.numel(), places.get(c.key, 0)),
                *([[c.block.dim, c.block.offset, c.block.size]] if c.block is not None else []),
            ]
            for c in payload.chunks
        },
        "aside": [
            [CODES[t.dtype], list(t.shape), places[f"{PLAIN}/{number}"]]
            for number, t in enumerate(payload.plain_tensors)
        ],
        "blocks": blocks,
        "plain": payload.plain,
    }
    text = json.dumps(description, separators=(",", ":")).encode()
    crc = disk.write_file(folder / json_name, text)
    return {data_name: {"bytes": file.size}, json_name: {"bytes": len(text), "crc32": crc}}


@dataclass(frozen=True)
class Range:
    """A range of a flattened tensor, or of a flattened block of it, in a rank's file."""

    file: "RankFile"
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    stop: int
    at: int  # byte offset in the file
    block: LocalBlock | None = None  # tensor parallelism: the block; None: a range of the tensor itself

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of a range of the tensor that this range holds, contiguous in the file."""
        if self.block is None:
            if max(self.start, start) < min(self.stop, stop):
                yield max(self.start, start), min(self.stop, stop)
            return
        for first, last in self.block.overlaps(start, stop):
            index = self.block.index_of(first)
            assert index is not None
            low, high = max(index, self.start), min(index + last - first, self.stop)
            if low < high:
                yield first + low - index, first + high - index

    def bytes_of(self, start: int, stop: int) -> tuple[int, int]:
        """Return the file's byte range for elements of the tensor, which must be contiguous in the file."""
        if start == stop:
            return self.at, self.at
        index = start if self.block is None else self.block.index_of(start)
        assert index is not None
        begin = self.at + (index - self.start) * self.dtype.itemsize
        return begin, begin + (stop - start) * self.dtype.itemsize


class RankFile:
    """One rank's files, open for reading."""

    def __init__(self, folder: Path, rank: int, files: Mapping[str, Any]) -> None:
        data_name, json_name = names_of(rank)
        self.path, described_in, self.rank = folder / data_name, folder / json_name, rank
        self.verified = set[int]()
        try:
            description = json.loads(disk.read_file(described_in, files[json_name]["crc32"]))
            self.data = disk.FileReader(self.path, files[data_name]["bytes"], crc32_function())
            try:
                self._parse(description)
            except BaseException:
                self.data.close()
                raise
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{error.filename} is missing, but rank {rank} has written it. Copy it again, or load "
                "another tag"
            ) from None
        except OSError as error:
            raise CheckpointError(str(error)) from error
        except Exception as error:  # a damaged file can cause any exception in decoding
            raise CheckpointError(
                f"{described_in} is damaged ({type(error).__name__}: {error}). Load another tag"
            ) from error

    def _parse(self, description: Mapping[str, Any]) -> None:
        self.blocks: list[int] = description["blocks"]
        if len(self.blocks) != -(-self.data.size // disk.BLOCK):
            raise ValueError(f"{len(self.blocks)} block checksums do not fit {self.data.size} bytes of data")
        self.ranges = [self._range(key, *each) for key, each in description["tensors"].items()]
        self.plain_tensors = [(DTYPES[code], shape, at) for code, shape, at in description["aside"]]
        self.plain = decode(description["plain"], self._plain_tensor)
        for name in ("numbers", "private", "shared"):
            if not isinstance(self.plain[name], dict):
                raise TypeError(f"{name} is a {type(self.plain[name]).__name__}")

    def _range(
        self,
        key: str,
        code: str,
        shape: list[int],
        start: int,
        numel: int,
        at: int,
        cut: Sequence[int] | None = None,
    ) -> Range:
        self._check_bounds(key, DTYPES[code], [*shape, start, *(cut or ())], numel, at)
        block = None if cut is None else LocalBlock(tuple(shape), *cut)
        return Range(self, key, DTYPES[code], tuple(shape), start, start + numel, at, block)

    def _plain_tensor(self, number: int) -> Tensor:
        dtype, shape, at = self.plain_tensors[number]
        self._check_bounds("a tensor among plain data", dtype, shape, prod(shape), at)
        self.verify(at, at + prod(shape) * dtype.itemsize)
        return self.tensor_at(at, prod(shape), dtype).view(shape)

    def _check_bounds(
        self, what: str, dtype: torch.dtype, counts: Sequence[int], numel: int, at: int
    ) -> None:
        """Raise ValueError unless all values are counts and the elements lie within the file."""
        if any(type(each) is not int or each < 0 for each in (*counts, numel, at)):
            raise ValueError(f"{what} has {counts}, {numel} and {at}, which are not all integers >= 0")
        if at + numel * dtype.itemsize > self.data.size:
            raise ValueError(f"{what} lies outside the file")

    def tensor_at(self, at: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Read `numel` elements at byte `at` of the file."""
        tensor = torch.empty(numel, dtype=dtype, device="cpu")
        self.fill(tensor, at)
        return tensor

    def fill(self, tensor: Tensor, at: int) -> None:
        """Read into a contiguous CPU tensor from byte `at` of the file."""
        try:
            self.data.read_into(bytes_of(tensor).cast("B"), at)
        except OSError as error:
            raise CheckpointError(str(error)) from error

    def verify(self, begin: int, end: int) -> None:
        """Verify the checksums of the blocks with these bytes. Raises CheckpointError if one is wrong."""
        touched = range(begin // disk.BLOCK, -(-end // disk.BLOCK))
        blocks = [block for block in touched if block not in self.verified]
        try:
            found = list(self.data.checksums(blocks))
        except OSError as error:
            raise CheckpointError(str(error)) from error
        for block, checksum in zip(blocks, found, strict=True):
            if checksum != self.blocks[block]:
                raise CheckpointError(
                    f"{self.path} is damaged: the checksum of bytes {block * disk.BLOCK} to "
                    f"{min((block + 1) * disk.BLOCK, self.data.size)} does not match. Copy it again, or load "
                    "another tag"
                )
        self.verified.update(blocks)

    def close(self) -> None:
        """Close the file."""
        self.data.close()
