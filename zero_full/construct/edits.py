"""`GatheredParameters` before `initialize`: give recorded tensors values while the context lasts.

Replay computes the values. A change by the modifier rank is recorded as one more operation, a copy from the
changed tensor, so only that rank keeps it in memory. The other ranks note that their values are outdated
(`Elsewhere`), and receive the new ones at the next context.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_full._compat import device_of, version_of
from zero_full.comm.topology import this_rank
from zero_full.construct.deferred import Elsewhere
from zero_full.construct.recorded import Keeper, Record, Recorded, conceal, reveal
from zero_full.errors import DisagreementError
from zero_full.formatting import ranks_listed
from zero_full.shard.group.checksum import checksum
from zero_full.shard.group.registry import opened, record_of


@contextmanager
def gathered(
    tensors: Sequence[Tensor], rank: int | None, resting: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Give these tensors values inside the context, and record nothing.

    `rank` is the modifier rank, whose changes are kept; None: a change raises.
    """
    records = {tensor: record_of(tensor) for tensor in tensors}
    _check(records, rank)
    with ExitStack() as stack:
        stack.enter_context(resting())
        for keeper in dict.fromkeys(record.keeper for record in records.values()):
            _open(keeper, {t: r for t, r in records.items() if r.keeper is keeper and t not in opened})
        for tensor, record in records.items():
            record.users += 1
            record.rank = rank if record.rank is None else record.rank
            stack.callback(_leave, tensor, record)
        before = {tensor: _print(tensor) for tensor in records}
        yield
        _settle(records, before, rank)


def _check(records: dict[Tensor, Record], rank: int | None) -> None:
    if rank is None:
        return
    if not dist.is_initialized() and rank != 0:
        raise RuntimeError(
            f"modifier_rank={rank} means nothing before torch.distributed knows the ranks: call "
            "zero_full.init_distributed() first"
        )
    if dist.is_initialized() and not 0 <= rank < dist.get_world_size():
        raise ValueError(f"modifier_rank {rank} is not one of the {dist.get_world_size()} ranks")
    for record in records.values():
        if record.rank not in (None, rank):
            raise RuntimeError(
                f"{record.name} is inside GatheredParameters(modifier_rank={record.rank}) already: use the "
                "same modifier_rank inside"
            )


def _open(keeper: Keeper, closed: dict[Tensor, Record]) -> None:
    """Compute the values of these tensors by replay, and assign them."""
    behind = {id(record.twin): tensor for tensor, record in closed.items()}
    recording, twins = keeper.recording, [record.twin for record in closed.values()]
    recording.refuse_if_from_file("GatheredParameters", twins)
    try:
        recording.replay(lambda twin, real: _show(behind[id(twin)], real), twins, remember=True)
        newest = {tensor: recording.newest_of(record.twin) for tensor, record in closed.items()}
        _refuse_other_kinds({closed[t].name: t for t, each in newest.items() if each is not None})
        for tensor, record in closed.items():
            changed_by = newest[tensor]
            record.is_borrowed = changed_by is not None
            if changed_by is not None:
                _borrow(tensor.data, changed_by.rank)
            record.shown, record.accepted, record.rank, record.users = _print(tensor), None, None, 0
    except BaseException:
        for tensor, record in closed.items():
            if opened.pop(tensor, None) is not None:
                conceal(tensor, record)
        raise


def _show(tensor: Tensor, real: Tensor) -> None:
    assert isinstance(tensor, Recorded)
    opened[tensor] = reveal(tensor, real)


def _refuse_other_kinds(borrowed: dict[str, Tensor]) -> None:
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
        kinds: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyones):
            kinds.setdefault(theirs.get(name, "not gathered"), []).append(rank)
        if len(kinds) > 1:
            told = " and ".join(f"{kind} on {ranks_listed(ranks)}" for kind, ranks in kinds.items())
            raise DisagreementError(
                f"{name} is {told}: what changes its shape or type must be done on every rank, before "
                "GatheredParameters or in it"
            )


def _borrow(real: Tensor, rank: int) -> None:
    """Broadcast the newest values from `rank` to all ranks. Sub-groups are not known yet."""
    place = device_of(dist.group.WORLD)
    sent = real.to(place).contiguous()
    if sent.numel():
        dist.broadcast(sent.view(-1).view(torch.uint8), rank)
        real.copy_(sent)


def _print(tensor: Tensor) -> Any:
    """Return a fingerprint of the tensor: torch's version counter, and a checksum for untracked writes."""
    return version_of(tensor), tensor.dtype, tuple(tensor.shape), checksum(tensor)


def _settle(records: dict[Tensor, Record], before: dict[Tensor, Any], rank: int | None) -> None:
    changed = []
    for tensor, record in records.items():
        now = _print(tensor)
        if rank is not None:
            record.accepted = now
        elif now not in (before[tensor], record.accepted):
            changed.append(record.name)
            record.accepted = None
    if changed:
        raise RuntimeError(
            f"{', '.join(changed)} changed inside GatheredParameters, and the change is undone: pass "
            "modifier_rank, the rank whose values count"
        )


def _leave(tensor: Tensor, record: Record) -> None:
    record.users -= 1
    if record.users:
        return
    del opened[tensor]
    real, is_accepted = tensor.detach(), record.accepted is not None
    has_changed = record.accepted != record.shown or record.is_borrowed
    is_mine = is_accepted and this_rank() == record.rank and has_changed
    is_another = is_accepted and (real.shape != record.twin.shape or real.dtype != record.twin.dtype)
    if record.twin.is_leaf:
        record.twin.requires_grad_(tensor.requires_grad)
    conceal(tensor, record)
    with torch.no_grad():
        if is_another:
            tensor.data = tensor.new_empty(real.shape, dtype=real.dtype).copy_(real)
        elif is_mine:
            tensor.copy_(real)
    if is_accepted and record.rank is not None and dist.is_initialized() and dist.get_world_size() > 1:
        recording = record.keeper.recording
        recording.elsewhere[recording.value_of(record.twin)] = Elsewhere(record.rank)
    record.rank = None
