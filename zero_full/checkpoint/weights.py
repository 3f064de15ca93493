"""Save and load the full weights of a sharded model, as safetensors or for `torch.load`.

Saving: all ranks gather one flat buffer at a time, and rank 0 writes its tensors immediately. The files are
equal, byte for byte, at every stage and world size.

Loading: each rank reads only the rows of its own shards. It first reads all headers and compares them with
the model. Values change only if all ranks succeed.

[Note: files from strangers] No code from the files is executed. safetensors rejects a header that is longer
than the file or than 100 MB. It also rejects tensors that overlap, leave gaps, lie outside the file or do not
match their shape. This module rejects the cases that safetensors accepts: a duplicate name, which readers
may resolve to different tensors; dtypes that torch cannot read; an index that names files outside its folder
or is too long; and special files such as pipes, on which a reader would wait forever.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from zero_full.checkpoint.disk import is_file_name
from zero_full.checkpoint.failure import Attempt, check_same_arguments
from zero_full.checkpoint.folder import local_path
from zero_full.checkpoint.safetensors_writer import (
    CODES,
    DTYPES,
    TensorEntry,
    WeightFiles,
    bytes_of,
    check_export,
    check_file_name,
    flush_part,
    new_part,
    open_part,
    part_of,
    publish_part,
)
from zero_full.errors import CheckpointError
from zero_full.formatting import by_value, listed, shown
from zero_full.layout import LocalBlock
from zero_full.shard.access.gathered_parameters import copy_on_cpu, names_and_values
from zero_full.shard.group.dtensors import block_of, like, local_of, whole_of
from zero_full.shard.group.parameters import FlatParameters, GatherState
from zero_full.shard.step.optimizer import ZeroOptimizer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LONGEST = 100_000_000  # bytes of an index; the limit of safetensors for headers
SAMPLE = 64  # bytes of each tensor that ranks compare
Renaming = Callable[[str], str | None]  # the name in the file; None: not in the file


@dataclass
class Selection:
    """The contents of a weights file, by name in the file, in the module's order.

    The parameters may be sharded, without values.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)  # tied tensors appear under every name
    others: dict[str, Any] = field(default_factory=dict)  # values that are no tensors (`get_extra_state`)

    def first_names(self) -> dict[Tensor, str]:
        """Return every tensor once, with its first name."""
        first: dict[Tensor, str] = {}
        for name, tensor in self.tensors.items():
            first.setdefault(tensor, name)
        return first

    def aliases(self) -> dict[str, str]:
        """Return each later name of a tied tensor, with the tensor's first name."""
        first = self.first_names()
        return {name: first[tensor] for name, tensor in self.tensors.items() if first[tensor] != name}


def select(module: nn.Module, optimizer: ZeroOptimizer, names: Renaming | None = None) -> Selection:
    """Select the entries of the module's state dict, renamed by `names` if given.

    Raises ValueError if ranks have different parameters of the same name, which one file cannot hold. Raises
    RuntimeError during local steps of 0/1 Adam, and after an interrupted step.
    """
    optimizer.check_ranks_equal("saving or loading weights")
    communicators = optimizer.communicators
    parts = [communicators.pipe] if optimizer.contents.has_dtensors else communicators.model_parallel
    if communicators.expert is not None or any(each is not None and each.size > 1 for each in parts):
        raise ValueError(
            "with experts, layers that are split, or pipeline stages, ranks hold different parameters. Use "
            "engine.module_state_dict() and engine.load_module_state_dict(...), with a file for each part"
        )
    selection, origin = Selection(), dict[str, str]()
    for name, value in names_and_values(module).items():
        renamed = name if names is None else names(name)
        if renamed is None:
            continue
        if renamed in origin:
            raise ValueError(f"names maps {origin[renamed]} and {name} to the same name, {renamed}")
        origin[renamed] = name
        place = selection.tensors if isinstance(value, Tensor) else selection.others
        place[renamed] = value
    return selection


# Saving ----------------------------------------------------------------------------------------


