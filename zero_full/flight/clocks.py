"""One clock for all ranks.

[Note: clocks] Every rank counts microseconds from when it began to record. But nobody leaves a collective
before the last rank has come to it, and then all leave within moments. So two ranks' clocks differ by the
difference of their ends of the same collective: the median over all that both have made. Ranks that have no
collective in common are compared through others. What has failed is left out, and a broadcast: its source
may leave early.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

Ends = Mapping[int, int]  # of one collective, by rank
ONE_SIDED = ("broadcast",)


def offsets(ranks: Sequence[int], meetings: Iterable[Ends]) -> dict[int, int]:
    """What to take from each rank's clock, so that all show the first one's. Unknown ranks are left out."""
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
