"""The bytes that the rank with the most of them saves, which an asynchronous save copies.

Ranks save as much as the first one, which is rehearsed, but for this: of a flat buffer another rank may have
less padding, and so more elements; what several ranks have they share, and the first of them has what cannot
be divided; and only the first of them saves buffers.
"""

from dataclasses import replace

from zero_full._compat import plain
from zero_full.checkpoint.save import Taken, share_of
from zero_full.shard import ZeroOptimizer
from zero_full.shard.contents import entry_of
from zero_full.shard.flat import FlatParameter


def saved_bytes(taken: Taken, optimizer: ZeroOptimizer, neighbours: int) -> int:
    """On the rank with the most. `neighbours`: ranks side by side that hold different experts, or 1."""
    groups = optimizer.groups
    pairs = groups.dense, groups.expert or groups.dense
    dense, experts = ([0] * pair.shard.size for pair in pairs)
    for flat, nbytes in _cut(taken, optimizer).items():
        totals = experts if flat.kind.expert else dense
        for rank in range(len(totals)):
            totals[rank] += _elements(flat, rank) * nbytes // flat.layout.owned[0]
    most = dict[int, int]()  # by place among those that have the same: of the first, and of all others alike
    for rank in range(max(len(dense), neighbours * len(experts))):
        place = rank // neighbours % len(experts)
        total = dense[rank % len(dense)] + experts[place]
        most[place] = max(total, most.get(place, 0))
    across = pairs[1].across.size
    own = sum(chunk.values.nbytes for chunk in (*taken.own, *(each for each in taken.cut if each.differs)))
    return own + max(total + _of_whole(taken, place * across) for place, total in most.items())


def _cut(taken: Taken, optimizer: ZeroOptimizer) -> dict[FlatParameter, int]:
    """The bytes of what the rehearsed rank has of each flat buffer: values, and the optimizer's state."""
    flat_of = {plain(member.name): flat for flat in optimizer.flats() for member in flat.members}
    found = dict.fromkeys(optimizer.flats(), 0)
    for chunk in (each for each in taken.cut if not each.differs):
        key, _ = entry_of(chunk.key) or (chunk.key, "")
        found[flat_of[key.partition("/")[2]]] += chunk.values.nbytes
    return {flat: nbytes for flat, nbytes in found.items() if nbytes}


def _elements(flat: FlatParameter, rank: int) -> int:
    """How many a rank of the flat buffer's saves, the first of those that have the same."""
    holders = flat.across.size
    if holders == 1:
        return flat.layout.owned[rank]
    return sum(-(-fragment.numel // holders) for fragment in flat.layout.fragments(rank))


def _of_whole(taken: Taken, place: int) -> int:
    """Bytes of what every rank has, as the one with this place among them saves it."""
    chunks = (replace(chunk, holder=(place, chunk.holder[1])) for chunk in taken.whole)
    return sum(share_of(chunk).values.nbytes for chunk in chunks)