@torch.no_grad()
def save_weights(
    module: nn.Module,
    optimizer: ZeroOptimizer,
    directory: str | PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    names: Renaming | None = None,
    filename: str = "model.safetensors",
) -> None:
    """Write parameters and persistent buffers as safetensors. Every rank must call this.

    dtype            None: the dtype of training; else floating-point tensors are converted to it, from the
                     fp32 master weights where they exist
    max_shard_bytes  the largest size of a file; a larger export becomes several files and an index
    names            a function from the module's names to names in the file, the same on every rank; it
                     returns None to leave a tensor out

    Tied parameters are stored once. The header has their other names, as with `safetensors.torch`.
    """
    optimizer.check_open("save_weights")
    with optimizer.announces_failure("save_weights"):
        filename = check_file_name("filename", filename)
        selection = select(module, optimizer, names)
        if selection.others:
            raise ValueError(
                f"safetensors holds tensors only, not the extra state {', '.join(selection.others)} "
                "(get_extra_state). Leave it out with names=..., or save a .bin file"
            )
        check_export(dtype, max_shard_bytes)
    entries = [
        TensorEntry(
            name, dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype, tensor.shape
        )
        for tensor, name in selection.first_names().items()
    ]
    files = WeightFiles(local_path(directory) / filename, entries, max_shard_bytes, selection.aliases())
    _export(optimizer, selection, files, dtype)


