"""Consolidate the weights of a sharded checkpoint into safetensors files, in one process, without the model.

Tensors are read and written in chunks, so memory does not grow with the model or with its largest tensor.
"""

from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from shutil import disk_usage

import torch
from torch import Tensor

from zero_full.checkpoint.folder import local_path
from zero_full.checkpoint.reading import open_checkpoint
from zero_full.checkpoint.safetensors_writer import CODES, TensorEntry, WeightFiles, check_export
from zero_full.checkpoint.source import Source
from zero_full.checkpoint.weights import SINGLE
from zero_full.errors import CheckpointError
from zero_full.formatting import human, listed, natural_order
from zero_full.progress import Advance
from zero_full.shard.contents.keys import BUFFERS, PARAMETERS

CHUNK = 4 * 2**20  # bytes of a tensor per read; peak memory is several chunks
OTHER_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")  # suffixes that show that `out` is no folder


@dataclass(frozen=True)
class ExportOptions:
    """What an export writes: dtype, parameters, and the size of its files."""

    dtype: torch.dtype | None = None
    exclude_frozen: bool = False
    max_shard_bytes: int = 5 * 10**9

    def __post_init__(self) -> None:
        check_export(self.dtype, self.max_shard_bytes)

    def dtype_of(self, stored: torch.dtype) -> torch.dtype:
        """Return the dtype in which a tensor with the dtype `stored` is exported."""
        if not stored.is_floating_point:
            return stored
        return self.dtype or (stored if stored == torch.float64 else torch.float32)


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    files: list[Path]
    nbytes: int  # of all tensors
    frozen: list[str]  # names of parameters that were left out
    others: list[str]  # names of non-tensor extra state (get_extra_state), which safetensors cannot hold


def export_checkpoint(
    folder: str | PathLike[str],
    out: str | PathLike[str],
    dtype: torch.dtype | None = None,
    exclude_frozen: bool = False,
    max_shard_bytes: int = 5 * 10**9,
    tag: str | None = None,
) -> Exported:
    """Write a checkpoint's parameters and buffers as safetensors into the folder `out`, in one process.

    dtype            None: fp32, from the master weights, and float64 unchanged; else floating-point tensors
                     are converted to it. Other buffers keep their dtype
    exclude_frozen   leave frozen parameters out
    max_shard_bytes  the largest size of a file; a larger export becomes several files and an index
    tag              the checkpoint in the folder; None: the latest

    Tied parameters are stored once. The header has their other names, as with `safetensors.torch`. Damaged
    data raise an error. The files depend on names and values only, not on the number of saving ranks.
    """
    options, place = ExportOptions(dtype, exclude_frozen, max_shard_bytes), local_path(out)
    with closing(open_checkpoint(local_path(folder), tag)) as source:
        return consolidate(source, place, options)


def consolidate(
    source: Source, out: Path, options: ExportOptions, advance: Advance = lambda size: None
) -> Exported:
    """Export the source into the folder `out`. After CheckpointError or OSError, no file is left behind."""
    entries, left_out = _entries(source, options)
    tied = _tied(source, entries)
    files = WeightFiles(out / SINGLE, list(entries.values()), options.max_shard_bytes, tied)
    _check_place(out, files)
    try:
        files.begin()
        for key, entry in entries.items():
            _copy(source, key, entry, files, advance)
        files.finish()
    finally:
        with suppress(OSError):  # the first error is being raised already
            files.discard()
    return Exported(files.results(), files.size, left_out, list(source.shared.get("others") or {}))


def size_to_read(source: Source, options: ExportOptions) -> int:
    """Return the total bytes that `consolidate` will report to its progress callback."""
    return sum(source.tensors[key].nbytes for key in _entries(source, options)[0])


# The contents of the files ---------------------------------------------------------------------------


def _entries(source: Source, options: ExportOptions) -> tuple[dict[str, TensorEntry], list[str]]:
    """Return the tensors to write, by key of the source, and the names of frozen parameters left out."""
    _check_unique_names(source)
    frozen = _frozen(source, options.exclude_frozen)
    entries, left_out, keys = dict[str, TensorEntry](), [], dict[str, str]()
    for key in sorted(source.tensors, key=lambda key: (natural_order(key.partition("/")[2]), key)):
        stored, (kind, _, name) = source.tensors[key], key.partition("/")
        if kind == PARAMETERS and name in frozen:
            left_out.append(name)
        elif kind in (PARAMETERS, BUFFERS):
            if name in keys:
                raise CheckpointError(
                    f"{source.path} has {keys[name]} and {key}, which have the same name. Load another tag"
                )
            keys[name], dtype = key, options.dtype_of(stored.dtype)
            if dtype not in CODES:
                raise CheckpointError(
                    f"{source.path}: {name} is {dtype}, which safetensors does not support. Load the "
                    "checkpoint, and leave the tensor out with engine.save_weights(names=...)"
                )
            entries[key] = TensorEntry(name, dtype, stored.shape)
    if not any(key.startswith(f"{PARAMETERS}/") for key in entries):
        reason = "all its parameters are frozen" if left_out else "it has no parameters"
        raise CheckpointError(f"{source.path} has nothing to export: {reason}")
    absent = [name for name in source.shared.get("excluded") or [] if name not in left_out]
    return entries, left_out + absent


