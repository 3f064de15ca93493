"""What the other rank says, and when it ends, if the last one dies, raises or makes fewer calls."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.gpu.day.place import Place, Tower, batch_of, engine_of, one_step
from tests.gpu.day.rows import say

STEPS, AT = 4, 2  # the step at which it happens
SHOWN = 300  # characters of what a rank has written at last


def train(place: Place, happens: Callable[[], None], **debug: Any) -> None:
    """Something happens to the last rank."""
    engine = engine_of(Tower(16, 3, place.device), 2, **debug)
    for step in range(STEPS):
        if step == AT and place.rank == place.world - 1:
            happens()
        one_step(engine, batch_of(place, 16, step))


def die() -> None:
    """As by the system's out-of-memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    """As by a bug in the loop of a user."""
    raise RuntimeError("this rank raises on purpose")


def killed(place: Place) -> None:
    """One rank dies."""
    train(place, die)


def raising(place: Place) -> None:
    """One rank raises."""
    train(place, fail)


def skipping(place: Place) -> None:
    """One rank makes no more calls, while collectives are compared between ranks."""
    seconds = 1.0 if place.tiny else 5.0
    train(place, lambda: time.sleep(3 * seconds), debug={"check_collectives": True, "timeout_s": seconds})


EVENTS: dict[str, Callable[[Place], None]] = {"killed": killed, "raising": raising, "skipping": skipping}


def ends(name: str, asked: Any, together: Callable[..., Sequence[Any]]) -> bool:
    """Whether every rank has ended by itself, none as if all were well, and the others say something."""
    ended = together(EVENTS[name], asked)
    others = ended[:-1]
    fine = all(one.code not in (None, 0) for one in ended) and all(one.said for one in others)
    for rank, one in enumerate(ended):
        how = "did not end" if one.code is None else f"code {one.code}"
        lines = one.said.splitlines() or ["nothing"]
        last = next((line for line in reversed(lines) if "Error" in line), lines[-1])
        say(event=name, rank=rank, ended=how, **{"after, s": round(one.after, 1)}, says=last[:SHOWN])
    say(event=name, fine=fine)
    return fine
