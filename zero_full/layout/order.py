"""Orders of parameters in flat buffers, and their division into buckets."""

from collections.abc import Hashable, Sequence


def backward_order(count: int) -> list[int]:
    """Return the reverse order, roughly that in which backward completes gradients."""
    return list(reversed(range(count)))


def round_robin(indices: Sequence[int], world: int) -> list[int]:
    """Deal the indices like cards to `world` hands and list hand after hand: neighbours change owners."""
    return [index for hand in range(world) for index in indices[hand::world]]


def deal(
    order: Sequence[int], numels: Sequence[int], kinds: Sequence[Hashable], limit: int
) -> list[list[int]]:
    """Divide parameters into buckets of one kind and at most `limit` elements.

    A parameter larger than `limit` has a bucket of its own. A bucket is closed when it is full, and not by a
    parameter of another kind, so a bf16 model with a few fp32 norms has as few collectives as its sizes
    allow. Buckets are sorted by their last parameter in `order`, when they are complete and can be reduced.
    """
    buckets: list[list[int]] = []
    open_bucket: dict[Hashable, int] = {}
    room: dict[Hashable, int] = {}
    for index in order:
        kind, numel = kinds[index], numels[index]
        if kind not in open_bucket or numel > room[kind]:
            open_bucket[kind], room[kind] = len(buckets), limit
            buckets.append([])
        buckets[open_bucket[kind]].append(index)
        room[kind] -= numel
    position = {index: place for place, index in enumerate(order)}
    return sorted(buckets, key=lambda bucket: position[bucket[-1]])
