"""In which order parameters are laid out, and which of them travel together."""

from collections.abc import Hashable, Sequence


def in_order(count: int) -> list[int]:
    """The order in which the model lists its parameters."""
    return list(range(count))


def backward_order(count: int) -> list[int]:
    """The last parameter first: roughly the order in which backward completes gradients."""
    return list(reversed(range(count)))


def round_robin(indices: Sequence[int], world: int) -> list[int]:
    """The indices dealt like cards to `world` hands, hand after hand: neighbours get different owners."""
    return [index for hand in range(world) for index in indices[hand::world]]


def deal(
    order: Sequence[int], numels: Sequence[int], kinds: Sequence[Hashable], limit: int
) -> list[list[int]]:
    """Parameters in buckets of one kind and at most `limit` elements; a larger one travels alone.

    A bucket is closed when it is full. Kinds that alternate do not close each other's buckets, so a bf16
    model with a few fp32 norms has as few collectives as its sizes allow. The answer is sorted by when a
    bucket is complete, because that is when it can leave.
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
