"""What ranks leave of runs that never were, to be put together."""

from collections.abc import Sequence
from typing import Any

from zero_full.flight.rank_files import CLOSED, VERSION, RankEvent, RankTrace

Spell = tuple[
    int, int | None, str, int
]  # from and to in milliseconds, what, and the rank's clock ahead in us


def events(spells: Sequence[Spell], step: int = 1, held: int = 100) -> list[RankEvent]:
    """Calls of one communicator, one after the other."""
    return [
        RankEvent(
            what,
            "parameters a",
            1000 * start + ahead,
            step,
            {"parameters": held, "gradients": 2 * held, "optimizer": 4 * held},
            None if end is None else 1000 * end + ahead,
            sent=10,
            group=0,
            call=number,
        )
        for number, (start, end, what, ahead) in enumerate(spells)
    ]


def part(rank: int, *events: RankEvent, ranks: int = 2, ended: str = CLOSED) -> RankTrace:
    """What one of so many ranks has left."""
    about: dict[str, Any] = {
        "version": VERSION,
        "run": "one",
        "ranks": ranks,
        "stage": 2,
        "micro_batches": 1,
        "device": "cpu",
        "started": 1.0,
        "keeps": 3,
        "step": 1,
        "groups": [list(range(ranks))],
    }
    last = max((each.end or each.start for each in events), default=0)
    return RankTrace(rank, about, list(events), ended=ended, last=last)


def hang() -> list[RankTrace]:
    """Three ranks of four: a step, and then rank 2 goes another way. Names are such as a page must escape."""
    parts = []
    for rank in range(3):
        mine = [
            RankEvent("forward", "", 0, 1, {"parameters": 5_000_000}, 20_000 + 4000 * rank),
            *events([(21 + 4 * rank, 33, "reduce_scatter", 0), (34, 36, "all_gather", 0)]),
            RankEvent("backward", "", 40_000, 2, {"parameters": 5_000_000}, None),
        ]
        mine[2].name, mine[2].beside = "<b>norm</b> & 'more'", True
        what, name, failed = (
            ("sum", "norm", "") if rank == 2 else ("reduce_scatter", "gradients b", "timed out")
        )
        end = None if rank == 2 else 2_050_000
        mine.append(
            RankEvent(what, name, 50_000 + rank, 2, {"parameters": 9_000_000}, end, 7, 0, 2, False, failed)
        )
        parts.append(part(rank, *mine, ranks=4, ended="" if rank == 2 else "timed out"))
        parts[-1].about["groups"] = [[0, 1, 2]]
        parts[-1].ends = {1: 37_000}
    return parts


def steps_of(recording: dict[str, Any]) -> set[int]:
    """The steps of which it knows something."""
    return {frame["step"] for frame in recording["frames"]}
