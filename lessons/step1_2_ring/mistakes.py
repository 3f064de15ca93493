"""Wrong answers to lesson 1/2, for the museum."""

from lessons.museum import Mistake

CHANGES = "What changes"
BROKEN = "Break it on purpose"

MISTAKES = (
    Mistake(
        "no-way-round",
        "neighbours",
        "(comm.rank - 1) % comm.world_size",
        "comm.rank - 1",
        "rank 0 has no left neighbour: the ring is not closed",
        "lookalike",
        CHANGES,
    ),
    Mistake(
        "left-is-right",
        "neighbours",
        "return (comm.rank - 1) % comm.world_size, (comm.rank + 1) % comm.world_size",
        "return (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size",
        "left and right are exchanged",
        "lookalike",
        CHANGES,
    ),
    Mistake(
        "own-piece-sets-out",
        "reduce_scatter",
        "total = pieces[(rank - 1) % N].clone()",
        "total = pieces[rank].clone()",
        "each rank starts with its own piece, whose sum ends at another rank",
        "lookalike",
        CHANGES,
    ),
    Mistake(
        "sums-into-the-callers",
        "reduce_scatter",
        "total = comm.receive(mine, left) + mine",
        "total = mine.add_(comm.receive(mine, left))",
        "the sum is made in the caller's piece, which must stay as it is",
        "changed",
        CHANGES,
    ),
    Mistake(
        "receive-first",
        "reduce_scatter",
        "comm.send(total, right)\n"
        "        mine = pieces[(rank - 2 - round) % N]  # what the left neighbour passes on was "
        "one further left before\n"
        "        total = comm.receive(mine, left) + mine",
        "mine = pieces[(rank - 2 - round) % N]\n"
        "        coming = comm.receive(mine, left)\n"
        "        comm.send(total, right)\n"
        "        total = coming + mine",
        "every rank receives before any rank sends",
        "deadlock",
        BROKEN,
    ),
    Mistake(
        "nothing-is-added",
        "reduce_scatter",
        "comm.receive(mine, left) + mine",
        "comm.receive(mine, left)",
        "what arrives is passed on, and nothing is added",
        "lookalike",
        CHANGES,
    ),
    Mistake(
        "one-round-too-many",
        "reduce_scatter",
        "range(N - 1)",
        "range(N)",
        "the sum reaches its owner and goes on to the next rank",
        "lookalike",
        CHANGES,
    ),
    Mistake(
        "one-place-too-far",
        "reduce_scatter",
        "total = pieces[(rank - 1) % N].clone()  # of the piece that sets out here\n"
        "    for round in range(N - 1):\n"
        "        comm.send(total, right)\n"
        "        mine = pieces[(rank - 2 - round) % N]",
        "total = pieces[rank].clone()\n"
        "    for round in range(N - 1):\n"
        "        comm.send(total, right)\n"
        "        mine = pieces[(rank - 1 - round) % N]",
        "every piece sets out at its own rank, and so it ends at the rank before it",
        "foreign slice",
        CHANGES,
    ),
    Mistake(
        "one-round-too-few",
        "all_gather",
        "range(N - 1)",
        "range(N - 2)",
        "the last piece never arrives",
        "no advance",
        CHANGES,
    ),
    Mistake(
        "always-my-own",
        "all_gather",
        "comm.send(pieces[(rank - round) % N], right)",
        "comm.send(pieces[rank], right)",
        "every round sends the own piece, where the piece that has just arrived is to be passed on",
        "lookalike",
        CHANGES,
    ),
    Mistake(
        "not-in-the-callers",
        "all_gather",
        "coming.copy_(comm.receive(coming, left))",
        "coming = comm.receive(coming, left)",
        "an assignment leaves the caller's tensor as it was",
        "no advance",
        CHANGES,
    ),
    Mistake(
        "only-my-piece",
        "all_reduce",
        "    all_gather(comm, pieces)\n",
        "",
        "the sums are never collected",
        "not collected",
        CHANGES,
    ),
)