@torch.no_grad()
def save_16bit_model(
    module: nn.Module,
    optimizer: ZeroOptimizer,
    save_dir: str | PathLike[str],
    save_filename: str = "pytorch_model.bin",
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Write one file with the parameters in their training dtype, like DeepSpeed. Every rank must call this.

    A name that ends with .safetensors selects that format. Any other name selects a file for `torch.load`,
    for which rank 0 needs memory for the whole model. Returns True, or raises on every rank.
    """
    save_filename = check_file_name("save_filename", save_filename)
    every = module.named_parameters(remove_duplicate=False)
    skipped = {name for name, p in every if exclude_frozen_parameters and not p.requires_grad}

    def names(name: str) -> str | None:
        return None if name in skipped else name

    if save_filename.endswith(".safetensors"):
        save_weights(
            module, optimizer, save_dir, max_shard_bytes=sys.maxsize, names=names, filename=save_filename
        )
    else:
        optimizer.check_open("save_16bit_model")
        with optimizer.announces_failure("save_weights"):
            selection = select(module, optimizer, names)
        _export(optimizer, selection, _PickledFile(local_path(save_dir) / save_filename, selection), None)
    return True


def _export(
    optimizer: ZeroOptimizer,
    selection: Selection,
    sink: "WeightFiles | _PickledFile",
    dtype: torch.dtype | None,
) -> None:
    """Gather every selected tensor, one flat buffer at a time, and write it to the sink on rank 0.

    dtype  None: values are those of the parameters; else of their master weights
    """
    attempt = Attempt(optimizer, "save_weights")
    writes = all(communicator.rank == 0 for communicator in optimizer.communicators.everyone)

    def deliver(name: str, tensor: Tensor) -> None:
        if writes:  # after a failure this rank goes on gathering, as the others wait for its collectives
            attempt(partial(sink.write, name, tensor))

    attempt(optimizer.catch_up)
    try:
        if writes:
            attempt(sink.begin)
        names = selection.first_names()
        chosen = f"{len(names)} tensors ({_digest(names.values()).hex()})"
        # What is gathered follows from both.
        check_same_arguments(attempt.agree({"dtype": dtype, "names": chosen}))
        is_exact = dtype is not None
        masters = {group.parameters: group.master.values for group in optimizer.trained} if is_exact else {}
        for flat in optimizer.sharded.flats:
            members = {names.pop(m.param): m for m in flat.members if m.param in names}
            if members:
                whole = _all_gather(flat, masters.get(flat, flat.shard))
                for name, member in members.items():
                    values = whole[flat.layout.windows[member.index]].view(member.shape)
                    deliver(name, values if member.block is None else whole_of(like(member.param, values)))
                del whole, values  # before the next flat buffer is gathered
        for tensor, name in names.items():
            deliver(name, whole_of(tensor))
        if writes:
            attempt(sink.finish)
        attempt.agree()
    finally:
        if writes:
            with suppress(OSError):  # `agree` has raised the first error already
                sink.discard()


def _all_gather(flat: FlatParameters, shard: Tensor) -> Tensor:
    """All-gather the shards of a flat buffer without the quantization that `gather` may apply."""
    if shard is flat.shard and not flat.released_at_rest:
        return flat.full
    whole = torch.empty(flat.layout.total, dtype=shard.dtype, device=flat.kind.device)
    flat.shard_comm.slice_of(whole).copy_(shard)
    flat.shard_comm.all_gather(whole, f"parameters {flat.name}")
    return whole


class _PickledFile:
    """Collects a state dict and pickles it for `torch.load`, in the steps of `WeightFiles`."""

    def __init__(self, path: Path, selection: Selection) -> None:
        self.path, self.selection = path, selection
        self.kept: dict[str, Tensor] = {}

    def begin(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new_part(self.path).close()

    def write(self, name: str, tensor: Tensor) -> None:
        self.kept[name] = copy_on_cpu(tensor)

    def finish(self) -> None:
        first = self.selection.first_names()
        state: dict[str, Any] = {n: self.kept[first[t]] for n, t in self.selection.tensors.items()}
        with open_part(self.path) as part:
            torch.save({**state, **self.selection.others}, part)
        flush_part(self.path)
        publish_part(self.path)

    def discard(self) -> None:
        self.kept.clear()
        part_of(self.path).unlink(missing_ok=True)


# Loading ---------------------------------------------------------------------------------------


class Unmatched(NamedTuple):
    """Names that only the file or only the model has."""

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
    names: Renaming | None = None,
) -> Unmatched:
    """Load parameters, their master weights and buffers from files. Every rank must call this.

    path     a .safetensors file, an index, or a folder with model.safetensors or its index
    strict   False: missing tensors keep their values, and unexpected ones are ignored; the names of both are
             returned
    names    a function from the module's names to the names in the file; it returns None to skip a tensor

    The optimizer's state stays as it is.
    """
    optimizer.check_open("load_weights")
    with optimizer.announces_failure("load_weights"):
        tensors, place = select(module, optimizer, names).tensors, Path(path)
    found, unmatched = dict[Tensor, Stored](), Unmatched([], [])

    def match() -> str:
        optimizer.catch_up()
        stored = _catalogue(local_path(path))
        wrong = [
            text for n in tensors.keys() & stored.keys() for text in _differences(n, tensors[n], stored[n])
        ]
        for name, tensor in tensors.items():
            if name in stored:
                found.setdefault(tensor, stored[name])
        unmatched.missing.extend(name for name, tensor in tensors.items() if tensor not in found)
        unmatched.unexpected.extend(name for name in stored if name not in tensors)
        if strict:
            wrong += describe_unmatched(place, *unmatched)
        if wrong:
            raise CheckpointError("; ".join(sorted(wrong)) + ". Nothing was loaded")
        chosen = [(name, stored[name]) for name in tensors if name in stored]
        return _digest(part for name, each in chosen for part in (name, *_sample(each))).hex()

    attempt = Attempt(optimizer, "load_weights")
    chosen = attempt.agree((attempt(match), str(place)))
    if len({digest for digest, _ in chosen.values()}) > 1:
        found_by = by_value({rank: f"{path} ({digest})" for rank, (digest, path) in chosen.items()})
        raise CheckpointError(
            f"ranks found different weights: {'; '.join(found_by)}. In brackets is a digest of the names and "
            "of the first values of each tensor. Copy the same files to all hosts, and pass the same names "
            "on every rank. Nothing was loaded"
        )
    attempt(lambda: _fill(optimizer, found))
    attempt.agree()
    publish_loaded(optimizer)
    return unmatched


@torch.no_grad()
def _fill(optimizer: ZeroOptimizer, found: Mapping[Tensor, "Stored"]) -> None:
    """Read this rank's master weights and all unsharded tensors."""
    rest = dict(found)
    masters = {group.parameters: group.master.values for group in optimizer.trained}
    for values in optimizer.sharded.flats:
        target = masters.get(values, values.shard)
        for fragment in values.fragments.values():
            stored = found.get(values.members[fragment.index].param)
            if stored is not None:
                block = values.members[fragment.index].block
                values.cut(target, fragment).copy_(_read_part(stored, block, *fragment.param_range))
        for member in values.members:
            rest.pop(member.param, None)
    for tensor, stored in rest.items():
        here, block = local_of(tensor).detach(), block_of(tensor)
        here.copy_(_read_part(stored, block, 0, here.numel()).view(here.shape))


@torch.no_grad()
def publish_loaded(optimizer: ZeroOptimizer) -> None:
    """Update the parameters from loaded master weights and shards. Every rank must call this."""
    optimizer.follow_masters()
    for values in (group.parameters for group in optimizer.sharded.frozen):
        values.node_copy = None
        if values.state is GatherState.WHOLE:
            values.all_gather()


def _digest(parts: Iterable[str | bytes]) -> bytes:
    """Return a digest of these texts and bytes, to compare between ranks."""
    found = blake2b(digest_size=8)
    for each in parts:
        data = each.encode(errors="surrogatepass") if isinstance(each, str) else each
        found.update(len(data).to_bytes(8, "little") + data)
    return found.digest()


def _sample(stored: Stored) -> tuple[str, bytes]:
    """Return a tensor's form and its first bytes, which differ between two versions of a model."""
    size = min(SAMPLE, prod(stored.shape) * DTYPES[stored.code].itemsize)
    with stored.file.open("rb", buffering=0) as file:
        file.seek(stored.begin)
        return repr((stored.shape, stored.code)), file.read(size)


def _differences(name: str, tensor: Tensor, stored: Stored) -> Iterator[str]:
    if tuple(tensor.shape) != stored.shape:
        yield f"{name} has shape {tuple(tensor.shape)}, but {stored.shape} in {stored.file}"
    if stored.code not in CODES.values():
        yield f"{name} has dtype {stored.code} in {stored.file}, which torch cannot read"
    elif _family(CODES.get(tensor.dtype, "")) != _family(stored.code):
        yield f"{name} is {tensor.dtype}, but {stored.code} in {stored.file}"


def _family(code: str) -> str:
    """Return whether a dtype is floating, complex or whole. Values are converted only within one of these."""
    return "floating" if code.startswith(("F", "BF")) else "complex" if code.startswith("C") else "whole"


# Files -------------------------------------------------------------------------------------------


def _catalogue(path: Path) -> dict[str, Stored]:
    """Return every tensor in a file, index or folder, by name. Tied ones appear under every name."""
    if path.is_dir():
        found = [path / name for name in (SINGLE, INDEX) if (path / name).exists()]
        if not found:
            raise CheckpointError(f"{path} has neither {SINGLE} nor {INDEX}. Pass the path of a file")
        path = found[0]
    if path.suffix != ".json":
        return _contents(path)
    weight_map = _weight_map(path)
    contents = {name: _contents(_path_from_index(path, name)) for name in dict.fromkeys(weight_map.values())}
    for key, name in weight_map.items():
        if key not in contents[name]:
            raise CheckpointError(f"{path} says that {key} is in {name}, but that file lacks it. Copy both")
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
        raise CheckpointError(f"{file} does not exist. Pass the path of a file of weights") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} is not a complete safetensors file: {error}. If torch.load reads it, use "
            "engine.load_module_state_dict(torch.load(...))"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file} has an invalid header: {error}. Copy or download it again") from error
    metadata = header.pop("__metadata__", None) or {}
    contents = {
        key: Stored(file, key, tuple(row["shape"]), row["dtype"], 8 + size + row["data_offsets"][0])
        for key, row in header.items()
    }
    for alias, key in metadata.items():
        if key in contents:
            contents.setdefault(alias, contents[key])
    return contents