def _check_unique_names(source: Source) -> None:
    """Raise CheckpointError if ranks have different parameters of the same name."""
    parts = [key for key in source.tensors if "@" in key.partition("/")[0]]
    if parts:
        raise CheckpointError(
            f"{source.path} has experts or tensor-parallel layers ({listed(parts, 3)}): parameters of the "
            "same name differ between ranks, which one file cannot hold. Load it as it was trained, and save "
            "engine.module_state_dict() into a file for each part"
        )


def _frozen(source: Source, exclude: bool) -> set[str]:
    """Return the stored names of the frozen parameters to leave out. Empty unless `exclude`."""
    excluded, frozen = source.shared.get("excluded") or [], source.shared.get("frozen")
    if not exclude:
        if excluded:
            raise CheckpointError(
                f"{source.path} was saved without the frozen parameters {listed(excluded)}. "
                "--exclude-frozen (exclude_frozen=True) exports the rest"
            )
        return set()
    if frozen is None and not excluded:
        raise CheckpointError(
            f"{source.path} does not say which parameters are frozen. Export all of them, without "
            "--exclude-frozen (exclude_frozen)"
        )
    return {source.aliases.get(name, name) for name in frozen or []}


def _tied(source: Source, entries: dict[str, TensorEntry]) -> dict[str, str]:
    """Return the other names of exported tied parameters, with the names under which they are stored."""
    names = {entry.name for entry in entries.values()}
    aliases = sorted(source.aliases.items(), key=lambda item: natural_order(item[0]))
    tied = {alias: name for alias, name in aliases if name in names}
    if twice := sorted(names & tied.keys()):
        raise CheckpointError(
            f"{source.path} stores {listed(twice)}, but says that these are tied to others. Export "
            "another tag"
        )
    return tied


# Reading and writing ---------------------------------------------------------------------------------


def _check_place(out: Path, files: WeightFiles) -> None:
    """Raise CheckpointError if `out` is no folder, holds an older export, or has too little disk space."""
    if out.suffix in OTHER_FILES or (out.exists() and not out.is_dir()):
        raise CheckpointError(f"{out} is a file name. Pass the folder in which {SINGLE} will be written")
    if older := files.older():
        raise CheckpointError(f"{older[0]} exists already. Export into another folder, or delete it first")
    place = next(path for path in (out, *out.absolute().parents) if path.exists())
    space = disk_usage(place)
    if space.free < files.size and space.total:  # some network file systems report zeros
        raise CheckpointError(
            f"the export needs {human(files.size)}, but {place} has only {human(space.free)} free. Pass "
            "a folder on another disk"
        )


def _copy(source: Source, key: str, entry: TensorEntry, files: WeightFiles, advance: Advance) -> None:
    """Write one tensor chunk by chunk. No chunk spans two of its pieces."""
    for start, stop in _chunks(source, key):
        values = source.read(key, start, stop)
        files.write_part(entry.name, start, _converted(values, entry))
        advance(values.nbytes)


def _chunks(source: Source, key: str) -> Iterator[tuple[int, int]]:
    """Yield the ranges in which to read a tensor. Verifies each whole piece before its first range."""
    stored = source.tensors[key]
    step = max(1, CHUNK // max(1, stored.dtype.itemsize))
    for first, last in source.parts(key, 0, stored.numel):
        source.verify(key, first, last)
        for start in range(first, last, step):
            yield start, min(start + step, last)


def _converted(values: Tensor, entry: TensorEntry) -> Tensor:
    """Return the values in the entry's dtype. Raises CheckpointError if a value overflows it."""
    if values.dtype == entry.dtype:
        return values
    converted = values.to(entry.dtype)
    narrower = torch.finfo(entry.dtype).max < torch.finfo(values.dtype).max
    if narrower and not torch.equal(converted.isfinite(), values.isfinite()):
        largest = values[values.isfinite()].abs().max().item()
        raise CheckpointError(
            f"{entry.name} has values as large as {largest:.3g}, which overflow {entry.dtype}. "
            "Choose another --dtype (dtype)"
        )
    return converted
