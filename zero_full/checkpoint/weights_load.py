"""Load safetensors into sharded parameters: each rank reads only the rows of its own shards.

Every rank first reads all headers and compares them with the model. Values change only if all ranks succeed.

[Note: files from strangers] No code from the files is executed. safetensors rejects a header that is longer
than the file or than 100 MB. It also rejects tensors that overlap, leave gaps, lie outside the file or do not
match their shape. This module rejects the cases that safetensors accepts: a duplicate name, which readers
may resolve to different tensors; dtypes that torch cannot read; an index that names files outside its folder
or is too long; and special files such as pipes, on which a reader would wait forever.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from zero_full.checkpoint.failure import Attempt
from zero_full.checkpoint.safetensors_writer import CODES, DTYPES, bytes_of, is_file_name
from zero_full.checkpoint.selection import check_unique_names, select
from zero_full.errors import CheckpointError
from zero_full.formatting import listed, shown
from zero_full.shard.group.parameters import GatherState
from zero_full.shard.step.optimizer import ZeroOptimizer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LONGEST = 100_000_000  # bytes of an index; the limit of safetensors for headers


class Unmatched(NamedTuple):
    """Names that only one side has."""

    missing: list[str]  # names only in the module
    unexpected: list[str]  # names only in the files


def describe_unmatched(path: Path, missing: Sequence[str], unexpected: Sequence[str]) -> Iterator[str]:
    """Yield a message for missing and one for unexpected names, if the files in `path` have any."""
    if missing:
        yield f"{path} lacks {listed(missing)}"
    if unexpected:
        yield f"{path} has {listed(unexpected)}, which the model lacks"


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file."""

    file: Path
    key: str
    shape: tuple[int, ...]
    code: str  # dtype in safetensors' notation
    begin: int  # byte offset of the data in the file


def load_weights(
    module: nn.Module,
    optimizer: ZeroOptimizer,
    path: str | PathLike[str],
    strict: bool = True,
    names: Callable[[str], str | None] | None = None,
) -> Unmatched:
    """Load parameters, their master weights and buffers from files. Every rank must call this.

    path     a .safetensors file, an index, or a folder with model.safetensors or its index
    strict   False: missing tensors keep their values, and unexpected ones are ignored; the names of both are
             returned
    names    a function from the module's names to the names in the file; it returns None to skip a tensor

    The optimizer's state stays as it is.
    """
    check_unique_names(optimizer)
    tensors, loading = select(module, names).tensors, _Loading(Path(path))
    attempt = Attempt(optimizer, "load_weights")
    attempt(optimizer.catch_up)
    attempt(lambda: loading.match(tensors, strict))
    attempt.agree()
    attempt(lambda: loading.fill(optimizer))
    attempt.agree()
    publish_loaded(optimizer)
    return loading.unmatched


class _Loading:
    """One load of weights: matches the tensors of files and module, then reads them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[Tensor, Stored] = {}
        self.unmatched = Unmatched([], [])

    def match(self, tensors: Mapping[str, Tensor], strict: bool) -> None:
        """Find the file of every tensor. Raises CheckpointError if the files are damaged or do not match."""
        stored = _catalogue(self.path)
        wrong: list[str] = []
        for name in tensors.keys() & stored.keys():
            wrong += _differences(name, tensors[name], stored[name])
        for name, tensor in tensors.items():
            if name in stored:
                self.found.setdefault(tensor, stored[name])
        missing = [name for name, tensor in tensors.items() if tensor not in self.found]
        self.unmatched = Unmatched(missing, [name for name in stored if name not in tensors])
        if strict:
            wrong += describe_unmatched(self.path, *self.unmatched)
        if wrong:
            raise CheckpointError("; ".join(sorted(wrong)) + ". Nothing was loaded")

    @torch.no_grad()
    def fill(self, optimizer: ZeroOptimizer) -> None:
        """Read this rank's master weights and all unsharded tensors."""
        rest = dict(self.found)
        masters = {group.parameters: group.master.values for group in optimizer.trained}
        for values in optimizer.parts.flats:
            target = masters.get(values, values.shard)
            for fragment in values.fragments.values():
                stored = self.found.get(values.members[fragment.index].param)
                if stored is not None:
                    values.cut(target, fragment).copy_(_read(stored, *fragment.param_range))
            for member in values.members:
                rest.pop(member.param, None)
        for tensor, stored in rest.items():
            tensor.detach().copy_(_read(stored, 0, prod(stored.shape)).view(stored.shape))


@torch.no_grad()
def publish_loaded(optimizer: ZeroOptimizer) -> None:
    """Update the parameters from loaded master weights and shards. Every rank must call this."""
    optimizer.follow_masters()
    for values in (group.parameters for group in optimizer.parts.frozen):
        values.node_copy = None
        if values.state is GatherState.WHOLE:
            values.collect()


