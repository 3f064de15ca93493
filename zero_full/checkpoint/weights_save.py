"""Export the full weights of a sharded model, as safetensors or for `torch.load`.

All ranks gather one flat buffer at a time, and rank 0 writes its tensors immediately. The files are equal,
byte for byte, at every stage and world size.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_full.checkpoint.failure import Attempt
from zero_full.checkpoint.safetensors_writer import (
    TensorEntry,
    WeightFiles,
    check_export,
    check_file_name,
    flush_part,
    new_part,
    open_part,
    part_of,
    publish_part,
)
from zero_full.checkpoint.selection import Selection, check_unique_names, select
from zero_full.shard.access.gathered_parameters import copy_on_cpu
from zero_full.shard.group.parameters import FlatParameters
from zero_full.shard.step.optimizer import ZeroOptimizer

Deliver = Callable[[str, Tensor], None]  # the tensor may be freed after the call


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

    dtype            None: the dtype of training; else floating-point tensors are converted to it, from the
                     fp32 master weights where they exist
    max_shard_bytes  the largest size of a file; a larger export becomes several files and an index
    names            a function from the module's names to names in the file, the same on every rank; it
                     returns None to leave a tensor out

    Tied parameters are stored once. The header has their other names, as with `safetensors.torch`.
    """
    filename = check_file_name("filename", filename)
    check_unique_names(optimizer)
    selection = select(module, names)
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
    """Write one file with the parameters in their training dtype, like DeepSpeed. Every rank must call this.

    A name that ends with .safetensors selects that format. Any other name selects a file for `torch.load`,
    for which rank 0 needs memory for the whole model. Returns True, or raises on every rank.
    """
    save_filename = check_file_name("save_filename", save_filename)
    check_unique_names(optimizer)
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


def _export(
    optimizer: ZeroOptimizer, selection: Selection, sink: "WeightFiles | _PickledFile", exact: bool
) -> None:
    """Gather every selected tensor and write it to the sink on rank 0."""
    attempt = Attempt(optimizer, "save_weights")
    writes = all(group.rank == 0 for group in optimizer.groups.everyone)

    def deliver(name: str, tensor: Tensor) -> None:
        if writes:  # after a failure this rank goes on gathering, as the others wait for its collectives
            attempt(partial(sink.write, name, tensor))

    attempt(optimizer.catch_up)
    try:
        if writes:
            attempt(sink.begin)
        attempt.agree()  # before anything is gathered
        _gather(optimizer, selection, exact, deliver)
        if writes:
            attempt(sink.finish)
        attempt.agree()
    finally:
        if writes:
            with suppress(OSError):  # `agree` has raised the first error already
                sink.discard()


def _gather(optimizer: ZeroOptimizer, selection: Selection, exact: bool, deliver: Deliver) -> None:
    """Deliver every selected tensor in full, one flat buffer at a time. Every rank must call this."""
    names = selection.first_names()
    masters = {group.parameters: group.master.values for group in optimizer.trained} if exact else {}
    for flat in optimizer.parts.flats:
        members = {names.pop(m.param): m for m in flat.members if m.param in names}
        if members:
            whole = _all_gather(flat, masters.get(flat, flat.shard))
            for name, member in members.items():
                deliver(name, whole[flat.layout.windows[member.index]].view(member.param.shape))
            del whole  # before the next flat buffer is gathered
    for tensor, name in names.items():
        deliver(name, tensor)


def _all_gather(flat: FlatParameters, shard: Tensor) -> Tensor:
    """All-gather the shards of a flat buffer without the quantization that `gather` may apply."""
    if shard is flat.shard and not flat.released_at_rest:
        return flat.full
    whole = torch.empty(flat.layout.total, dtype=shard.dtype, device=flat.kind.device)
    flat.ranks.slice_of(whole).copy_(shard)
    flat.ranks.all_gather(whole, f"parameters {flat.name}")
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
