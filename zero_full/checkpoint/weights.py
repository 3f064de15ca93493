"""safetensors into sharded parameters: each rank reads the rows of what it owns, and nothing else.

First every header is read and compared with the model, on every rank; only if all of them are content,
anything is changed.

[Note: files from strangers] Nothing in them is executed. safetensors refuses a header that is longer than the
file or than 100 MB, and tensors that overlap, leave gaps, lie outside or have another size than their shape.
Refused here are what it leaves open: a name that comes twice, which readers may take for different tensors;
types that torch cannot read; an index that leads elsewhere or has no end; and what is no file, such as a
pipe, on which a reader would wait for ever.
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
from zero_full.checkpoint.files import CODES, is_plain
from zero_full.checkpoint.selection import refuse_parts, select
from zero_full.errors import CheckpointError
from zero_full.formatting import listed, shown
from zero_full.shard.group.parameters import GatherState
from zero_full.shard.step.optimizer import ZeroOptimizer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LONGEST = 100_000_000  # bytes of an index: as safetensors has it for headers


class Unmatched(NamedTuple):
    """Names that only one side has."""

    missing: list[str]  # only the module has them
    unexpected: list[str]  # only the files have them


@dataclass(frozen=True)
class Stored:
    """A tensor that was found in a file."""

    file: Path
    key: str
    shape: tuple[int, ...]
    code: str  # of its type


def load_weights(
    module: nn.Module,
    optimizer: ZeroOptimizer,
    path: str | PathLike[str],
    strict: bool = True,
    names: Callable[[str], str | None] | None = None,
) -> Unmatched:
    """Read parameters, their masters and buffers from files. Every rank must call this.

    path     a .safetensors file, an index, or a folder with model.safetensors or its index
    strict   False: what is missing keeps its values, what is unexpected is left alone; both are returned,
             as lists of names
    names    a function from the module's names to the file's; None as its answer: not to be loaded

    The optimizer's state stays as it is.
    """
    refuse_parts(optimizer)
    mine, loading = select(module, names).tensors, _Loading(Path(path))
    attempt = Attempt(optimizer, "load_weights")
    attempt(optimizer.catch_up)
    attempt(lambda: loading.match(mine, strict))
    attempt.agree()
    attempt(lambda: loading.fill(optimizer))
    attempt.agree()
    _publish(optimizer)
    return loading.unmatched


class _Loading:
    """One load: the files' tensors, matched with the module's, then read."""

    def __init__(self, path: Path) -> None:
        self.path, self.reader = path, _Reader()
        self.found: dict[Tensor, Stored] = {}
        self.unmatched = Unmatched([], [])

    def match(self, mine: Mapping[str, Tensor], strict: bool) -> None:
        """Find the file of every tensor; CheckpointError if anything is wrong with the files."""
        stored = self.reader.catalogue(self.path)
        wrong: list[str] = []
        for name in mine.keys() & stored.keys():
            wrong += _differences(name, mine[name], stored[name])
        for name, tensor in mine.items():
            if name in stored:
                self.found.setdefault(tensor, stored[name])
        missing = [name for name, tensor in mine.items() if tensor not in self.found]
        self.unmatched = Unmatched(missing, [name for name in stored if name not in mine])
        if strict and missing:
            wrong.append(f"{self.path} lacks {listed(missing)}")
        if strict and self.unmatched.unexpected:
            wrong.append(f"{self.path} has {listed(self.unmatched.unexpected)}, which the model lacks")
        if wrong:
            raise CheckpointError("; ".join(sorted(wrong)) + ". Nothing was loaded")

    @torch.no_grad()
    def fill(self, optimizer: ZeroOptimizer) -> None:
        """Read this rank's masters, and tensors that are whole. Parameters follow when all ranks are done."""
        rest = dict(self.found)
        masters = {owned.flat: owned.master for owned in optimizer.owned}
        for values in optimizer.flats():
            target = masters.get(values, values.shard)
            for fragment in values.fragments():
                stored = self.found.get(values.members[fragment.index].param)
                if stored is not None:
                    values.cut(target, fragment).copy_(self.reader.read(stored, *fragment.param_range))
            for member in values.members:
                rest.pop(member.param, None)
        for tensor, stored in rest.items():
            tensor.detach().copy_(self.reader.read(stored, 0, prod(stored.shape)).view(stored.shape))


@torch.no_grad()
def _publish(optimizer: ZeroOptimizer) -> None:
    """Copy masters to parameters, and send them to where they are whole."""
    optimizer.publish()
    for values in optimizer.frozen:
        values.node_copy = None
        if values.state is GatherState.WHOLE:
            values.collect()


def _differences(name: str, tensor: Tensor, stored: Stored) -> Iterator[str]:
    if tuple(tensor.shape) != stored.shape:
        yield f"{name} has shape {tuple(tensor.shape)}, but {stored.shape} in {stored.file}"
    if stored.code not in CODES.values():
        yield f"{name} is of type {stored.code} in {stored.file}, which cannot be read"
    elif _family(CODES.get(tensor.dtype, "")) != _family(stored.code):
        yield f"{name} is {tensor.dtype}, but {stored.code} in {stored.file}"


def _family(code: str) -> str:
    """The family of a type: types of one family can be converted into each other."""
    return "floating" if code.startswith(("F", "BF")) else "complex" if code.startswith("C") else "whole"


# Files -------------------------------------------------------------------------------------------


