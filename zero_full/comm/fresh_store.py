"""Fresh store prefix: ranks agree on a part of the store that an earlier start has not written to.

[Note: a used store] torchrun's agent keeps one store as long as it runs. Ranks that it restarts find the keys
of the ranks before them, for example the addresses of processes that have ended. Whether a rank reads such a
key depends on which rank comes first. So ranks agree on a prefix before they use a store. Each asks rank 0
with a random token, so that it cannot take the answer to another rank or another start. Rank 0 answers until
all ranks have confirmed.
"""

import secrets
import time
from typing import Any

from zero_full._compat import prefix_store

PREFIX = "zero_full/start"
POLL_S = 0.01  # between looks for ranks that have not come yet


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
    """Rank 0: send every other rank the name of the part, until all have confirmed it."""
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
