"""The bytes that the rank with the most of them saves, which an asynchronous save copies.

Ranks save as much as the first one, which is rehearsed, but for this: of a flat buffer another rank may have
less padding, and so more elements; what several ranks have they share, and the first of them has what cannot
be divided; and only the first of them saves buffers.
"""

from collections.abc import Sequence
from dataclasses import replace

from zero_full._compat import plain
from zero_full.checkpoint.save import Taken, share_of
from zero_full.shard.contents.state import entry_of
from zero_full.shard.group.parameters import FlatParameter
from zero_full.shard.step.optimizer import ZeroOptimizer


def saved_bytes(taken: Taken, optimizer: ZeroOptimizer, neighbours: int) -> int:
    """On the rank with the most. `neighbours`: ranks side by side that hold different experts, or 1."""
    groups = optimizer.groups
    pairs = groups.dense, groups.expert or groups.dense
    dense, experts = ([0] * pair.shard.size for pair in pairs)
    for flat, sizes in _cut(taken, optimizer).items():
        totals = experts if flat.kind.expert else dense
        for rank in range(len(totals)):
            totals[rank] += _share(flat, rank, sizes)
    most = dict[int, int]()  # by place among those that have the same: of the first, and of all others alike
    for rank in range(max(len(dense), neighbours * len(experts))):
        place = rank // neighbours % len(experts)
        total = dense[rank % len(dense)] + experts[place]
        most[place] = max(total, most.get(place, 0))
    across = pairs[1].across.size
    own = sum(chunk.values.nbytes for chunk in (*taken.own, *(each for each in taken.cut if each.differs)))
    return own + max(total + _of_whole(taken, place * across) for place, total in most.items())


def _cut(taken: Taken, optimizer: ZeroOptimizer) -> dict[FlatParameter, list[int]]:
    """How many bytes are saved for an element of each parameter of each flat buffer: values and state.

    Of what the rehearsed rank has nothing, as many as of another parameter of the optimizer's group.
    """
    by_name, by_group = dict[str, int](), dict[int, int]()
    for chunk in taken.cut:
        if chunk.values.numel() and not chunk.differs:
            key, _ = entry_of(chunk.key) or (chunk.key, "")
            name = key.partition("/")[2]
            by_name[name] = by_name.get(name, 0) + chunk.values.itemsize
    named = [(flat, member, plain(member.name)) for flat in optimizer.flats() for member in flat.members]
    for _, member, name in named:
        if name in by_name:
            by_group.setdefault(member.group, by_name[name])
    found: dict[FlatParameter, list[int]] = {}
    for flat, member, name in named:
        found.setdefault(flat, []).append(by_name.get(name, by_group.get(member.group, 0)))
    return found


def _share(flat: FlatParameter, rank: int, sizes: Sequence[int]) -> int:
    """The bytes that a rank of the flat buffer's saves, the first of those that have the same."""
    fragments, holders = flat.layout.fragments(rank), flat.across.size
    return sum(-(-fragment.numel // holders) * sizes[fragment.index] for fragment in fragments)


def _of_whole(taken: Taken, place: int) -> int:
    """Bytes of what every rank has, as the one with this place among them saves it."""
    chunks = (replace(chunk, holder=(place, chunk.holder[1])) for chunk in taken.whole)
    return sum(share_of(chunk).values.nbytes for chunk in chunks)
