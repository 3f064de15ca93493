"""Compute the largest number of bytes that one rank saves, which an asynchronous save copies.

The simulation covers the first rank. Other ranks differ from it in three ways. They may have less padding in
a flat buffer, and so more elements. Replicas divide the saving of equal data, and the first of them saves the
remainder. Only the first of them saves buffers.
"""

from dataclasses import replace

from zero_full._compat import clean_name
from zero_full.checkpoint.save import SaveContents, share_of
from zero_full.shard.contents.keys import entry_of
from zero_full.shard.group.parameters import FlatParameters
from zero_full.shard.step.optimizer import ZeroOptimizer


def saved_bytes(taken: SaveContents, optimizer: ZeroOptimizer, expert_ranks: int) -> int:
    """Return the bytes saved by the rank with the most.

    `expert_ranks`: number of consecutive ranks that hold different experts, or 1.
    """
    communicators = optimizer.communicators
    pairs = communicators.dense, communicators.expert or communicators.dense
    dense, experts = ([0] * pair.shard_comm.size for pair in pairs)
    for flat, sizes in _sizes(taken, optimizer).items():
        totals, holders = experts if flat.kind.expert else dense, flat.replica_comm.size
        if communicators.tensor is not None and optimizer.contents.has_dtensors and not flat.kind.is_split:
            holders *= communicators.tensor.size  # tensor-parallel ranks save it together
        for rank in range(len(totals)):  # as the first of its replicas
            totals[rank] += sum(-(-f.numel // holders) * sizes[f.index] for f in flat.layout.fragments(rank))
    most = dict[int, int]()  # largest total by index among the replicas
    for rank in range(max(len(dense), expert_ranks * len(experts))):
        place = rank // expert_ranks % len(experts)
        total = dense[rank % len(dense)] + experts[place]
        most[place] = max(total, most.get(place, 0))
    across = pairs[1].replica_comm.size
    mine = (*taken.own, *(each for each in taken.cut if each.differs))
    own = sum(chunk.values.nbytes for chunk in mine if not taken.is_copy(chunk))
    whole = [chunk for chunk in taken.whole if not taken.is_copy(chunk)]
    for place in most:
        as_this_replica = (replace(chunk, holder=(place * across, chunk.holder[1])) for chunk in whole)
        most[place] += sum(share_of(chunk).values.nbytes for chunk in as_this_replica)
    return own + max(most.values())


def _sizes(taken: SaveContents, optimizer: ZeroOptimizer) -> dict[FlatParameters, list[int]]:
    """Return the saved bytes per element, values and state, of each parameter of each flat buffer.

    Copies of tied layers have 0: an earlier pipeline stage saves them. For a parameter without elements on
    the simulated rank, another one of its parameter group is used.
    """
    by_name, by_group = dict[str, int](), dict[int, int]()
    for chunk in taken.cut:
        if chunk.values.numel() and not chunk.differs:
            key, _ = entry_of(chunk.key) or (chunk.key, "")
            name = key.partition("/")[2]
            by_name[name] = by_name.get(name, 0) + chunk.values.itemsize
    named = [
        (flat, member, clean_name(member.name)) for flat in optimizer.sharded.flats for member in flat.members
    ]
    for _, member, name in named:
        if name in by_name:
            by_group.setdefault(member.group, by_name[name])
    found: dict[FlatParameters, list[int]] = {}
    is_copy = optimizer.communicators.is_copy
    for flat, member, name in named:
        size = 0 if is_copy(name) else by_name.get(name, by_group.get(member.group, 0))
        found.setdefault(flat, []).append(size)
    return found
