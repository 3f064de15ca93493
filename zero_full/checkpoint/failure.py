"""Raise a failure of one rank on all ranks, so that no rank continues alone or waits for a failed one."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from zero_full.comm.error_dedup import print_once
from zero_full.comm.topology import this_rank
from zero_full.errors import CheckpointError
from zero_full.formatting import by_value
from zero_full.shard.step.optimizer import ZeroOptimizer

T = TypeVar("T")


class Attempt:
    """Runs this rank's work between collectives, and keeps an exception until `agree` shares it."""

    def __init__(self, optimizer: ZeroOptimizer, call: str) -> None:
        if optimizer.closed:
            raise CheckpointError("nothing can be saved or loaded after destroy. Initialize the model again")
        self.optimizer, self.call = optimizer, call  # `call`: the function that every rank must have called
        self.error: Exception | None = None
        optimizer.on_every_rank(call)

    def __call__(self, act: Callable[[], T]) -> T | None:
        """Call `act` and return its result, unless it or an earlier call has failed. Keeps its exception."""
        if self.error is None:
            try:
                return act()
            except Exception as error:
                self.error = error
        return None

    def agree(self, value: Any = None) -> dict[int, Any]:
        """Raise on every rank if any rank has failed; else return every rank's `value`, by rank.

        Every rank must call this.
        """
        failure = None if self.error is None else message_of(self.error)
        reports = {this_rank(): (failure, value)}
        for communicator in self.optimizer.communicators.everyone:
            for theirs in communicator.gather_objects(reports, f"the ranks' results of {self.call}"):
                reports = {**reports, **theirs}
        failed = {rank: text for rank, (text, _) in sorted(reports.items()) if text is not None}
        if failed:
            first = [*failed, *(rank for rank in sorted(reports) if rank not in failed)]
            raise print_once(CheckpointError(joined_messages(failed, len(reports))), first) from self.error
        return {rank: each for rank, (_, each) in sorted(reports.items())}


def check_same_arguments(same: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise CheckpointError if the arguments of a call, by rank and by name, differ between ranks."""
    for key in next(iter(same.values())):
        values = by_value({rank: repr(arguments[key]) for rank, arguments in same.items()})
        if len(values) > 1:
            raise CheckpointError(
                f"{key} differs between ranks: {'; '.join(values)}. Every rank must pass the same arguments "
                "(the time of day, in a name, differs between ranks)"
            )


def message_of(error: BaseException | None) -> str:
    """Return the error's message, or its class name if the message is empty."""
    return str(error) or type(error).__name__


def joined_messages(failed: dict[int, str], ranks: int) -> str:
    """Return an error message from the failures by rank.

    Ranks are named unless all of them have failed with the same text.
    """
    first: dict[str, int] = {}
    for rank, text in failed.items():
        first.setdefault(text, rank)
    if len(first) == 1 and len(failed) == ranks:
        return next(iter(first))
    return "\n".join(f"rank {rank}: {text}" for text, rank in first.items())
