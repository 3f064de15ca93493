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

MEETING = "zero_full/start"
LOOK_S = 0.01  # between looks for ranks that have not come yet


def fresh_part(store: Any, rank: int, ranks: int) -> Any:
    """Agree on an unused part of the store. Every rank must call this. See [Note: a used store]."""
    meeting = prefix_store(MEETING, store)
    if rank == 0:
        name = secrets.token_hex(8)
        _answer(meeting, name, ranks)
    else:
        question = secrets.token_hex(8)
        meeting.set(f"asks/{rank}", question)
        name = meeting.get(f"answer/{question}").decode()
        meeting.set(f"{name}/heard/{rank}", "")
    return prefix_store(name, meeting)


def _answer(meeting: Any, name: str, ranks: int) -> None:
    """Rank 0: send every other rank the name of the part, until all have confirmed it."""
    waiting, questions = set(range(1, ranks)), dict[int, bytes]()
    deadline = time.monotonic() + meeting.timeout.total_seconds()
    while waiting:
        for rank in sorted(waiting):
            if meeting.check([f"asks/{rank}"]):
                question = meeting.get(f"asks/{rank}")
                if questions.get(rank) != question:  # a new one: not answered yet
                    meeting.set(f"answer/{question.decode()}", name)
                    questions[rank] = question
            if meeting.check([f"{name}/heard/{rank}"]):
                waiting.discard(rank)
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"ranks {sorted(waiting)} have not come to init_distributed within "
                f"{meeting.timeout.total_seconds():g} s (its argument timeout says how long to wait)"
            )
        time.sleep(LOOK_S if waiting else 0)
