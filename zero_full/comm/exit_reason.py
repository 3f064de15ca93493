"""Why a rank has ended: it leaves its error in the process group's store, for ranks that wait for it.

A rank that has failed is noticed by a closed connection, or by a number in shared memory. Neither says why.
At its exit, and when an exception takes its communicators away, the rank writes the exception down.
"""

import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

PATIENCE_S = 1.0  # for a rank that is about to write
LOOK_S = 0.02
LENGTH = 500  # characters of an error


def leave_reason(store: Any, rank: int) -> None:
    """Write down the exception that ends this process, or what is going on now; nothing if there is none."""
    error: BaseException | None = sys.exc_info()[1]
    if error is None and not threading.main_thread().is_alive():  # the script has ended
        error = getattr(sys, "last_value", None)
    if error is not None and not isinstance(error, SystemExit):
        write_down(store, rank, error)


def write_down(store: Any, rank: int, error: BaseException) -> None:
    """Leave this error, which is about to be raised here, for ranks that will wait for this one."""
    with suppress(Exception):  # the store may be gone as well
        store.set(_key(rank), f"{type(error).__name__}: {error}"[:LENGTH])


def reasons_of(store: Any, ranks: Iterable[int]) -> dict[int, str]:
    """What any of these ranks have written down, waiting a moment for the first one."""
    ranks, deadline = list(ranks), time.monotonic() + PATIENCE_S
    with suppress(Exception):
        while not (there := [rank for rank in ranks if store.check([_key(rank)])]):
            if time.monotonic() > deadline:
                return {}
            time.sleep(LOOK_S)
        return {rank: store.get(_key(rank)).decode(errors="replace") for rank in there}
    return {}


def _key(rank: int) -> str:
    return f"zero_full/exit_reason/{rank}"