def _read_part(stored: Stored, block: LocalBlock | None, start: int, stop: int) -> Tensor:
    """Read a range of the flattened tensor, or of a flattened block of it."""
    if block is None:
        return _read(stored, start, stop)
    return torch.cat([_read(stored, *run) for run in block.runs(start, stop)])


def _read(stored: Stored, start: int, stop: int) -> Tensor:
    """Read the elements from `start` up to `stop` of the flattened tensor."""
    tensor = torch.empty(stop - start, dtype=DTYPES[stored.code], device="cpu")
    try:
        with stored.file.open("rb") as file:
            file.seek(stored.begin + start * tensor.itemsize)
            if file.readinto(bytes_of(tensor)) < tensor.nbytes:
                raise OSError("the file has become shorter since its header was read")
    except OSError as error:
        raise CheckpointError(
            f"{stored.key} in {stored.file} cannot be read: {error}. Some parameters are changed already: "
            "load again before you train"
        ) from error
    return tensor


def _path_from_index(index: Path, name: str) -> Path:
    """Return the path of a file that an index names. Raises CheckpointError if it is in another folder.

    An untrusted index could name any file of this user. In Hugging Face's cache the files are symbolic links
    from `snapshots/REVISION` to `blobs`.
    """
    file = index.parent / name
    if not is_file_name(name) or (file.is_symlink() and not _stays_inside(index.parent, file)):
        raise CheckpointError(
            f"{index} names {name!r}, which is not a file in its folder. Copy all files into one folder. "
            "Nothing was read"
        )
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
        raise CheckpointError(f"{index} does not exist. Pass the path of a file of weights") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"  # not `repr`, which may include all of the file's bytes
        raise CheckpointError(
            f"{index} is not an index of safetensors files: {reason}. Copy or download it again"
        ) from error


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
