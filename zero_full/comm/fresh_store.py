"""A part of a store in which nobody has written yet.

[Note: a used store] An agent of torchrun keeps one store as long as it runs, and ranks that it starts again
find in it what those before them have written: where they listened, for example, though they are gone. Who
comes first decides whether that is read. So ranks agree on a prefix before they use a store. Each asks rank
0 with a number of its own, so that it takes no answer that was meant for another one; rank 0 answers until
all have heard.
"""

import secrets
import time
from typing import Any

from zero_full._compat import keys_under

MEETING = "zero_full/start"
LOOK_S = 0.01  # between looks for ranks that have not come yet


def fresh_part(store: Any, rank: int, ranks: int) -> Any:
    """The same part of the store on every rank, which all must ask for. See [Note: a used store]."""
    meeting = keys_under(MEETING, store)
    if rank == 0:
        name = secrets.token_hex(8)
        _answer(meeting, name, ranks)
    else:
        question = secrets.token_hex(8)
        meeting.set(f"asks/{rank}", question)
        name = meeting.get(f"answer/{question}").decode()
        meeting.set(f"{name}/heard/{rank}", "")
    return keys_under(name, meeting)


def _answer(meeting: Any, name: str, ranks: int) -> None:
    waiting, questions = set(range(1, ranks)), dict[int, bytes]()
    deadline = time.monotonic() + meeting.timeout.total_seconds()
    while waiting:
        for rank in sorted(waiting):
            if meeting.check([f"asks/{rank}"]):
                question = meeting.get(f"asks/{rank}")
                if questions.get(rank) != question:  # else it is known: this one, or one before it
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
