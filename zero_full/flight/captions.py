"""Captions: a title and a sentence or two for each moment of a recording."""

from collections.abc import Mapping, Sequence
from typing import Any

TITLES = {
    "all_gather": "All-gather",
    "reduce_scatter": "Reduce-scatter",
    "all_reduce": "All-reduce",
    "all_to_all": "All-to-all",
    "sum": "Sum",
    "gather_objects": "Gather of objects",
    "broadcast": "Broadcast",
    "forward": "Forward",
    "backward": "Backward",
    "step": "Update",
}
BETWEEN = "between"  # the moment after a step
AT_ONCE_US = 100  # microseconds; ranks that arrive closer together than this count as simultaneous
NAMED = 3  # ranks named in a sentence, at most


def caption(frame: Mapping[str, Any], whereabouts: Mapping[int, str]) -> tuple[str, str]:
    """Return the title and the text of a frame.

    whereabouts  by missing rank, the rest of a sentence about it
    """
    if frame["what"] == BETWEEN:
        return f"After step {frame['step']}", "This is what each rank keeps between steps."
    title = TITLES.get(frame["what"], frame["what"])
    title = f"{title}: {frame['name']}" if frame["name"] else f"{title} of step {frame['step']}"
    return title, " ".join(_sentences(frame, whereabouts))


def in_sentence(what: str, name: str) -> str:
    """Return the name of a call, worded to stand inside a sentence."""
    title = TITLES.get(what, what).lower()
    return f"{title} of {name}" if name else title


def _sentences(frame: Mapping[str, Any], whereabouts: Mapping[int, str]) -> list[str]:
    sentences = []
    if whereabouts:
        waiting = [rank for rank, start in enumerate(frame["start"]) if start is not None]
        verb = "waits" if len(waiting) == 1 else "wait"
        sentences.append(
            f"{ranks_in_words(waiting).capitalize()} {verb} for {ranks_in_words(list(whereabouts))}."
        )
        shown = list(whereabouts.items())[:NAMED]
        sentences += [f"Rank {rank} {text}." for rank, text in shown]
    elif frame["last"] is not None:
        sentences.append(_waits(frame))
    elif frame["sent"] is None:
        sentences.append(_lengths(frame))
    if frame["failed"]:
        sentences.append(f"It failed: {frame['failed']}.")
    return sentences


def _waits(frame: Mapping[str, Any]) -> str:
    waits = {rank: us for rank, us in enumerate(frame["waited"]) if us > AT_ONCE_US}
    if not waits:
        return "All ranks arrived at the same time."
    longest = max(waits.values())
    verb = "waited" if len(waits) == 1 else "waited up to"
    return (
        f"{ranks_in_words(list(waits)).capitalize()} {verb} {ms(longest)} for rank {frame['last']}, the last."
    )


def _lengths(frame: Mapping[str, Any]) -> str:
    pairs = zip(frame["start"], frame["end"], strict=True)
    lengths = [end - start for start, end in pairs if start is not None and end is not None]
    if not lengths:
        return "It has not ended."
    low, high = ms(min(lengths)), ms(max(lengths))
    return f"It took {low}." if low == high else f"It took {low} to {high}."


def ms(us: int) -> str:
    """Format microseconds as milliseconds with three digits."""
    value = us / 1000
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} ms"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Format ranks as in "ranks 0, 1 and 2"; a long list ends in "and 5 others"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > NAMED + 1:
        return f"ranks {', '.join(map(str, ranks[:NAMED]))} and {len(ranks) - NAMED} others"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
