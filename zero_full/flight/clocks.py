"""Alignment of the ranks' clocks.

[Note: clocks] Every rank counts microseconds from the start of its own recording. No rank leaves a collective
before the last one has entered it, and then all leave at nearly the same time. So the offset between two
ranks' clocks is the difference between their end times of the same collective: the median over all that both
have completed. Ranks without a common collective are compared through other ranks. Failed collectives do not
count, nor do broadcasts, whose source may leave early.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

Ends = Mapping[int, int]  # by rank: when it left one collective, in microseconds of its clock
ONE_SIDED = ("broadcast",)


def offsets(ranks: Sequence[int], meetings: Iterable[Ends]) -> dict[int, int]:
    """Return what to subtract from each rank's clock to get the first's, if the two can be compared."""
    met = [ends for ends in meetings if len(ends) > 1]
    known = {ranks[0]: 0} if ranks else {}
    while True:
        found: dict[int, list[int]] = {}
        for ends in met:
            here = next((rank for rank in sorted(ends) if rank in known), None)
            if here is not None:
                for rank in ends.keys() - known.keys():
                    found.setdefault(rank, []).append(ends[rank] - ends[here] + known[here])
        if not found:
            return known
        known |= {rank: round(median(differences)) for rank, differences in found.items()}
