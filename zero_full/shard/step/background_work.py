"""Work of an optimizer that goes on beside its steps, such as the writing of a checkpoint."""

from typing import NoReturn, Protocol

ELSEWHERE = (
    "something has failed on another rank, whose message says what to do on all of them: a checkpoint that "
    "was saved beside the training, or what waits in a file there (nvme_path)"
)


class Beside(Protocol):
    """Such work, of which the next step hears."""

    def has_failed(self) -> bool:
        """Whether `wait` would raise, as far as this rank knows by now."""

    def wait(self) -> None:
        """Wait until it is done. Raises what has failed, once."""

    def close(self) -> None:
        """Wait, and let go of memory."""


def raise_failure(known: str, work: Beside | None) -> NoReturn:
    """It has failed on some rank: raise that on this one, which may not have heard of it yet.

    `known`: in words, what this rank knows of already.
    """
    if known:
        raise RuntimeError(known)
    if work is not None:
        work.wait()
    raise RuntimeError(ELSEWHERE)
