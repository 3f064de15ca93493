"""The store that starts a process group: parts of it for one purpose each, and why a rank has ended.

[Note: a used store] torchrun's agent keeps one store as long as it runs. Ranks that it restarts find the keys
of the ranks before them, for example the addresses of processes that have ended. Whether a rank reads such a
key depends on which rank comes first. So ranks agree on a prefix before they use a store. Each asks rank 0
with a random token, so that it cannot take the answer to another rank or another start. Rank 0 answers until
all ranks have confirmed.

[Note: exit reasons] Other ranks notice a failed rank by a closed connection or by a counter in shared memory,
and neither has a reason. So a rank writes its exception to the store at exit, and when an exception destroys
its communicators. Ranks that wait for it put the exception into their own errors.
"""

import secrets
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from zero_full._compat import default_store, prefix_store

PREFIX = "zero_full/start"
POLL_S = 0.01  # between looks for ranks that have not come yet
TIMEOUT_S = 1.0  # how long to wait for a rank that is about to write its exit reason
LENGTH = 500  # characters of an error, at most


def numbered_topic(purpose: str, ranks: Sequence[int], rank: int) -> str:
    """Name a part of the store for one object of these ranks. Each rank counts the objects it has made."""
    name = f"{purpose}/{'-'.join(map(str, ranks))}"
    return f"{name}/{default_store().add(f'zero_full/{name}/made/{rank}', 1)}"


def fresh_prefix(store: Any, rank: int, ranks: int) -> Any:
    """Agree on an unused part of the store. Every rank must call this. See [Note: a used store]."""
    prefix = prefix_store(PREFIX, store)
    if rank == 0:
        name = secrets.token_hex(8)
        _answer(prefix, name, ranks)
    else:
        question = secrets.token_hex(8)
        prefix.set(f"asks/{rank}", question)
        name = prefix.get(f"answer/{question}").decode()
        prefix.set(f"{name}/heard/{rank}", "")
    return prefix_store(name, prefix)


def _answer(prefix: Any, name: str, ranks: int) -> None:
    """On rank 0: send the part's name to every other rank, until all have confirmed it."""
    waiting, questions = set(range(1, ranks)), dict[int, bytes]()
    deadline = time.monotonic() + prefix.timeout.total_seconds()
    while waiting:
        for rank in sorted(waiting):
            if prefix.check([f"asks/{rank}"]):
                question = prefix.get(f"asks/{rank}")
                if questions.get(rank) != question:  # a new one: not answered yet
                    prefix.set(f"answer/{question.decode()}", name)
                    questions[rank] = question
            if prefix.check([f"{name}/heard/{rank}"]):
                waiting.discard(rank)
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"ranks {sorted(waiting)} have not called init_distributed within "
                f"{prefix.timeout.total_seconds():g} s. Its argument timeout sets how long to wait."
            )
        time.sleep(POLL_S if waiting else 0)


# Exit reasons ----------------------------------------------------------------------------------------


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
    """Return the errors that these ranks have written, by rank. Waits up to `TIMEOUT_S` for the first one."""
    ranks, deadline = list(ranks), time.monotonic() + TIMEOUT_S
    with suppress(Exception):
        while time.monotonic() < deadline:
            if failed := [rank for rank in ranks if store.check([_key(rank)])]:
                return {rank: store.get(_key(rank)).decode(errors="replace") for rank in failed}
            time.sleep(POLL_S)
    return {}


def _key(rank: int) -> str:
    return f"zero_full/exit_reason/{rank}"
