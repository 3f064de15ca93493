"""Whole weights from sharded parameters, for plain torch and everybody who reads safetensors.

Every rank takes part in the gathering, a flat buffer at a time; the first writes what it sees at once. The
files are the same, byte for byte, at every stage and world size.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zero_full.checkpoint.failure import Attempt
from zero_full.checkpoint.files import (
    TensorEntry,
    WeightFiles,
    flush,
    new_part,
    open_part,
    part_of,
    plain_name,
    show,
)
from zero_full.checkpoint.selection import Selection, refuse_parts, select
from zero_full.shard.access.gathered_parameters import copy_on_cpu
from zero_full.shard.group.parameters import FlatParameter, Member
from zero_full.shard.step.optimizer import ZeroOptimizer

Deliver = Callable[[str, Tensor], None]  # the tensor may be let go afterwards


class Sink(Protocol):
    """Where the first rank writes the whole tensors that it sees."""

    def begin(self) -> None:
        """Called before the first tensor."""

    def write(self, name: str, tensor: Tensor) -> None:
        """Take a whole tensor. The caller may free it afterwards."""

    def finish(self) -> None:
        """Called after the last tensor."""

    def discard(self) -> None:
        """Remove what was written, if it is not complete."""


@torch.no_grad()
def save_weights(
    module: nn.Module,
    optimizer: ZeroOptimizer,
    directory: str | PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    names: Callable[[str], str | None] | None = None,
    filename: str = "model.safetensors",
) -> None:
    """Write parameters and persistent buffers as safetensors. Every rank must call this.

    dtype            None: as they are trained; else floating-point numbers are converted to it, from the
                     fp32 masters where there are any
    max_shard_bytes  what does not fit into one file becomes several and an index
    names            a function from the module's names to the file's, the same on every rank; None as its
                     answer leaves a tensor out

    Tied parameters are stored once; the header tells their other names, as `safetensors.torch` does.
    """
    filename = plain_name("filename", filename)
    refuse_parts(optimizer)
    selection = select(module, names)
    if selection.others:
        raise ValueError(
            f"safetensors holds tensors only, and {', '.join(selection.others)} is or are none "
            "(get_extra_state): leave it out with names=..., or save a .bin file"
        )
    if max_shard_bytes < 1 or (dtype is not None and not dtype.is_floating_point):
        raise ValueError(
            f"max_shard_bytes must be positive and dtype floating-point, not {max_shard_bytes}, {dtype}"
        )
    entries = [
        TensorEntry(
            name, dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype, tensor.shape
        )
        for tensor, name in selection.first_names().items()
    ]
    files = WeightFiles(Path(directory) / filename, entries, max_shard_bytes, selection.aliases())
    _export(optimizer, selection, files, exact=dtype is not None)


@torch.no_grad()
def save_16bit_model(
    module: nn.Module,
    optimizer: ZeroOptimizer,
    save_dir: str | PathLike[str],
    save_filename: str = "pytorch_model.bin",
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Write one file with the parameters as they are trained, as DeepSpeed does. Every rank must call this.

    A name that ends with .safetensors makes a safetensors file, any other one what `torch.load` reads: for
    that, the first rank needs memory for the whole model. Returns True, or raises on every rank.
    """
    save_filename = plain_name("save_filename", save_filename)
    refuse_parts(optimizer)
    frozen = {n for n, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    skipped = frozen if exclude_frozen_parameters else set()

    def names(name: str) -> str | None:
        return None if name in skipped else name

    if save_filename.endswith(".safetensors"):
        save_weights(
            module, optimizer, save_dir, max_shard_bytes=sys.maxsize, names=names, filename=save_filename
        )
    else:
        selection = select(module, names)
        _export(optimizer, selection, _PickledFile(Path(save_dir) / save_filename, selection), exact=False)
    return True


def _export(optimizer: ZeroOptimizer, selection: Selection, sink: Sink, exact: bool) -> None:
    """Gather every selected tensor and pass it to the first rank's sink."""
    attempt = Attempt(optimizer, "save_weights")
    writes = all(group.rank == 0 for group in optimizer.groups.everyone)

    def deliver(name: str, tensor: Tensor) -> None:
        if writes:  # a failure is kept: this rank takes part in the gathering to its end, like the others
            attempt(partial(sink.write, name, tensor))

    attempt(optimizer.catch_up)
    try:
        if writes:
            attempt(sink.begin)
        attempt.agree()  # before anything is gathered
        _pass_on(optimizer, selection, exact, deliver)
        if writes:
            attempt(sink.finish)
        attempt.agree()
    finally:
        if writes:
            with suppress(OSError):  # the reason has been told
                sink.discard()


def _pass_on(optimizer: ZeroOptimizer, selection: Selection, exact: bool, deliver: Deliver) -> None:
    """Deliver every selected tensor, whole, one flat buffer after the other. Every rank must call this."""
    names = selection.first_names()
    masters = {owned.flat: owned.master for owned in optimizer.owned} if exact else {}
    for flat in optimizer.flats():
        members = {names.pop(m.param): m for m in flat.members if m.param in names}
        if members:
            _pass_on_members(flat, masters.get(flat, flat.shard), members, deliver)
    for tensor, name in names.items():
        deliver(name, tensor)


def _pass_on_members(
    flat: FlatParameter, mine: Tensor, members: Mapping[str, Member], deliver: Deliver
) -> None:
    whole = _whole(flat, mine)
    for name, member in members.items():
        deliver(name, whole[flat.layout.window(member.index)].view(member.param.shape))


def _whole(flat: FlatParameter, mine: Tensor) -> Tensor:
    """The slices of all ranks in one tensor, gathered without the rounding that `gather` may do."""
    if mine is flat.shard and not flat.released_at_rest:
        return flat.full
    whole = torch.empty(flat.layout.total, dtype=mine.dtype, device=flat.kind.device)
    flat.ranks.slice_of(whole).copy_(mine)
    flat.ranks.all_gather(whole, f"parameters {flat.name}")
    return whole


class _PickledFile:
    """A sink that collects a state dict and pickles it for `torch.load`."""

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
        flush(self.path)
        show(self.path)

    def discard(self) -> None:
        self.kept.clear()
        part_of(self.path).unlink(missing_ok=True)
