"""Who does the work on which whole tensor: dealt evenly, and beside that where most of the tensor lies."""

from collections.abc import Iterable, Sequence
from heapq import heapreplace

Share = tuple[int, int]  # a rank, and how many elements of a tensor it has


def deal_work(
    works: Sequence[int], shares: Sequence[Sequence[Share]], world: int, rounds: int = 1
) -> list[tuple[int, int]]:
    """For each tensor the rank that works on it, and in which of so many rounds.

    `works` says how much there is to do on each tensor, and `shares` where it lies. No rank has more to do
    than the busiest one would have if the largest tensors were dealt first, each to the rank that has least;
    as far as that allows, a tensor goes to the rank that has most of it. In every round a rank has about the
    same share of its work.
    """
    order = sorted(range(len(works)), key=lambda each: (-works[each], each))
    dealt = _to_who_has_least(works, order, world)
    limit = max(_loads(works, dealt, world), default=0)
    near = _to_who_is_near(works, shares, order, world, limit)
    owners = near if max(_loads(works, near, world), default=0) <= limit else dealt
    begun, places = [0] * world, [(0, 0)] * len(works)
    for each in order:
        owner = owners[each]
        places[each] = owner, min(begun[owner] * rounds // max(limit, 1), rounds - 1)
        begun[owner] += works[each]
    return places


def _to_who_has_least(works: Sequence[int], order: Iterable[int], world: int) -> list[int]:
    least, owners = [(0, rank) for rank in range(world)], [0] * len(works)
    for each in order:
        load, owners[each] = least[0]
        heapreplace(least, (load + works[each], owners[each]))
    return owners


def _to_who_is_near(
    works: Sequence[int], shares: Sequence[Sequence[Share]], order: Iterable[int], world: int, limit: int
) -> list[int]:
    loads, owners = [0] * world, [0] * len(works)
    least = [(0, rank) for rank in range(world)]
    for each in order:
        while loads[least[0][1]] != least[0][0]:  # it was given something since
            heapreplace(least, (loads[least[0][1]], least[0][1]))
        by_size = sorted(shares[each], key=lambda share: (-share[1], share[0]))
        fitting = (rank for rank, _ in by_size if loads[rank] + works[each] <= limit)
        owners[each] = owner = next(fitting, least[0][1])
        loads[owner] += works[each]
    return owners


def _loads(works: Sequence[int], owners: Iterable[int], world: int) -> list[int]:
    loads = [0] * world
    for work, owner in zip(works, owners, strict=True):
        loads[owner] += work
    return loads
