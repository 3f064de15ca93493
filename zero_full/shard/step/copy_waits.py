"""Wait for pending host-device copies, and raise on every rank if one of them failed.

Only runs whose optimizer state is offloaded have such copies.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from zero_full.comm.topology import this_rank
from zero_full.errors import CopyError
from zero_full.shard.group.parameter_group import TrainedGroup
from zero_full.shard.group.process_groups import Communicators
from zero_full.shard.step.agreement import gather_messages


def await_gradients(trained: Iterable[TrainedGroup]) -> Exception | None:
    """Wait until all gradients are on the host, where they are stepped. Returns the first error."""
    failure: Exception | None = None
    for gradients in (group.gradients for group in trained):
        try:
            gradients.averaged_slice()
        except CopyError as error:
            failure = failure or error
        if gradients.host_slice is not None:
            gradients.host_slice.copy_threads.wait_for_copies()
    return failure


def all_gather_after_copy(group: TrainedGroup) -> None:
    """All-gather a group's parameters once this rank's slice is on the device.

    If the copy of the slice failed, the other ranks get stale values, and `await_parameters` raises on all.
    """
    with suppress(CopyError):  # raising here would leave the other ranks waiting in the all-gather
        group.master.wait_for_copy()
    group.parameters.all_gather()


def await_parameters(communicators: Communicators, trained: Sequence[TrainedGroup]) -> None:
    """Wait until all parameters are on the device; raise on every rank if a copy failed on one of them."""
    failures: list[Exception] = []
    for group in trained:
        try:
            group.master.wait_for_copy()
        except CopyError as error:
            failures.append(error)
    mine = [f"rank {this_rank()}: {failures[0]}"] if failures else []
    if messages := gather_messages(communicators, mine, "parameters that were sent"):
        raise CopyError("; ".join(messages)) from (failures[0] if failures else None)
