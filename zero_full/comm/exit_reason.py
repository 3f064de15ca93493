"""Exit reasons: a failed rank writes its exception to the store, for the errors of ranks that wait for it.

Other ranks notice a failed rank by a closed connection or by a counter in shared memory, and neither has a
reason. So a rank writes its exception to the process group's store at exit, and when an exception destroys
its communicators.
"""

import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

TIMEOUT_S = 1.0  # how long to wait for a rank that is about to write
POLL_S = 0.02  # between looks
LENGTH = 500  # characters of an error, at most


def write_exit_reason(store: Any, rank: int) -> None:
    """Write the exception that ends this process, or that is being handled now. Do nothing without one."""
    error: BaseException | None = sys.exc_info()[1]
    if error is None and not threading.main_thread().is_alive():  # the script has ended
        error = getattr(sys, "last_value", None)
    if error is not None and not isinstance(error, SystemExit):
        write_error(store, rank, error)


def write_error(store: Any, rank: int, error: BaseException) -> None:
    """Write an error that this rank is about to raise, for ranks that will wait for this one."""
    with suppress(Exception):  # the store may have ended as well
        store.set(_key(rank), f"{type(error).__name__}: {error}"[:LENGTH])


def exit_reasons(store: Any, ranks: Iterable[int]) -> dict[int, str]:
    """The errors that these ranks have written, by rank. Waits up to `TIMEOUT_S` for the first one."""
    ranks, deadline = list(ranks), time.monotonic() + TIMEOUT_S
    with suppress(Exception):
        while not (failed := [rank for rank in ranks if store.check([_key(rank)])]):
            if time.monotonic() > deadline:
                return {}
            time.sleep(POLL_S)
        return {rank: store.get(_key(rank)).decode(errors="replace") for rank in failed}
    return {}


def _key(rank: int) -> str:
    return f"zero_full/exit_reason/{rank}"
