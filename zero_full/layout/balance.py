"""Assign whole tensors to ranks: balanced work first, then the rank that holds most of the tensor."""

from collections.abc import Iterable, Sequence
from heapq import heapreplace

Share = tuple[int, int]  # a rank, and the number of a tensor's elements that it holds


def assign_work(
    works: Sequence[int], shares: Sequence[Sequence[Share]], world: int, rounds: int = 1
) -> list[tuple[int, int]]:
    """Return for each tensor the rank that works on it, and the round (of `rounds`) in which it does.

    `works` are the costs of the tensors, and `shares` say which ranks hold them. The bound on a rank's total
    cost is that of the greedy schedule, which deals the costliest tensors first, each to the rank with the
    least so far. Within that bound a tensor goes to the rank that holds most of it. A rank's work is spread
    about evenly over the rounds.
    """
    order = sorted(range(len(works)), key=lambda each: (-works[each], each))
    dealt = _greedy_owners(works, order, world)
    limit = max(_loads(works, dealt, world), default=0)
    near = _nearest_owners(works, shares, order, world, limit)
    owners = near if max(_loads(works, near, world), default=0) <= limit else dealt
    begun, places = [0] * world, [(0, 0)] * len(works)
    for each in order:
        owner = owners[each]
        places[each] = owner, min(begun[owner] * rounds // max(limit, 1), rounds - 1)
        begun[owner] += works[each]
    return places


def _greedy_owners(works: Sequence[int], order: Iterable[int], world: int) -> list[int]:
    least, owners = [(0, rank) for rank in range(world)], [0] * len(works)
    for each in order:
        load, owners[each] = least[0]
        heapreplace(least, (load + works[each], owners[each]))
    return owners


def _nearest_owners(
    works: Sequence[int], shares: Sequence[Sequence[Share]], order: Iterable[int], world: int, limit: int
) -> list[int]:
    loads, owners = [0] * world, [0] * len(works)
    least = [(0, rank) for rank in range(world)]
    for each in order:
        while loads[least[0][1]] != least[0][0]:  # its load has grown since it was pushed
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
