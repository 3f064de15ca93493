"""`GatheredParameters` before `initialize`: give recorded tensors values while the context lasts.

Replay computes the values. A change by the modifier rank is recorded as one more operation, a copy from the
changed tensor, so only that rank keeps it in memory. (If the tensor was copied from a mapped file, the
recorded copy is from there, and no rank keeps it in memory.) The other ranks note that their values are
outdated (`NewestVersion`), and receive the new ones at the next context.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zero_full._compat import device_of, version_of
from zero_full.comm.topology import this_rank
from zero_full.construct.mapped_files import MappedFiles
from zero_full.construct.recorded_tensor import Record, Recorded, RecorderProtocol, dematerialize, materialize
from zero_full.construct.recording import NewestVersion
from zero_full.errors import DisagreementError
from zero_full.formatting import by_value
from zero_full.shard.group.checksum import checksum
from zero_full.shard.group.registry import opened, record_of


@contextmanager
def gathered(
    tensors: Sequence[Tensor], rank: int | None, paused: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Give these tensors values inside the context, and record nothing.

    `rank` is the modifier rank, whose changes are kept; None: a change raises.
    """
    records = {tensor: record_of(tensor) for tensor in tensors}
    _check_modifier_rank(records, rank)
    with ExitStack() as stack:
        stack.enter_context(paused())
        for recorder in dict.fromkeys(record.recorder for record in records.values()):
            closed = {t: r for t, r in records.items() if r.recorder is recorder and t not in opened}
            _give_values(recorder, closed)
        for tensor, record in records.items():
            record.contexts += 1
            record.rank = rank if record.rank is None else record.rank
            stack.callback(_take_values, tensor, record)
        before = {tensor: _fingerprint(tensor) for tensor in records}
        if rank == this_rank():
            stack.enter_context(_CopiesFromFiles(records))
        yield
        _check_changes(records, before, rank)


def _check_modifier_rank(records: dict[Tensor, Record], rank: int | None) -> None:
    if rank is None:
        return
    if not dist.is_initialized() and rank != 0:
        raise RuntimeError(
            f"modifier_rank={rank} needs the ranks of torch.distributed. Call zero_full.init_distributed() "
            "first."
        )
    if dist.is_initialized() and not 0 <= rank < dist.get_world_size():
        raise ValueError(f"modifier_rank {rank} is not one of the {dist.get_world_size()} ranks.")
    for record in records.values():
        if record.rank not in (None, rank):
            raise RuntimeError(
                f"{record.name} is inside GatheredParameters(modifier_rank={record.rank}) already. Use this "
                "modifier_rank in the inner context as well."
            )


def _give_values(recorder: RecorderProtocol, closed: dict[Tensor, Record]) -> None:
    """Compute the values of these tensors by replay, and assign them."""
    behind = {id(record.twin): tensor for tensor, record in closed.items()}
    recording, twins = recorder.recording, [record.twin for record in closed.values()]
    recording.check_not_from_file("GatheredParameters", twins)

    def deliver(twin: Tensor, real: Tensor) -> None:
        tensor = behind[id(twin)]
        assert isinstance(tensor, Recorded)
        opened[tensor] = materialize(tensor, real)

    try:
        recording.replay(deliver, twins, remember=True)
        newest = {tensor: recording.newest_version(record.twin) for tensor, record in closed.items()}
        _check_same_shapes({closed[t].name: t for t, each in newest.items() if each is not None})
        for tensor, record in closed.items():
            changed_by = newest[tensor]
            record.was_received = changed_by is not None
            if changed_by is not None and tensor.numel():  # sub-groups are not known yet
                sent = tensor.detach().to(device_of(dist.group.WORLD)).contiguous()
                dist.broadcast(sent.view(-1).view(torch.uint8), changed_by.rank)
                tensor.data.copy_(sent)
            record.at_start = _fingerprint(tensor)
            record.accepted, record.rank, record.contexts = None, None, 0
    except BaseException:
        for tensor, record in closed.items():
            if opened.pop(tensor, None) is not None:
                dematerialize(tensor, record)
        raise


def _check_same_shapes(borrowed: dict[str, Tensor]) -> None:
    """Raise DisagreementError on every rank if a tensor to broadcast differs in shape or dtype.

    The modifier rank may have changed the shape or dtype, and other ranks' buffers would not match.
    """
    if not borrowed:
        return
    mine = {
        name: f"{str(t.dtype).removeprefix('torch.')} of shape {tuple(t.shape)}"
        for name, t in borrowed.items()
    }
    everyones: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    for name in mine:
        kinds = by_value({rank: theirs.get(name, "not gathered") for rank, theirs in enumerate(everyones)})
        if len(kinds) > 1:
            raise DisagreementError(
                f"{name} is {' and '.join(kinds)}. Change its shape or dtype on every rank, before or inside "
                "GatheredParameters."
            )


def _fingerprint(tensor: Tensor) -> Any:
    """Return a fingerprint of the tensor: torch's version counter, and a checksum for untracked writes."""
    return version_of(tensor), tensor.dtype, tuple(tensor.shape), checksum(tensor)


class _CopiesFromFiles(TorchFunctionMode):
    """Torch function mode that notes the mapped tensors from which `load_state_dict` copies."""

    def __init__(self, records: dict[Tensor, Record]) -> None:
        super().__init__()
        self.records = records

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.copy_ and len(args) > 1 and args[0] in self.records and args[1] in MappedFiles():
            self.records[args[0]].source = args[1].detach()
        return result


def _check_changes(records: dict[Tensor, Record], before: dict[Tensor, Any], rank: int | None) -> None:
    changed = []
    for tensor, record in records.items():
        now = _fingerprint(tensor)
        if rank is not None:
            record.accepted = now
        elif now not in (before[tensor], record.accepted):
            changed.append(record.name)
            record.accepted = None
    if changed:
        raise RuntimeError(
            f"{', '.join(changed)} changed inside GatheredParameters, and the change is undone. Pass "
            "modifier_rank, the rank whose values are kept."
        )


def _are_equal(source: Tensor, real: Tensor) -> bool:
    return source.dtype == real.dtype and source.shape == real.shape and checksum(source) == checksum(real)


def _take_values(tensor: Tensor, record: Record) -> None:
    record.contexts -= 1
    if record.contexts:
        return
    source, record.source = record.source, None
    del opened[tensor]
    real, is_accepted = tensor.detach(), record.accepted is not None
    has_changed = record.accepted != record.at_start or record.was_received
    is_mine = is_accepted and this_rank() == record.rank and has_changed
    is_another = is_accepted and (real.shape != record.twin.shape or real.dtype != record.twin.dtype)
    if record.twin.is_leaf:
        record.twin.requires_grad_(tensor.requires_grad)
    dematerialize(tensor, record)
    with torch.no_grad():
        if is_another:
            tensor.data = tensor.new_empty(real.shape, dtype=real.dtype).copy_(real)
        elif is_mine:
            tensor.copy_(source if source is not None and _are_equal(source, real) else real)
    if is_accepted and record.rank is not None and dist.is_initialized() and dist.get_world_size() > 1:
        recording = record.recorder.recording
        recording.newest[recording.value_of(record.twin)] = NewestVersion(record.rank)
    record.rank = None
