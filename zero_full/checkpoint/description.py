"""Describe a checkpoint without its values, and without torch, which takes seconds to import."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

from zero_full.checkpoint import disk
from zero_full.checkpoint.element_types import ELEMENT_TYPES
from zero_full.checkpoint.folder import folder_of, latest_tag, read_manifest
from zero_full.errors import CheckpointError

NAMES: dict[str, type] = {"aliases": dict, "frozen": list, "excluded": list}  # in `Described.shared`


@dataclass(frozen=True)
class DescribedTensor:
    """Shape and type of a tensor in a checkpoint."""

    shape: tuple[int, ...]  # of the whole tensor
    dtype: Any  # a torch.dtype, or an ElementType

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.numel * int(self.dtype.itemsize)


class Described(Protocol):
    """Interface of a checkpoint's description for `inspect`. `Source` explains the members."""

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""

    @property
    def kind(self) -> str:
        """The writer and its format, such as "zero_full" or "DeepSpeed, stage 2"."""

    @property
    def tensors(self) -> Mapping[str, DescribedTensor]:
        """The tensors by key."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other names of tied parameters."""

    @property
    def shared(self) -> Mapping[str, Any]:
        """Everything else that is equal on all ranks. Values other than names may be encoded as JSON."""


@dataclass(frozen=True)
class NativeDescription:
    """Description of a checkpoint in zero_full's own format."""

    path: Path
    kind: str
    tensors: Mapping[str, DescribedTensor]
    aliases: Mapping[str, str]
    shared: Mapping[str, Any]


def describe(directory: Path, tag: str | None) -> NativeDescription | None:
    """Describe the checkpoint that `open_checkpoint` would open, if JSON files suffice for it.

    Returns None for other formats, tensor-parallel layers and anything that is damaged: `open_checkpoint`
    reads these, or raises.
    """
    try:
        wanted = latest_tag(directory) if tag is None else tag
        path = directory if wanted is None else folder_of(directory, wanted)
        manifest = read_manifest(path)
        ranks = [_rank(path, name, manifest["files"]) for name in manifest["files"] if name.endswith(".json")]
        if len(ranks) != len(manifest["ranks"]):
            return None
        shared = {name: value for rank in ranks for name, value in rank["plain"]["shared"].items()}
        aliases, frozen, excluded = (shared.get(name, kind()) for name, kind in NAMES.items())
        if not all(type(name) is str for name in (*aliases, *aliases.values(), *frozen, *excluded)):
            return None
        pieces: dict[str, list[Any]] = {}
        for rank in ranks:
            for key, piece in rank["tensors"].items():
                pieces.setdefault(key, []).append(piece)
        tensors = {key: whole_of_pieces(each) for key, each in pieces.items()}
    except (CheckpointError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    shared["about"] = dict(manifest["about"])
    return NativeDescription(path, "zero_full", tensors, aliases, shared)


def _rank(folder: Path, name: str, files: Mapping[str, Any]) -> dict[str, Any]:
    """Read a rank's JSON file. Raises if its data file is missing or has another size, or is too short."""
    found: dict[str, Any] = json.loads(disk.read_file(folder / name, files[name]["crc32"]))
    data = Path(name).with_suffix(".safetensors").name
    size = disk.FileReader(folder / data, files[data]["bytes"]).size
    for code, _, _, numel, at, *_ in found["tensors"].values():
        if at + numel * ELEMENT_TYPES[code].itemsize > size:
            raise ValueError(f"{name} has a tensor outside of {data}")
    return found


def whole_of_pieces(pieces: Iterable[Any]) -> DescribedTensor:
    """Return the tensor that is stored in these pieces. Raises ValueError if they leave gaps or disagree."""
    [(code, shape)] = {(code, tuple(shape)) for code, shape, *_ in pieces}
    position = 0
    for _, _, start, numel, _ in sorted(pieces, key=lambda piece: (piece[2], piece[3])):
        if start != position or numel < 0:
            raise ValueError(f"elements {position} to {start} are missing, or stored twice")
        position += numel
    if position != prod(shape):
        raise ValueError(f"{position} of {prod(shape)} elements are stored")
    return DescribedTensor(shape, ELEMENT_TYPES[code])
