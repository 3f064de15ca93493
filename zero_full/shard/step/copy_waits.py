"""Whether what was copied between a device and the host has arrived: every rank hears of a failure."""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from zero_full.errors import CopyError
from zero_full.shard.group.gradients import Bucket
from zero_full.shard.group.master import Owned
from zero_full.shard.group.process_groups import Groups
from zero_full.shard.step.agreement import told_by_all


def await_gradients(buckets: Iterable[Bucket]) -> Exception | None:
    """Until all gradients are where they are stepped. Returns what has failed."""
    failure: Exception | None = None
    for bucket in buckets:
        try:
            bucket.averaged_slice()
        except CopyError as error:
            failure = failure or error
        if bucket.down is not None:
            bucket.down.flow.wait_for_copies()
    return failure


def collect(owned: Owned) -> None:
    """Everyone's slice of these parameters to everyone, when this rank's is there.

    If its copy has failed the others get what there is, and hear of it afterwards: `await_parameters`.
    """
    with suppress(CopyError):
        owned.settle()
    owned.flat.collect()


def await_parameters(groups: Groups, everything: Sequence[Owned]) -> None:
    """Until all parameters are on the device; raise on every rank if some rank's are not."""
    if not any(owned.flow is not None for owned in everything):
        return
    failures: list[Exception] = []
    for owned in everything:
        try:
            owned.settle()
        except CopyError as error:
            failures.append(error)
    mine = [f"rank {groups.dense.shard.rank}: {failures[0]}"] if failures else []
    if told := told_by_all(groups, mine, "parameters that were sent"):
        raise CopyError("; ".join(told)) from (failures[0] if failures else None)