class _Reader:
    """The safetensors files that are open. They are mapped, so only what is asked for is read."""

    def __init__(self) -> None:
        self.files: dict[Path, Any] = {}

    def catalogue(self, path: Path) -> dict[str, Stored]:
        """Every tensor in a file, index or folder, by name; tied parameters under each of their names."""
        if path.is_dir():
            path = _in_folder(path)
        if path.suffix != ".json":
            return self._contents(path)
        weight_map = _weight_map(path)
        contents = {n: self._contents(_beside(path, n)) for n in dict.fromkeys(weight_map.values())}
        for key, name in weight_map.items():
            if key not in contents[name]:
                raise CheckpointError(f"{path} says that {key} is in {name}, which lacks it")
        return {key: stored for content in contents.values() for key, stored in content.items()}

    def _contents(self, file: Path) -> dict[str, Stored]:
        opened = self._open(file)
        contents = {}
        for key in opened.keys():  # noqa: SIM118 (it is no dict)
            part = opened.get_slice(key)
            contents[key] = Stored(file, key, tuple(part.get_shape()), part.get_dtype())
        for alias, key in (opened.metadata() or {}).items():
            if key in contents:
                contents.setdefault(alias, contents[key])
        return contents

    def _open(self, file: Path) -> Any:
        if file not in self.files:
            _refuse_endless(file)
            try:
                opened = safe_open(file, framework="pt")
                _refuse_twice(file)
            except FileNotFoundError:
                raise CheckpointError(f"{file} does not exist") from None
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{file} is no complete safetensors file: {error}. If torch.load reads it, use "
                    "engine.load_module_state_dict(torch.load(...))"
                ) from error
            self.files[file] = opened
        return self.files[file]

    def read(self, stored: Stored, start: int, stop: int) -> Tensor:
        """The elements from `start` up to `stop` of the flattened tensor."""
        opened = self._open(stored.file)
        try:
            if not stored.shape or start == stop:
                flat: Tensor = opened.get_tensor(stored.key).reshape(-1)
                return flat
            box, skipped = enclosing_box(stored.shape, start, stop)
            flat = opened.get_slice(stored.key)[box].reshape(-1)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{stored.key} in {stored.file} cannot be read: {error}. Other parameters are changed already"
            ) from error
        return flat[skipped : skipped + stop - start]


def enclosing_box(shape: Sequence[int], start: int, stop: int) -> tuple[tuple[slice, ...], int]:
    """The smallest run of rows with these elements, and how many elements in it come before them.

    Where they lie within one row, it is that row's rows, and so on.
    """
    box: list[slice] = []
    for dim in range(len(shape)):
        row = prod(shape[dim + 1 :])
        first, last = start // row, -(-stop // row)
        box.append(slice(first, last))
        start, stop = start - first * row, stop - first * row
        if last - first > 1:
            break
    return tuple(box), start


def _in_folder(folder: Path) -> Path:
    for name in (SINGLE, INDEX):
        if (folder / name).exists():
            return folder / name
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}: pass the file itself")


def _beside(index: Path, name: str) -> Path:
    """The path of a file that an index names; CheckpointError unless it is in the same folder.

    Whoever wrote the index could name any file of this user. In Hugging Face's cache the files are links from
    `snapshots/REVISION` to `blobs`.
    """
    file = index.parent / name
    if not is_plain(name) or (file.is_symlink() and not _stays(index.parent, file)):
        raise CheckpointError(f"{index} names {name!r}, which is not a file in its folder: nothing is read")
    return file


def _stays(folder: Path, link: Path) -> bool:
    try:
        folder, place = folder.resolve(), link.resolve().parent
    except (OSError, RuntimeError):  # a circle of links
        return False
    blobs = folder.parents[1] / "blobs" if folder.parent.name == "snapshots" else folder
    return place in (folder, blobs)


def _weight_map(index: Path) -> dict[str, str]:
    _refuse_endless(index)
    try:
        with index.open("rb") as file:
            text = file.read(LONGEST + 1)
        if len(text) > LONGEST:
            raise ValueError(f"it is longer than {LONGEST} bytes")
        weight_map = {str(key): str(name) for key, name in _parsed(text)["weight_map"].items()}
        "".join(weight_map.values()).encode()  # JSON has halves of characters, and names of files have not
        return weight_map
    except FileNotFoundError:
        raise CheckpointError(f"{index} does not exist") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        told = f"{type(error).__name__}: {error}"  # never `repr`, which may have all of the file's bytes
        raise CheckpointError(f"{index} is no index of safetensors files: {told}") from error


def _refuse_endless(file: Path) -> None:
    """CheckpointError if this is there and no regular file. See [Note: files from strangers]."""
    if file.exists() and not file.is_file():
        raise CheckpointError(f"{file} is no regular file: nothing is read")


def _refuse_twice(file: Path) -> None:
    """CheckpointError if the header of a file, which safetensors has read, has a name twice."""
    with file.open("rb") as opened:
        header = opened.read(int.from_bytes(opened.read(8), "little"))
    try:
        _parsed(header)
    except ValueError as error:
        raise CheckpointError(f"{file} has a header that is not read: {error}") from error


def _parsed(text: bytes) -> Any:
    """The JSON; ValueError if an object has a key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"{shown(key)} is in it twice")
            found[key] = value
        return found

    return json.loads(text, object_pairs_hook=unique)
