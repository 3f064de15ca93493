"""Write safetensors files piece by piece in any order, and publish them only when complete.

[Note: atomic export] A file is written as `NAME.part`, which no loader reads. It is flushed to the
disk and then renamed. If an export has several files, its index is renamed last, and an older index is
deleted before the first rename. So a reader that finds `NAME` or an index finds a complete export.

[Note: links] A part is always a new file. In a folder that other users may write to, a symbolic link under
its name could make the export overwrite any file of this user.

[Note: the format] A file has eight bytes with the header's length, the header (JSON with each tensor's
dtype, shape and offsets), and then the data, without gaps. Names, dtypes and shapes are known before any
data arrive, so the header is written first. After that, only a part of one tensor has to be in memory. Wider
dtypes come first, so that all tensors are aligned.
"""

import ctypes
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from zero_full.checkpoint.disk import NO_LINKS, add_context, is_file_name
from zero_full.checkpoint.element_types import ELEMENT_TYPES

CODES = {getattr(torch, each.name): code for code, each in ELEMENT_TYPES.items()}
DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """Name, dtype and shape of a tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in CODES:
            raise ValueError(f"{self.name} is {self.dtype}, which safetensors does not support. Leave it out")

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def check_export(dtype: torch.dtype | None, max_shard_bytes: int) -> None:
    """Raise ValueError unless weights can be converted to `dtype`, and files can have this size."""
    if max_shard_bytes < 1 or (dtype is not None and not dtype.is_floating_point):
        raise ValueError(
            f"max_shard_bytes must be positive and dtype floating-point, not {max_shard_bytes}, {dtype}"
        )


def split_into_files(entries: Iterable[TensorEntry], limit: int) -> list[list[TensorEntry]]:
    """Divide the entries into files, in order: as many per file as fit into `limit` bytes, at least one."""
    shards: list[list[TensorEntry]] = [[]]
    room = limit
    for entry in entries:
        if shards[-1] and entry.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(entry)
        room -= entry.nbytes
    return shards


def header_of(entries: Iterable[TensorEntry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return a file's header, and the file offset of each tensor's data. See [Note: the format]."""
    described: dict[str, object] = {"__metadata__": dict(metadata)}
    begins, end = dict[str, int](), 0
    for entry in sorted(entries, key=lambda entry: -entry.dtype.itemsize):
        begins[entry.name], end = end, end + entry.nbytes
        described[entry.name] = {
            "dtype": CODES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [begins[entry.name], end],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, without a copy. The view keeps the tensor alive."""
    tensor = tensor.resolve_conj().resolve_neg()  # else memory and values differ
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr() if tensor.nbytes else 1)
    memory.tensor = tensor  # type: ignore[attr-defined]  # else it could be freed before use
    return memoryview(memory)


def part_of(path: Path) -> Path:
    """Return the path under which a file is written until it is complete."""
    return path.with_name(f"{path.name}.part")


def check_file_name(argument: str, name: str | os.PathLike[str]) -> str:
    """Return the name as a string, or raise ValueError unless it is a plain file name."""
    text = str(name)
    if not is_file_name(text):
        raise ValueError(f"{argument}: {text!r} is not a plain file name. Pass the folder separately")
    return text


def new_part(path: Path) -> BinaryIO:
    """Create an empty part of this file, open for writing. An existing part is replaced."""
    part_of(path).unlink(missing_ok=True)
    return os.fdopen(os.open(part_of(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY | NO_LINKS, 0o666), "wb")


def open_part(path: Path) -> BinaryIO:
    """Open the part of this file for writing. Raises OSError if it is a symbolic link."""
    return os.fdopen(os.open(part_of(path), os.O_RDWR | NO_LINKS), "r+b")


def flush_part(path: Path) -> None:
    """Wait until the part is on the disk."""
    with open_part(path) as part:
        os.fsync(part.fileno())


def publish_part(path: Path) -> None:
    """Publish the file: rename its complete part to its final name."""
    part_of(path).replace(path)


class WeightFiles:
    """The files of one export in progress. See [Note: atomic export]."""

    def __init__(
        self, path: Path, entries: Sequence[TensorEntry], limit: int, aliases: Mapping[str, str] | None = None
    ) -> None:
        self.single, self.index = path, path.with_name(f"{path.name}.index.json")
        shards = split_into_files(entries, limit)
        self.paths, count = [path], len(shards)
        if count > 1:
            self.paths = [
                path.with_name(f"{path.stem}-{number:05}-of-{count:05}{path.suffix}")
                for number in range(1, count + 1)
            ]
        self.size = sum(entry.nbytes for entry in entries)
        self.path_of = {e.name: p for p, shard in zip(self.paths, shards, strict=True) for e in shard}
        self.entries = {entry.name: entry for entry in entries}
        self.aliases = aliases or {}
        self.offsets: dict[str, int] = {}
        self.missing = {entry.name: prod(entry.shape) for entry in entries}  # elements not written yet
        self.shards = dict(zip(self.paths, shards, strict=True))

    def begin(self) -> None:
        """Create the folder and the parts, and write the headers."""
        self.single.parent.mkdir(parents=True, exist_ok=True)
        for path, entries in self.shards.items():
            tied = {alias: name for alias, name in self.aliases.items() if self.path_of[name] == path}
            header, offsets = header_of(entries, {**tied, "format": "pt"})
            with new_part(path) as part:
                part.write(header)
            self.offsets |= offsets

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor. Tensors may come in any order."""
        assert tensor.shape == self.entries[name].shape, (self.entries[name], tensor.shape)
        self.write_part(name, 0, tensor)

    def write_part(self, name: str, start: int, numbers: Tensor) -> None:
        """Write the elements of a flattened tensor from `start` on. Parts may come in any order."""
        dtype = self.entries[name].dtype
        numbers = numbers.detach().to("cpu", dtype).contiguous()
        path = self.path_of[name]
        with add_context(f"writing {name}", part_of(path)), open_part(path) as part:
            part.seek(self.offsets[name] + start * dtype.itemsize)
            part.write(bytes_of(numbers))
        self.missing[name] -= numbers.numel()

    def finish(self) -> None:
        """Publish all files, and delete files of an older export that were not replaced."""
        assert not any(self.missing.values()), self.missing
        results = self.results()
        if len(self.paths) > 1:
            weight_map = {name: path.name for name, path in self.path_of.items()}
            index = {"metadata": {"total_size": self.size}, "weight_map": weight_map}
            with new_part(self.index) as part:
                part.write((json.dumps(index, indent=2) + "\n").encode())
        for path in results:
            flush_part(path)
        if len(self.paths) > 1:
            self.index.unlink(missing_ok=True)
        for path in results:
            publish_part(path)
        for path in {self.single, self.index, *self._all_shards()} - set(results):
            path.unlink(missing_ok=True)

    def results(self) -> list[Path]:
        """Return the final files, the index last."""
        return [*self.paths, self.index] if len(self.paths) > 1 else list(self.paths)

    def older(self) -> list[Path]:
        """Return the files of an earlier export in the folder, which this one would replace."""
        here = self._all_shards() if self.single.parent.is_dir() else []
        complete = [path for path in here if path.suffix == self.single.suffix]
        return [path for path in (self.single, self.index) if path.exists()] + complete

    def _all_shards(self) -> Iterable[Path]:
        stem, suffix = re.escape(self.single.stem), re.escape(self.single.suffix)
        pattern = rf"{stem}-\d{{5}}-of-\d{{5}}{suffix}(\.part)?"
        return [path for path in self.single.parent.iterdir() if re.fullmatch(pattern, path.name)]

    def discard(self) -> None:
        """Delete all parts."""
        for path in (*self.paths, self.index):
            part_of(path).unlink(missing_ok=True)
