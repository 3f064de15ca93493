"""Background work of an optimizer during later steps, such as an asynchronous checkpoint."""

from typing import NoReturn, Protocol

FAILED_ELSEWHERE = (
    "another rank failed while writing an asynchronous checkpoint or in its NVMe offload (nvme_path). Its "
    "message says what to do"
)


class BackgroundWork(Protocol):
    """Background work on one rank. The next step raises on all ranks if it has failed on one."""

    def has_failed(self) -> bool:
        """Return whether `wait` would raise, as far as this rank knows by now."""

    def wait(self) -> None:
        """Wait until the work is done. Raises its error, once."""

    def close(self) -> None:
        """Wait, and free memory."""


def raise_failure(known: str, work: BackgroundWork | None) -> NoReturn:
    """Raise on this rank that background work has failed on some rank.

    `known`: the message, if this rank has one already.
    """
    if known:
        raise RuntimeError(known)
    if work is not None:
        work.wait()
    raise RuntimeError(FAILED_ELSEWHERE)