def _differences(name: str, tensor: Tensor, stored: Stored) -> Iterator[str]:
    if tuple(tensor.shape) != stored.shape:
        yield f"{name} has shape {tuple(tensor.shape)}, but {stored.shape} in {stored.file}"
    if stored.code not in CODES.values():
        yield f"{name} has dtype {stored.code} in {stored.file}, which torch cannot read"
    elif _family(CODES.get(tensor.dtype, "")) != _family(stored.code):
        yield f"{name} is {tensor.dtype}, but {stored.code} in {stored.file}"


def _family(code: str) -> str:
    """Return the family of a dtype. Values are converted only within a family."""
    return "floating" if code.startswith(("F", "BF")) else "complex" if code.startswith("C") else "whole"


# Files -------------------------------------------------------------------------------------------


def _catalogue(path: Path) -> dict[str, Stored]:
    """Return every tensor in a file, index or folder, by name. Tied ones appear under every name."""
    if path.is_dir():
        path = _in_folder(path)
    if path.suffix != ".json":
        return _contents(path)
    weight_map = _weight_map(path)
    contents = {name: _contents(_beside(path, name)) for name in dict.fromkeys(weight_map.values())}
    for key, name in weight_map.items():
        if key not in contents[name]:
            raise CheckpointError(f"{path} says that {key} is in {name}, but that file lacks it")
    return {key: stored for content in contents.values() for key, stored in content.items()}


def _contents(file: Path) -> dict[str, Stored]:
    """Return every tensor in a file. Raises CheckpointError if its header is damaged or has duplicates."""
    _check_regular(file)
    try:
        with safe_open(file, framework="pt"):
            pass  # safetensors validates the header, see [Note: files from strangers]
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header: dict[str, Any] = _parsed(opened.read(size))
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} is not a complete safetensors file: {error}. If torch.load reads it, use "
            "engine.load_module_state_dict(torch.load(...))"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file} has an invalid header: {error}") from error
    metadata = header.pop("__metadata__", None) or {}
    contents = {
        key: Stored(file, key, tuple(row["shape"]), row["dtype"], 8 + size + row["data_offsets"][0])
        for key, row in header.items()
    }
    for alias, key in metadata.items():
        if key in contents:
            contents.setdefault(alias, contents[key])
    return contents


def _read(stored: Stored, start: int, stop: int) -> Tensor:
    """Read the elements from `start` up to `stop` of the flattened tensor."""
    tensor = torch.empty(stop - start, dtype=DTYPES[stored.code], device="cpu")
    try:
        with stored.file.open("rb") as file:
            file.seek(stored.begin + start * tensor.itemsize)
            if file.readinto(bytes_of(tensor)) < tensor.nbytes:
                raise OSError("it has become shorter")
    except OSError as error:
        raise CheckpointError(
            f"{stored.key} in {stored.file} cannot be read: {error}. Some parameters are changed already"
        ) from error
    return tensor


def _in_folder(folder: Path) -> Path:
    for name in (SINGLE, INDEX):
        if (folder / name).exists():
            return folder / name
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}. Pass the path of the file itself")


def _beside(index: Path, name: str) -> Path:
    """Return the path of a file that an index names. Raises CheckpointError unless it is in the same folder.

    An untrusted index could name any file of this user. In Hugging Face's cache the files are symbolic links
    from `snapshots/REVISION` to `blobs`.
    """
    file = index.parent / name
    if not is_file_name(name) or (file.is_symlink() and not _stays_inside(index.parent, file)):
        raise CheckpointError(f"{index} names {name!r}, which is not a file in its folder. Nothing was read")
    return file


def _stays_inside(folder: Path, link: Path) -> bool:
    try:
        folder, place = folder.resolve(), link.resolve().parent
    except (OSError, RuntimeError):  # a cycle of links
        return False
    blobs = folder.parents[1] / "blobs" if folder.parent.name == "snapshots" else folder
    return place in (folder, blobs)


def _weight_map(index: Path) -> dict[str, str]:
    _check_regular(index)
    try:
        with index.open("rb") as file:
            text = file.read(LONGEST + 1)
        if len(text) > LONGEST:
            raise ValueError(f"it is longer than {LONGEST} bytes")
        weight_map = {str(key): str(name) for key, name in _parsed(text)["weight_map"].items()}
        "".join(weight_map.values()).encode()  # raises for lone surrogates, which file names cannot have
        return weight_map
    except FileNotFoundError:
        raise CheckpointError(f"{index} does not exist") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"  # not `repr`, which may include all of the file's bytes
        raise CheckpointError(f"{index} is not an index of safetensors files: {reason}") from error


def _check_regular(file: Path) -> None:
    """Raise CheckpointError if the path exists and is no regular file. See [Note: files from strangers]."""
    if file.exists() and not file.is_file():
        raise CheckpointError(f"{file} is not a regular file. Nothing was read")


def _parsed(text: bytes) -> Any:
    """Parse JSON. Raises ValueError if an object has a duplicate key."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"the key {shown(key)} occurs twice")
            found[key] = value
        return found

    return json.loads(text, object_pairs_hook=unique)
