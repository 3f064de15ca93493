"""The bytes that the rank with the most of them saves, which an asynchronous save copies.

Ranks save as much as the first one, which is rehearsed, but for this: of a flat buffer another rank may have
less padding, and so more elements; what several ranks have they share, and the first of them has what cannot
be divided; and only the first of them saves buffers.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from zero_full.checkpoint.save import Taken, share_of
from zero_full.shard import ZeroOptimizer
from zero_full.shard.contents import entry_of, plain
from zero_full.shard.flat import FlatParameter, Kind


def saved_bytes(taken: Taken, optimizer: ZeroOptimizer, neighbours: int) -> int:
    """On the rank with the most. `neighbours`: ranks side by side that hold different experts, or 1."""
    groups = optimizer.groups
    pairs = groups.dense, groups.expert or groups.dense
    dense, experts = ([0] * pair.shard.size for pair in pairs)
    widths = _widths(taken, optimizer)
    for flat in optimizer.flats():
        totals = experts if flat.kind.expert else dense
        for rank in range(len(totals)):
            totals[rank] += _cut_bytes(flat, rank, widths)
    most = dict[int, int]()  # by place among those that have the same: of the first, and of all others alike
    for rank in range(max(len(dense), neighbours * len(experts))):
        place = rank // neighbours % len(experts)
        total = dense[rank % len(dense)] + experts[place]
        most[place] = max(total, most.get(place, 0))
    across = pairs[1].across.size
    return max(total + _of_whole(taken, place * across) for place, total in most.items())


def _widths(taken: Taken, optimizer: ZeroOptimizer) -> dict[tuple[Kind, int], int]:
    """Bytes of an element that is cut: of its value, and of what the rule of its group keeps of it."""
    place = {plain(m.name): (flat.kind, m.group) for flat in optimizer.flats() for m in flat.members}
    of_each = Counter[str]()
    for chunk in taken.cut:
        key, _ = entry_of(chunk.key) or (chunk.key, "")
        of_each[key.partition("/")[2]] += chunk.values.itemsize
    widths = Counter[tuple[Kind, int]]()
    for name, width in of_each.items():
        widths[place[name]] = max(widths[place[name]], width)
    return widths


def _cut_bytes(flat: FlatParameter, rank: int, widths: Mapping[tuple[Kind, int], int]) -> int:
    """What a rank of the flat buffer's saves of it, the first of those that have the same."""
    holders = flat.across.size
    of_groups = {widths[flat.kind, member.group] for member in flat.members}
    if holders == 1 and len(of_groups) == 1:
        return flat.layout.owned[rank] * of_groups.pop()
    return sum(
        -(-fragment.numel // holders) * widths[flat.kind, flat.members[fragment.index].group]
        for fragment in flat.layout.fragments(rank)
    )


def _of_whole(taken: Taken, place: int) -> int:
    """Bytes of what every rank has, as the one with this place among them saves it."""
    chunks = (replace(chunk, holder=(place, chunk.holder[1])) for chunk in taken.whole)
    return sum(share_of(chunk).values.nbytes for chunk in chunks)
